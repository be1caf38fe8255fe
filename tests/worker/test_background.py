"""The thread beside the decode: in order, niced, and never held up by what does not end."""

import os
import sys
import threading
from concurrent.futures import CancelledError
from functools import partial

import pytest

from llm_engine.priority import NICENESS
from llm_worker.background import BackgroundThread

WAIT_S = 10


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_work_is_done_in_order_on_one_thread_that_is_not_the_callers() -> None:
    thread = BackgroundThread("test")
    done: list[int] = []

    def work(number: int) -> int:
        done.append(number)
        return threading.get_ident()

    futures = [thread.submit(partial(work, number)) for number in range(5)]
    idents = {future.result(WAIT_S) for future in futures}
    thread.close()
    assert done == [0, 1, 2, 3, 4]
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_an_exception_is_its_futures_and_the_thread_goes_on() -> None:
    thread = BackgroundThread("test")
    failed = thread.submit(lambda: 1 / 0)
    after = thread.submit(lambda: "fine")
    with pytest.raises(ZeroDivisionError):
        failed.result(WAIT_S)
    assert after.result(WAIT_S) == "fine"
    thread.close()


def test_cancelled_work_is_never_begun() -> None:
    thread = BackgroundThread("test")
    gate = threading.Event()
    begun: list[int] = []
    first = thread.submit(lambda: gate.wait(WAIT_S))
    second = thread.submit(lambda: begun.append(2))
    third = thread.submit(lambda: begun.append(3))
    assert second.cancel()
    gate.set()
    assert first.result(WAIT_S)
    third.result(WAIT_S)
    thread.close()
    assert begun == [3]
    with pytest.raises(CancelledError):
        second.result(WAIT_S)


def test_stuck_work_is_left_behind_and_what_was_queued_goes_on() -> None:
    clock = Clock()
    thread = BackgroundThread("test-stuck", clock)
    (abandoned,) = (t for t in threading.enumerate() if t.name == "test-stuck")
    begun, gate = threading.Event(), threading.Event()

    def never_ends() -> str:
        begun.set()
        gate.wait(WAIT_S)
        return "ended after all"

    stuck = thread.submit(never_ends)
    queued = thread.submit(threading.get_ident)
    assert begun.wait(WAIT_S)
    clock.now = 5.0
    assert thread.abandon_if_stuck(5.0) is None
    clock.now = 5.1
    assert thread.abandon_if_stuck(5.0) is stuck
    assert thread.abandon_if_stuck(5.0) is None
    ident = queued.result(WAIT_S)
    assert thread.submit(threading.get_ident).result(WAIT_S) == ident
    gate.set()
    assert stuck.result(WAIT_S) == "ended after all"
    abandoned.join(WAIT_S)
    assert not abandoned.is_alive()
    thread.close()


def test_an_idle_thread_is_not_stuck() -> None:
    clock = Clock()
    thread = BackgroundThread("test", clock)
    thread.submit(lambda: None).result(WAIT_S)
    clock.now = 1e9
    assert thread.abandon_if_stuck(1.0) is None
    thread.close()


@pytest.mark.skipif(sys.platform != "linux", reason="priorities belong to threads on Linux only")
def test_the_thread_is_niced_and_no_other_is() -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = BackgroundThread("test")
    nice = thread.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result(WAIT_S)
    thread.close()
    assert nice >= NICENESS
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
