"""A file of kept KV is whole, or it is none."""

import os
import stat
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_engine.errors import SessionFileError
from llm_engine.hostcache import KvState
from llm_engine.prefix import Run, Trim
from llm_engine.sessionfile import read_header, read_state, write_session

STATE = np.arange(200, dtype=np.uint8)
RUN = Run([5, 6, 70_000], 3, 1)
KV = KvState(STATE, True, "f" * 64)


def written(folder: Path) -> Path:
    path = folder / "1.kv"
    write_session(path, RUN, KV, used_at=1000.5)
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    header, state = read_header(path), read_state(path)
    assert (header.run.tokens, header.run.n_cells, header.run.trims_from) == (RUN.tokens, 3, 1)
    assert (header.fingerprint, header.is_checkpoint, header.n_bytes) == (KV.fingerprint, True, 200)
    assert (state.fingerprint, state.is_checkpoint) == (KV.fingerprint, True)
    assert state.data.tobytes() == STATE.tobytes()


def test_a_run_that_can_never_be_cut_is_still_one(tmp_path: Path) -> None:
    run = Run.begun(Trim.NOWHERE).continued([1, 2, 3], 3)
    write_session(tmp_path / "1.kv", run, KV, used_at=0.0)
    assert read_header(tmp_path / "1.kv").run.trims_from == run.trims_from


def test_it_is_nobody_elses_to_read_and_says_when_it_was_used(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_mtime == 1000.5
    assert os.listdir(tmp_path) == ["1.kv"]


@given(st.data())
def test_a_file_with_any_byte_flipped_is_none(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = written(Path(folder))
        whole = path.read_bytes()
        place = data.draw(st.integers(0, len(whole) - 1))
        flipped = whole[place] ^ data.draw(st.integers(1, 255))
        path.write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
        with pytest.raises(SessionFileError):
            read_state(path)


@given(st.data())
def test_a_file_that_is_half_or_longer_is_none(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = written(Path(folder))
        whole = path.read_bytes()
        n_bytes = data.draw(st.integers(0, len(whole) - 1))
        for content in (whole[:n_bytes], whole + b"x"):
            path.write_bytes(content)
            with pytest.raises(SessionFileError):
                read_header(path)
            with pytest.raises(SessionFileError):
                read_state(path)


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "1.kv").mkdir()  # nothing can be renamed to that
    with pytest.raises(OSError, match="directory"):
        written(tmp_path)
    assert os.listdir(tmp_path) == ["1.kv"]
