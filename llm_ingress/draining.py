"""Why a process should end, and how soon.

No sockets, no signals: the command lines own those and tell `Drain`. Shared with the worker.
"""

import asyncio
import time
from collections.abc import Callable

# One decision may arrive as two signals: a supervisor signals the whole process group, and `make`, which is
# in it, passes the signal on. Whoever asks again after so long means it.
SECOND_THOUGHT_S = 0.3


class Drain:
    """Finish what runs; end at once; or end because nothing can finish. Thread: event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.begun = asyncio.Event()
        self.is_urgent = asyncio.Event()
        self.has_failed = asyncio.Event()
        self._clock = clock
        self._asked_at = 0.0

    def ask(self) -> None:
        """Begin to drain; asked again `SECOND_THOUGHT_S` later, end at once."""
        if not self.begun.is_set():
            self._asked_at = self._clock()
            self.begun.set()
        elif self._clock() - self._asked_at >= SECOND_THOUGHT_S:
            self.is_urgent.set()

    def fail(self) -> None:
        """Begin to drain, or go on with it, without waiting for what runs: it can no longer finish."""
        self.has_failed.set()
        self.begun.set()
