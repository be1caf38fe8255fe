"""Mends what hypercorn 0.18 does with clients that do not read, or that leave.

1. On HTTP/2, `send()` never waited for a client whose window is shut: now it waits while a stream holds more
   than `STREAM_BUFFER_BYTES`, and a stream or connection that ends lets go of whoever waits.
2. An HTTP/2 answer broken off was left open for ever: now its stream is reset.
3. HTTP/2 data that arrives for a stream already answered broke the whole connection: now it is dropped.
4. Closing a connection waited without end for its unread bytes: now for `CLOSE_TIMEOUT_S`.
5. A connection its client had closed was held until the keep-alive time was over: now it is closed at once.
6. A connection cut short at the server's end was logged as a fault by Python 3.11: now it just ends.
7. A connection that had ended led back to itself, and its memory waited for the garbage collector: now it is
   free at once.

Reaches into hypercorn, like `h1_head.py` and `express.py`. Called by: `serving.py`, once, before it serves.
"""

import asyncio
from collections.abc import Callable, Iterator

import h2.errors
import h2.events
import hypercorn.asyncio.run
import hypercorn.protocol
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import AsyncioSingleTask
from hypercorn.events import Closed, Event
from hypercorn.protocol.events import Body, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.typing import TaskGroup

STREAM_BUFFER_BYTES = 64 * 1024
CLOSE_TIMEOUT_S = 5.0
CLOSE_AT_END_TIMEOUT_S = 0.5  # while the server shuts down


def install() -> None:
    """Put the mended classes where hypercorn looks for its own."""
    vars(hypercorn.protocol)["H2Protocol"] = FlowControlledH2
    vars(hypercorn.asyncio.run)["TCPServer"] = ClosingConnection


class ClosingConnection(TCPServer):
    """A connection that is closed when its client is gone, and whose closing ends."""

    async def run(self) -> None:
        try:
            await super().run()
        except asyncio.CancelledError:
            if not self.context.terminated.is_set():
                raise
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Leave nothing behind that leads back here."""
        self.protocol = _EndedProtocol()  # type: ignore[assignment]
        error = self.reader.exception()
        if error is not None:  # it was raised here, and the reader holds it
            error.__traceback__ = None

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()
        self.idle_task = _NoIdleTask()

    async def _close(self) -> None:
        transport = self.writer.transport
        timeout_s = CLOSE_AT_END_TIMEOUT_S if self.context.terminated.is_set() else CLOSE_TIMEOUT_S
        timer = self.loop.call_later(timeout_s, transport.abort)
        try:
            await super()._close()
        finally:
            timer.cancel()
            transport.abort()  # nothing, unless the wait was cancelled


class _NoIdleTask(AsyncioSingleTask):
    """No wait for a further request: an answer that ends after its client left would begin it again."""

    async def restart(self, task_group: TaskGroup, action: Callable[..., object]) -> None:
        pass


class _EndedProtocol:
    """Of a connection that has ended: nothing happens on it any more."""

    async def handle(self, event: Event) -> None:
        pass


class FlowControlledH2(H2Protocol):
    """An HTTP/2 connection that holds a bounded number of bytes for each stream.

    A sender waits in `_waiters` under its stream's id; there is one sender to a stream.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._waiters: dict[int, asyncio.Future[None]] = {}

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, StreamClosed):
            await self._reset_unfinished(event.stream_id)
        await super().stream_send(event)
        if isinstance(event, Body):
            await self._room(event.stream_id)

    async def handle(self, event: Event) -> None:
        await super().handle(event)
        if isinstance(event, Closed):
            for stream_id, buffer in list(self.stream_buffers.items()):
                await buffer.close()
                self._release(stream_id)

    async def _room(self, stream_id: int) -> None:
        while not self._has_room(stream_id):
            self._waiters[stream_id] = waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                self._waiters.pop(stream_id, None)

    def _has_room(self, stream_id: int) -> bool:
        buffer = self.stream_buffers.get(stream_id)
        return buffer is None or len(buffer.buffer) <= STREAM_BUFFER_BYTES

    def _release(self, stream_id: int) -> None:
        waiter = self._waiters.get(stream_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _send_data(self, stream_id: int) -> None:
        await super()._send_data(stream_id)
        if self._has_room(stream_id):
            self._release(stream_id)

    async def _reset_unfinished(self, stream_id: int) -> None:
        """Tell the client that the answer it has is not all of it."""
        buffer = self.stream_buffers.get(stream_id)
        if buffer is not None and not buffer._complete:
            await buffer.close()
            self.connection.reset_stream(stream_id, h2.errors.ErrorCodes.INTERNAL_ERROR)
            await self._flush()

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        await super()._handle_events(self._timely(events))  # type: ignore[arg-type]

    def _timely(self, events: list[h2.events.Event]) -> Iterator[h2.events.Event]:
        """Yield the events, one when the last has been handled, without data nobody reads any more."""
        for event in events:
            if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
                self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            else:
                yield event
