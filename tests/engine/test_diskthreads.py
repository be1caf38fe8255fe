"""The threads that wait for the disk: orders in, outcomes out, on a real disk and on a full one."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from llm_engine.diskcache import Loaded, Lost, Outcome, Read, Remove, Stored, Write, Written
from llm_engine.diskthreads import DiskThreads
from llm_engine.hostcache import KvState
from llm_engine.prefix import Run
from llm_engine.sessiondir import SessionDir

PATIENCE_S = 20.0
MIB = 1 << 20


class SlowToWrite(SessionDir):
    """A disk that writes when it may."""

    may_write = threading.Event()

    def write(self, stored: Stored, state: KvState, used_at: float) -> None:
        assert self.may_write.wait(PATIENCE_S)
        super().write(stored, state, used_at)


@contextmanager
def disk(
    root: Path, kind: type[SessionDir] = SessionDir
) -> Iterator[tuple[DiskThreads, SimpleQueue[Outcome]]]:
    outcomes: SimpleQueue[Outcome] = SimpleQueue()
    threads = DiskThreads(kind.take(root, "f" * 64, None), outcomes.put)
    yield threads, outcomes
    threads.close(PATIENCE_S)


def write(number: int, n_bytes: int = 100) -> Write:
    stored = Stored(number, Run([number], 1, 0), False, n_bytes)
    return Write(stored, KvState(np.full(n_bytes, number, np.uint8), False, "f" * 64), used_at=0.0)


def test_what_is_written_is_read_and_removed(tmp_path: Path) -> None:
    order = write(1)
    with disk(tmp_path) as (threads, outcomes):
        threads.order(order)
        assert outcomes.get(timeout=PATIENCE_S) == Written(order.stored)
        threads.order(Read(order.stored))
        loaded = outcomes.get(timeout=PATIENCE_S)
        assert isinstance(loaded, Loaded)
        assert loaded.state.data.tobytes() == order.state.data.tobytes()
        threads.order(Remove(order.stored))
    assert not list(tmp_path.rglob("*.kv"))


def test_a_read_waits_for_no_write(tmp_path: Path) -> None:
    first = write(1)
    with disk(tmp_path, SlowToWrite) as (threads, outcomes):
        SlowToWrite.may_write.set()
        threads.order(first)
        outcomes.get(timeout=PATIENCE_S)
        SlowToWrite.may_write.clear()
        threads.order(write(2))
        threads.order(Read(first.stored))
        assert isinstance(outcomes.get(timeout=PATIENCE_S), Loaded)
        SlowToWrite.may_write.set()
        assert isinstance(outcomes.get(timeout=PATIENCE_S), Written)


def test_a_file_that_is_gone_is_lost(tmp_path: Path) -> None:
    order = Read(write(1).stored)
    with disk(tmp_path) as (threads, outcomes):
        threads.order(order)
        assert outcomes.get(timeout=PATIENCE_S) == Lost(order.stored)


def test_the_folder_is_free_for_the_next_when_they_are_closed(tmp_path: Path) -> None:
    for _ in range(2):
        with disk(tmp_path) as (threads, _):
            threads.order(write(1))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["f" * 16 + "-0"]


def test_a_disk_that_hangs_does_not_hang_whoever_closes_it(tmp_path: Path) -> None:
    SlowToWrite.may_write.clear()
    folder = SlowToWrite.take(tmp_path, "f" * 64, None)
    threads = DiskThreads(folder, lambda _outcome: None)
    threads.order(write(1))
    threads.close(timeout_s=0.05)
    other = SessionDir.take(tmp_path, "f" * 64, None)  # not the one that is still written in
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2
    other.close()
    SlowToWrite.may_write.set()
    threads.close(PATIENCE_S)


def test_a_full_disk_is_said_once_and_used_again_when_it_has_room(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    orders = [write(1, MIB), write(2, MIB), write(3, MIB), write(4, MIB)]
    with disk(small_disk) as (threads, outcomes), caplog.at_level(logging.WARNING):
        for order in orders[:3]:
            threads.order(order)
        assert [outcomes.get(timeout=PATIENCE_S) for _ in orders[:3]] == [
            Written(orders[0].stored),
            Lost(orders[1].stored),
            Lost(orders[2].stored),
        ]
        assert caplog.messages == ["sessions are not kept on disk: No space left on device"]
        assert not list(small_disk.rglob("*.tmp"))
        threads.order(Remove(orders[0].stored))
        threads.order(orders[3])
        assert outcomes.get(timeout=PATIENCE_S) == Written(orders[3].stored)
