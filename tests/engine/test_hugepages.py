"""Huge pages, asked of the system that the tests run on."""

import mmap
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llm_engine import llama
from llm_engine.hugepages import HUGE, huge_pages
from llm_engine.model import Model

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not SETTING.exists() or "[never]" in SETTING.read_text(),
    reason="this system gives no huge pages",
)

PR_SET_THP_DISABLE = 41  # prctl(2)
# Of what is filled already; MADV_COLLAPSE is of Linux 6.1.
collapses = pytest.mark.skipif(
    [int(n) for n in re.findall(r"\d+", platform.release())[:2]] < [6, 1], reason="this kernel collapses none"
)

N_PAGES = 16


def n_huge_bytes() -> int:
    """What of this process lies in huge pages."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(kib) << 10 for kib in re.findall(r"AnonHugePages: +(\d+)", rollup))


def private() -> mmap.mmap:
    """A mapping that has no huge pages of itself, on a system that gives them to everybody neither."""
    mapping = mmap.mmap(-1, N_PAGES * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return mapping


def fill(mapping: mmap.mmap) -> None:
    for start in range(0, len(mapping), mmap.PAGESIZE):
        mapping[start] = 1


@collapses
def test_what_was_filled_already_is_collapsed() -> None:
    before = n_huge_bytes()
    with huge_pages():
        mapping = private()
        fill(mapping)
        assert n_huge_bytes() - before < HUGE
    assert n_huge_bytes() - before >= (N_PAGES - 1) * HUGE  # the first is not aligned
    assert all(mapping[start] == 1 for start in range(0, len(mapping), mmap.PAGESIZE))


def test_what_is_filled_later_comes_in_huge_pages() -> None:
    before = n_huge_bytes()
    with huge_pages():
        mapping = private()
    fill(mapping)
    assert n_huge_bytes() - before >= (N_PAGES - 1) * HUGE


def test_what_was_there_before_is_left_alone() -> None:
    mapping = private()
    fill(mapping)
    before = n_huge_bytes()
    with huge_pages():
        pass
    assert n_huge_bytes() == before
    mapping.close()


def test_a_mapped_file_may_have_any_name(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"\xff \x0c\n\xe2\x80\xa8.gguf")
    odd.write_bytes(bytes(mmap.PAGESIZE))
    with odd.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), huge_pages():
        pass


def test_where_no_mappings_are_told_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> bytes:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_bytes", missing)
    before = n_huge_bytes()
    with huge_pages():
        mapping = private()
    fill(mapping)
    assert n_huge_bytes() - before < HUGE


def test_a_process_that_may_have_none_goes_on_without() -> None:
    script = f"""if True:
        import ctypes
        from tests.engine import test_hugepages as t
        ctypes.CDLL(None).prctl({PR_SET_THP_DISABLE}, 1, 0, 0, 0)
        with t.huge_pages():
            mapping = t.private()
            t.fill(mapping)
        assert t.n_huge_bytes() == 0, t.n_huge_bytes()
        assert mapping[0] == mapping[t.HUGE] == 1
    """
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("text", [None, "always madvise [never]\n"])
def test_where_none_are_wanted_none_are_taken(tmp_path: Path, text: str | None) -> None:
    setting = tmp_path / "enabled"
    if text is not None:
        setting.write_text(text)
    before = n_huge_bytes()
    with huge_pages(setting):
        mapping = private()
        fill(mapping)
    assert n_huge_bytes() == before
    mapping.close()


@collapses
@pytest.mark.model
def test_weights_are_copied_into_huge_pages_unless_they_are_mapped(smollm2: Path) -> None:
    before = n_huge_bytes()
    mapped = Model.load(smollm2, llama.ModelParams(mmap=True))
    assert n_huge_bytes() - before < 8 * HUGE
    copied = Model.load(smollm2)
    assert n_huge_bytes() - before > 0.9 * llama.n_weights_bytes(copied.pointer)
    mapped.close()
    copied.close()
