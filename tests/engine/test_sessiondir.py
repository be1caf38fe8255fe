"""Engines that share a directory: each has its folder, and what nobody comes back for is removed."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from llm_engine.diskcache import Stored
from llm_engine.errors import ConfigError
from llm_engine.hostcache import KvState
from llm_engine.prefix import Run
from llm_engine.sessiondir import SessionDir, make_session_dir

MINE, ANOTHER = "a" * 64, "b" * 64
TTL_S = 300.0


def take(root: Path, fingerprint: str = MINE) -> SessionDir:
    return SessionDir.take(root, fingerprint, TTL_S)


def keep(folder: SessionDir, number: int, fingerprint: str = MINE, *, age_s: float = 0.0) -> None:
    stored = Stored(number, Run([number], 1, 0), False, 10)
    state = KvState(np.full(10, number, np.uint8), False, fingerprint)
    folder.write(stored, state, time.monotonic() - age_s)


def numbers(folder: SessionDir) -> list[int]:
    return sorted(stored.number for stored, _ in folder.found())


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.*"))


def test_the_next_engine_finds_what_the_last_one_kept(tmp_path: Path) -> None:
    first = take(tmp_path)
    keep(first, 7, age_s=100)
    first.close()
    second = take(tmp_path)
    ((stored, used_at),) = second.found()
    assert (stored.number, stored.run.tokens, stored.n_bytes) == (7, [7], 10)
    assert time.monotonic() - used_at == pytest.approx(100, abs=5)
    state = second.read(stored)
    assert state is not None
    assert state.data.tobytes() == bytes([7]) * 10
    second.close()


def test_two_engines_at_once_have_a_folder_each(tmp_path: Path) -> None:
    first, second = take(tmp_path), take(tmp_path)
    keep(first, 1)
    keep(second, 1)
    assert files(tmp_path) == ["aaaaaaaaaaaaaaaa-0/1.kv", "aaaaaaaaaaaaaaaa-1/1.kv"]
    first.sweep()
    first.close()
    third = take(tmp_path)
    assert numbers(third) == [1]
    second.close()
    third.close()


def test_the_folder_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from llm_engine.sessiondir import SessionDir\n"
        f"taken = SessionDir.take(Path({str(tmp_path)!r}), {MINE!r}, None); print('taken', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "taken\n"
        other = take(tmp_path)
        holder.kill()
        holder.wait()
    assert sorted(os.listdir(tmp_path)) == ["aaaaaaaaaaaaaaaa-0", "aaaaaaaaaaaaaaaa-1", "lock"]
    free = take(tmp_path)
    keep(free, 1)
    assert files(tmp_path) == ["aaaaaaaaaaaaaaaa-0/1.kv"]
    other.close()
    free.close()


def test_what_another_model_kept_is_left_alone_until_it_is_too_old(tmp_path: Path) -> None:
    other = take(tmp_path, ANOTHER)
    keep(other, 1, ANOTHER, age_s=TTL_S - 100)
    keep(other, 2, ANOTHER, age_s=TTL_S + 1)
    mine = take(tmp_path)
    mine.sweep()
    assert len(files(tmp_path)) == 2  # it is somebody's still
    other.close()
    mine.sweep()
    assert files(tmp_path) == ["bbbbbbbbbbbbbbbb-0/1.kv"]
    assert numbers(mine) == []
    mine.close()


def test_a_file_of_another_model_in_its_own_folder_is_not_used(tmp_path: Path) -> None:
    """Folders are named by the beginning of a fingerprint only."""
    mine = take(tmp_path)
    keep(mine, 1, MINE[:-1] + "b")
    assert numbers(mine) == []
    assert files(tmp_path) == []
    mine.close()


def test_what_is_old_half_written_or_broken_is_removed_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = take(tmp_path)
    keep(mine, 1, age_s=TTL_S + 1)
    keep(mine, 2)
    keep(mine, 3)
    folder = tmp_path / "aaaaaaaaaaaaaaaa-0"
    (folder / "3.kv").write_bytes((folder / "3.kv").read_bytes()[:-1])
    (folder / "4.tmp").write_bytes(b"half")
    assert numbers(mine) == [2]
    assert files(tmp_path) == ["aaaaaaaaaaaaaaaa-0/2.kv"]
    (line,) = caplog.messages
    assert "3.kv is of no use and removed: " in line
    mine.close()


def test_a_file_that_broke_since_is_removed_when_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = take(tmp_path)
    keep(mine, 1)
    ((stored, _),) = mine.found()
    path = tmp_path / "aaaaaaaaaaaaaaaa-0" / "1.kv"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert mine.read(stored) is None
    assert files(tmp_path) == []
    assert len(caplog.messages) == 1
    assert mine.read(stored) is None  # nor when it is not there at all
    mine.close()


def test_nobody_else_may_look_into_it(tmp_path: Path) -> None:
    root = tmp_path / "new" / "sessions"
    make_session_dir(root)
    mine = take(root)
    for folder in (root, root / "aaaaaaaaaaaaaaaa-0"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "aaaaaaaaaaaaaaaa-0" / "lock").stat().st_mode) == 0o600
    mine.close()


def test_a_place_that_is_no_directory_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"session_dir .*file: File exists"):
        make_session_dir(tmp_path / "file")
