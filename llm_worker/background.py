"""One thread for work that must hold up neither the event loop nor the decode.

The thread gives way to the decode (`llm_engine/priority.py`). A thread cannot be killed, so work that does
not come to an end is left behind with its thread, and another takes over what is queued.

Owns: the work not yet begun. Thread: every method on the event loop; `work` on the thread.
Called by: `preparation_thread.py`.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from llm_engine.priority import yield_to_decode

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Task:
    future: Future[Any]
    work: Callable[[], Any]


@dataclass(slots=True, eq=False)
class _Strand:
    """A thread's queue, and what it is doing since when. None ends the thread."""

    queue: "SimpleQueue[_Task | None]" = field(default_factory=SimpleQueue)
    running: tuple[Future[Any], float] | None = None


class BackgroundThread:
    """Does one piece of work after the other."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._strand = self._spawn()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue a piece of work. Cancelling its future before its turn drops it."""
        future: Future[T] = Future()
        self._strand.queue.put(_Task(future, work))
        return future

    def abandon_if_stuck(self, limit_s: float) -> Future[Any] | None:
        """Leave behind what has been running for more than `limit_s`, and go on with the rest.

        Returns the future of what was left behind; it is done if ever that work ends.
        """
        stuck = self._strand
        running = stuck.running
        if running is None or self._clock() - running[1] <= limit_s:
            return None
        self._strand = self._spawn()
        while not stuck.queue.empty():
            self._strand.queue.put(stuck.queue.get())
        stuck.queue.put(None)
        return running[0]

    def close(self) -> None:
        """End the thread when its present work is done."""
        self._strand.queue.put(None)

    def _spawn(self) -> _Strand:
        strand = _Strand()
        # A daemon: work that never ends must not keep the process from exiting.
        threading.Thread(target=self._run, args=(strand,), name=self._name, daemon=True).start()
        return strand

    def _run(self, strand: _Strand) -> None:
        yield_to_decode()
        while (task := strand.queue.get()) is not None:
            if not task.future.set_running_or_notify_cancel():
                continue
            strand.running = (task.future, self._clock())
            settle = _do(task)
            strand.running = None
            settle()


def _do(task: _Task) -> Callable[[], None]:
    """Do the work; returns what tells its future how it went."""
    try:
        return partial(task.future.set_result, task.work())
    except BaseException as error:
        return partial(task.future.set_exception, error)
