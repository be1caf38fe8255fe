"""The short way for an answer under way: its bytes go to the connection at once, past hypercorn's events.

By the usual way each event of a stream becomes a message, two more events and bytes behind a lock, in five
coroutines: more work than all the rest of relaying it. The short way is open while nothing is waiting to be
sent; whoever finds it shut goes the usual way, which waits for a slow client.

Reaches into hypercorn, as `h2_flow.py` does. Called by: `serving.py`, once, before it serves; `exchange.py`,
which finds an `Express` (`asgi.py`) among its scope's extensions.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import h2.events
import h11
import hypercorn.protocol
from h2.exceptions import ProtocolError
from hypercorn.events import Event
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response, StreamClosed
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.protocol.ws_stream import WSStream

from llm_ingress.asgi import EXPRESS, Express
from llm_ingress.h1_head import BoundedHeadH11
from llm_ingress.h2_flow import FlowControlledH2


def install() -> None:
    """Put the classes here where hypercorn looks for its own; after `h2_flow.install`."""
    vars(hypercorn.protocol)["H11Protocol"] = ExpressH11
    vars(hypercorn.protocol)["H2Protocol"] = ExpressH2


class ExpressH11(BoundedHeadH11):
    """An HTTP/1.1 connection and the short way for its answer, beside which nothing else writes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._transport = _transport_of(self.send)
        self._is_chunked = False  # the head of such an answer has been sent

    def takes(self, n_bytes: int) -> bool:
        return self._is_chunked and self._transport.get_write_buffer_size() == 0

    def write(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, StreamClosed):
            self._is_chunked = False
        await super().stream_send(event)
        if isinstance(event, Response):
            self._is_chunked = self._chunks(event)

    def _chunks(self, response: Response) -> bool:
        """Whether h11 frames the body as chunks. Source: RFC 9112 section 6.3."""
        return (
            response.status_code == 200
            and self.connection.our_state is h11.SEND_BODY
            and isinstance(self.connection, h11.Connection)
            and self.connection.their_http_version == b"1.1"
            and not any(name.lower() == b"content-length" for name, _ in response.headers)
        )

    async def _create_stream(self, request: h11.Request) -> None:
        await super()._create_stream(request)
        _offer(self, self.stream)


class ExpressH2(FlowControlledH2):
    """An HTTP/2 connection; what its answers write in one turn of the event loop leaves in one piece."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._transport = _transport_of(self.send)
        self._n_flushing = 0  # who has taken bytes from `connection` that may not have been written yet
        self._is_departing = False

    def takes(self, stream_id: int, n_bytes: int) -> bool:
        """Whether so many bytes of a stream can go now, and nothing was to go before them."""
        buffer = self.stream_buffers.get(stream_id)
        if stream_id not in self.streams or buffer is None or buffer.buffer:
            return False
        if self._n_flushing or self._transport.get_write_buffer_size():
            return False
        try:
            window = self.connection.local_flow_control_window(stream_id)
        except ProtocolError:  # reset, which hypercorn has yet to notice
            return False
        return n_bytes <= min(window, self.connection.max_outbound_frame_size)

    def write(self, stream_id: int, data: bytes) -> None:
        """Send a frame with the others of this turn."""
        try:
            self.connection.send_data(stream_id, data)
        except ProtocolError:  # the client has said goodbye: each answer is told so
            return
        if not self._is_departing:
            self._is_departing = True
            asyncio.get_running_loop().call_soon(self._depart)

    def _depart(self) -> None:
        self._is_departing = False
        data = self.connection.data_to_send()
        if data:
            self._transport.write(data)

    async def _flush(self) -> None:
        self._n_flushing += 1
        try:
            await super()._flush()
        finally:
            self._n_flushing -= 1

    async def _create_stream(self, request: h2.events.RequestReceived) -> None:
        await super()._create_stream(request)
        _offer(_OfH2Stream(self, request.stream_id), self.streams.get(request.stream_id))


class _OfH2Stream:
    """The short way for one of a connection's answers."""

    __slots__ = ("_connection", "_stream_id")

    def __init__(self, connection: ExpressH2, stream_id: int) -> None:
        self._connection = connection
        self._stream_id = stream_id

    def takes(self, n_bytes: int) -> bool:
        return self._connection.takes(self._stream_id, n_bytes)

    def write(self, data: bytes) -> None:
        self._connection.write(self._stream_id, data)


def _offer(express: Express, stream: HTTPStream | WSStream | None) -> None:
    """Let the application find the short way; it has not begun to run yet."""
    if isinstance(stream, HTTPStream):
        extensions: dict[str, Any] = stream.scope["extensions"]
        extensions[EXPRESS] = express


def _transport_of(send: Callable[[Event], Awaitable[None]]) -> asyncio.WriteTransport:
    """hypercorn shows a protocol its connection as this method of it, and in no other way."""
    transport: asyncio.WriteTransport = send.__self__.writer.transport  # type: ignore[attr-defined]
    return transport
