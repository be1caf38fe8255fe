"""The threads that wait for the disk, so that no step does: one that writes and removes, one that reads.

Orders are done in their order, but a read waits for no write: somebody waits for it. What came of an order is
reported from the thread that did it. The threads give way to the decode, since a checksum of a large state
takes time.

Owns: the orders not yet done. Thread: `order` and `close` from any. Called by: `engine.py`.
"""

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from llm_engine.diskcache import Loaded, Lost, Order, Outcome, Read, Remove, Sweep, Write, Written
from llm_engine.priority import yield_to_decode
from llm_engine.sessiondir import SessionDir

logger = logging.getLogger(__name__)


class DiskThreads:
    """What is ordered is done to the files in `folder`, which is left when they are closed."""

    def __init__(self, folder: SessionDir, report: Callable[[Outcome], None]) -> None:
        self._folder = folder
        self._report = report
        self._is_failing = False  # writing: said once, until it works again
        self._reads: SimpleQueue[Order | None] = SimpleQueue()  # None ends the thread
        self._writes: SimpleQueue[Order | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=name, daemon=True)
            for name, queue in (("llm-engine-read", self._reads), ("llm-engine-write", self._writes))
        ]
        for thread in self._threads:
            thread.start()

    def order(self, order: Order) -> None:
        queue = self._reads if isinstance(order, Read) else self._writes
        queue.put(order)

    def close(self, timeout_s: float) -> None:
        """Finish what is ordered. If the disk is slower, the folder is left only when the process ends."""
        deadline = time.monotonic() + timeout_s
        for queue in (self._reads, self._writes):
            queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._folder.close()

    def _run(self, queue: "SimpleQueue[Order | None]") -> None:
        yield_to_decode()
        while (order := queue.get()) is not None:
            try:
                self._do(order)
            except Exception:
                logger.exception("the session directory: an order failed")
                if isinstance(order, Read | Write):
                    self._report(Lost(order.stored))

    def _do(self, order: Order) -> None:
        match order:
            case Write():
                self._write(order)
            case Read(stored):
                state = self._folder.read(stored)
                self._report(Lost(stored) if state is None else Loaded(stored, state))
            case Remove(stored):
                self._folder.remove(stored)
            case Sweep():
                self._folder.sweep()

    def _write(self, order: Write) -> None:
        try:
            self._folder.write(order.stored, order.state, order.used_at)
        except OSError as error:
            if not self._is_failing:
                logger.warning("sessions are not kept on disk: %s", error.strerror)
            self._is_failing = True
            self._report(Lost(order.stored))
        else:
            self._is_failing = False
            self._report(Written(order.stored))
