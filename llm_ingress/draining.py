"""What was asked of a process that should end.

No sockets, no signals: the command lines own those and tell `Drain`. Shared with the worker.
"""

import asyncio


class Drain:
    """Finish what runs, or end at once. Thread: event loop."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.is_urgent = asyncio.Event()

    def ask(self) -> None:
        """Begin to drain; asked a second time, end at once."""
        (self.is_urgent if self.begun.is_set() else self.begun).set()
