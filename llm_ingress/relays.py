"""Relays with something to pass on: each is called once, in the next turn of the event loop.

What workers send in one read is mostly for many streams, and at times several pieces for one. So the read is
taken in to its end first, and then every stream concerned is served once, all in one call of the loop.
"""

import asyncio
import logging
from typing import Protocol

logger = logging.getLogger(__name__)


class Relay(Protocol):
    """One stream."""

    def pass_on(self) -> None:
        """Pass on what is there."""


class Relays:
    """Those that are due. Thread: event loop."""

    def __init__(self) -> None:
        self._due: dict[Relay, None] = {}  # in the order in which they were added

    def add(self, relay: Relay) -> None:
        """Have a relay called, once however often it is added until then."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._pass_on)
        self._due[relay] = None

    def _pass_on(self) -> None:
        due, self._due = self._due, {}
        for relay in due:
            try:
                relay.pass_on()
            except Exception:
                logger.exception("passing on a stream failed")
