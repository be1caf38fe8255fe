"""One connection to an ingress: what is said on it both ways, and how it comes to an end.

What is said within one turn of the event loop (one engine step, for all lanes) goes out as one WebSocket
message. A connection that is lost, silent, or takes nothing ends with a reason.

Owns: the WebSocket and what is unsent on it. Called by: `remote.py`, on the event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Never

import aiohttp
from aiohttp import WSCloseCode, WSMsgType

from llm_ingress.errors import WireError
from llm_ingress.frames import MAX_LANE_BYTES, FrameReader
from llm_ingress.outbox import Outbox
from llm_ingress.payloads import FROM_INGRESS
from llm_ingress.tls import explain
from llm_ingress.wire import Grant, Hello, LaneRef, Message
from llm_worker.errors import RingLost

logger = logging.getLogger(__name__)

WELCOME_S = 10.0  # for the answer to a HELLO
CLOSE_S = 1.0  # for the last words to a peer that may not listen
PINGS_PER_PATIENCE = 5
# An ingress that takes nothing must not fill this machine's memory.
MAX_UNSENT_BYTES = 64 * 1024 * 1024


class Connection:
    """One WebSocket to an ingress, from the HELLO to its end."""

    def __init__(
        self,
        ws: aiohttp.ClientWebSocketResponse,
        hello: Hello,
        hear: "Callable[[Connection, Message], None]",
    ) -> None:
        self.n_seen = 0  # LANEs received
        self._ws = ws
        self._hear = partial(hear, self)
        self._reader = FrameReader(FROM_INGRESS, max_open_bytes=(hello.max_inflight + 1) * MAX_LANE_BYTES)
        self._outbox = Outbox()
        self._has_output = asyncio.Event()
        self._patience_s = WELCOME_S  # with an ingress that is silent
        self._welcomed = asyncio.Event()
        self._ping_is_due = False
        self._is_leaving = False
        self._last_words = ""
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._ended: asyncio.Future[RingLost] = self._loop.create_future()
        self.send(hello)

    def welcome(self, patience_s: float) -> None:
        """It is attached: silence counts from here."""
        self._patience_s = patience_s
        self._welcomed.set()

    # -- what is said: the writer takes all of one turn of the event loop in the next --

    def send(self, message: Message) -> None:
        """Send a message soon."""
        self._outbox.put(message)
        self._wake()

    def send_body(self, ref: LaneRef, data: bytes, progress: bytes) -> None:
        """Send a BODY soon."""
        self._outbox.put_body(ref, data, progress)
        self._wake()

    def leave(self, why: str = "") -> None:
        """End once everything is sent."""
        self._is_leaving = True
        self._last_words = why
        self._has_output.set()

    def _wake(self) -> None:
        self._has_output.set()
        if self._outbox.n_bytes > MAX_UNSENT_BYTES:
            self._end(RingLost(f"it takes nothing: {self._outbox.n_bytes} bytes are unsent"))

    # -- its life --

    async def serve(self) -> Never:
        """Carry messages both ways until the end. Raises: RingLost, saying why."""
        activities = (self._read(), self._write(), self._watch())
        tasks = [self._loop.create_task(self._guard(activity)) for activity in activities]
        try:
            raise await self._ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Say last words to a peer that may be gone, and close."""
        code = WSCloseCode.OK if self._is_leaving else WSCloseCode.GOING_AWAY
        with suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(CLOSE_S):
                await self._ws.close(code=code, message=self._last_words.encode())

    def _end(self, lost: RingLost) -> None:
        """The first reason counts."""
        if not self._ended.done():
            self._ended.set_result(lost)

    async def _guard(self, activity: Coroutine[Any, Any, Never]) -> None:
        """Run a part of the connection; however it ends, the connection does."""
        try:
            await activity
        except RingLost as lost:
            self._end(lost)
        except WireError as error:
            self._end(RingLost(f"it sends what is not the ring protocol: {error}"))
        except (aiohttp.ClientError, OSError) as error:
            self._end(RingLost(f"the connection was lost: {explain(error)}"))
        except Exception:
            logger.exception("a connection failed in this worker")
            self._end(RingLost("the connection failed in this worker"))

    async def _read(self) -> Never:
        while True:
            message = await self._ws.receive()
            self._heard_at = self._loop.time()
            match message.type:
                case WSMsgType.BINARY:
                    self._take(message.data)
                case WSMsgType.PONG:
                    pass
                case WSMsgType.ERROR:
                    raise RingLost(f"the connection was lost: {message.data}")
                case WSMsgType.CLOSE if message.extra:
                    raise RingLost(f"it closed the connection: {message.extra}")
                case _:
                    raise RingLost("the connection was closed")

    def _take(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            if isinstance(message, Grant):
                self.n_seen += 1
            self._hear(message)

    async def _write(self) -> Never:
        while True:
            await self._has_output.wait()
            self._has_output.clear()
            if self._ping_is_due:
                self._ping_is_due = False
                await self._ws.ping()
            while message := self._outbox.take():
                await self._ws.send_bytes(message)
            if self._is_leaving:
                raise RingLost("this worker has left")

    async def _watch(self) -> Never:
        """Ask for a sign of life, and give up without one: a cut line says nothing."""
        await self._until_welcomed()
        interval_s = self._patience_s / PINGS_PER_PATIENCE
        while True:
            slept_at = self._loop.time()
            await asyncio.sleep(interval_s)
            now = self._loop.time()
            if now - slept_at > 2 * interval_s:
                # This process was starved itself, and what was said to it lies unread.
                self._heard_at = now
            elif now - self._heard_at > self._patience_s:
                raise RingLost(f"nothing heard from it for {self._patience_s:g} s")
            self._ping_is_due = True
            self._has_output.set()

    async def _until_welcomed(self) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._welcomed.wait()
        except TimeoutError:
            raise RingLost(f"no WELCOME within {self._patience_s:g} s") from None
