"""What becomes of an HTTP/1.1 head that makes no request: one that is not HTTP, or that comes too slowly.

hypercorn 0.18 answers the first with a bare status, and waits for the second as long as it keeps an idle
connection. Here both get the API's error with the headers of every answer, and the connection is closed. The
time of a head counts from its first byte; no answer under way, no wait for a further request is part of it.
On HTTP/2 a connection without a request is closed when its keep-alive time is over, whatever it sends.

A head that does make one is passed on as the application knows it: `plain` says how.

Owns: the clock of one head. Reaches into hypercorn, like `h2_flow.py`. Used by: `express.py`, which
installs its class with the short way added; `serving.py`, for its settings.
"""

import asyncio
import logging
import re
import uuid

import h11
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h11 import H11Protocol

from llm_ingress.api.errors import ApiError, head_timeout, unreadable_head
from llm_ingress.asgi import UNBUFFERED

logger = logging.getLogger(__name__)

_ORIGIN = re.compile(rb"\Ahttps?://[^/?#]*", re.IGNORECASE)


class HeadSettings(Config):
    """hypercorn's configuration, and how long a request's head may take."""

    head_timeout_s: float = 30.0


class BoundedHeadH11(H11Protocol):
    """An HTTP/1.1 connection whose heads are bounded in time, and refused in the API's words."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        assert isinstance(self.config, HeadSettings), f"configured by {type(self.config)}"
        self._timeout_s = self.config.head_timeout_s
        self._timer: asyncio.TimerHandle | None = None

    async def handle(self, event: Event) -> None:
        if isinstance(event, Closed):
            self._stop_clock()
        await super().handle(event)
        if isinstance(event, RawData) and self._timer is None and self._is_amid_head:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout_s, self.task_group.spawn, self._give_up)

    @property
    def _is_amid_head(self) -> bool:
        """Whether a head has begun and is not complete."""
        return self.connection.their_state is h11.IDLE and bool(self.connection.trailing_data[0])

    async def _create_stream(self, request: h11.Request) -> None:
        self._stop_clock()
        await super()._create_stream(plain(request))

    async def _give_up(self) -> None:
        if self._is_amid_head:
            await self._refuse(head_timeout(self._timeout_s))
            await self.send(Closed())

    async def _send_error_response(self, status_code: int) -> None:
        self._stop_clock()
        await self._refuse(unreadable_head(status_code))

    async def _refuse(self, error: ApiError) -> None:
        request_id, body = uuid.uuid4().hex, error.body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            (b"x-request-id", request_id.encode()),
            *UNBUFFERED,
            *((name.encode(), value.encode()) for name, value in error.headers),
        ]
        logger.info("request %s refused: status=%d code=%s", request_id, error.status, error.code)
        await self._send_h11_event(h11.Response(status_code=error.status, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def plain(request: h11.Request) -> h11.Request:
    """Return a request with the path as its target, and without an `Upgrade`, since nothing else is spoken.

    Source: RFC 9112 section 3.2.2, a server must take the whole URL too; RFC 9110 section 7.8, it may ignore
    an upgrade.
    """
    target = _ORIGIN.sub(b"", request.target)
    headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
    if target == request.target and len(headers) == len(request.headers):
        return request
    if not target.startswith((b"/", b"*")):
        target = b"/" + target
    return h11.Request(
        method=request.method, target=target, headers=headers, http_version=request.http_version
    )
