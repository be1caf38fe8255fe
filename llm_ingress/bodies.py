"""Reading request bodies within three bounds: bytes of one, time of one, bytes of all being read.

Owns: how many bytes of bodies are held while they are read, and which are. A body takes no lane before it is
complete. Called by: `exchange.py`; `public.py`, which turns them away when no more lanes are to be had.
"""

import asyncio
from collections.abc import Callable

from llm_ingress.api.errors import ApiError, body_timeout, overloaded, request_too_large
from llm_ingress.asgi import Call, ClientLeft
from llm_ingress.errors import RefusalReason

RETRY_AFTER_S = 2


class Bodies:
    """The bodies being read now. Thread: event loop."""

    def __init__(self, *, limit_bytes: int, total_bytes: int, timeout_s: float) -> None:
        self._limit_bytes = limit_bytes
        self._total_bytes = total_bytes
        self._timeout_s = timeout_s
        self._n_bytes = 0
        self._timers: set[asyncio.Timeout] = set()  # one for each body being read
        self._refusal: Callable[[], ApiError] | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes held by, or promised to, the bodies being read now."""
        return self._n_bytes

    async def read(self, call: Call) -> bytes:
        """Read one body.

        Raises: ApiError (408, 413, 503) with the rest of the body unread; ClientLeft.
        """
        if self._refusal is not None:
            raise self._refusal()
        reading = _Reading(self, _declared_length(call))
        timer = asyncio.timeout(self._timeout_s)
        self._timers.add(timer)
        try:
            async with timer:
                return await reading.read(call)
        except TimeoutError as error:
            raise (self._refusal() if self._refusal else body_timeout(self._timeout_s)) from error
        finally:
            self._timers.discard(timer)
            self._n_bytes -= reading.n_reserved

    def turn_away(self, refusal: Callable[[], ApiError]) -> None:
        """Refuse every body that is not complete, and those to come: the requests would come to nothing."""
        self._refusal = refusal
        for timer in self._timers:
            if not timer.expired():
                timer.reschedule(0)

    def reserve(self, n_bytes: int, n_of_this: int) -> None:
        """Make room for `n_bytes` more of a body that then has `n_of_this`."""
        if n_of_this > self._limit_bytes:
            raise request_too_large(self._limit_bytes)
        if self._n_bytes + n_bytes > self._total_bytes:
            raise overloaded(
                RefusalReason.RING_FULL, RETRY_AFTER_S, "too much is being uploaded at the moment"
            )
        self._n_bytes += n_bytes


class _Reading:
    """One body on its way: room is reserved at once for what it declares, as it comes for the rest."""

    def __init__(self, bodies: Bodies, n_declared: int) -> None:
        self._bodies = bodies
        # Grown in one piece: thousands of small ones would leave the heap in holes, and the process large.
        self._body = bytearray()
        self.n_reserved = 0
        self._reserve_up_to(n_declared)

    async def read(self, call: Call) -> bytes:
        while True:
            message = await call.receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            data = message.get("body", b"")
            self._reserve_up_to(len(self._body) + len(data))
            self._body += data
            if not message.get("more_body", False):
                return bytes(self._body)

    def _reserve_up_to(self, n_bytes: int) -> None:
        n_more = n_bytes - self.n_reserved
        if n_more > 0:
            self._bodies.reserve(n_more, n_bytes)
            self.n_reserved = n_bytes


def _declared_length(call: Call) -> int:
    """Return the body's length as the client declares it; 0 where it does not say."""
    declared = call.header(b"content-length") or ""
    return int(declared) if declared.isascii() and declared.isdigit() else 0
