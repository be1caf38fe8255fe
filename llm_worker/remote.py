"""A ring over mutual TLS: this worker's connection to one ingress, made again whenever it is lost.

A connection ends with a reason; the worker hears `on_detached`, and the ring dials again, for ever.

Owns: which connection there is. Called by: the worker (`Ring`), on the event loop.
"""

import asyncio
import logging
import random
import ssl
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Never, Protocol

import aiohttp
from aiohttp import ClientWSTimeout

from llm_ingress.errors import CertificateFault
from llm_ingress.labels import shown
from llm_ingress.outbox import MAX_MESSAGE_BYTES
from llm_ingress.tls import explain
from llm_ingress.wire import (
    INGRESS_ID_HEADER,
    Credit,
    End,
    Fail,
    Grant,
    Head,
    Heartbeat,
    Hello,
    LaneRef,
    LaneSignal,
    Message,
    OfLane,
    Refusal,
    RingSignal,
    Welcome,
)
from llm_worker.backoff import Backoff
from llm_worker.connection import CLOSE_S, Connection
from llm_worker.errors import RingLost, RingRefused
from llm_worker.ring import RingListener

logger = logging.getLogger(__name__)

RING_PATH = "/ring"
DIAL_S = 10.0
STEADY_S = 2.0  # an attachment that lasted so long was no failed attempt


class TlsSource(Protocol):
    """Where a dial takes its TLS context from; a renewed certificate is there the next time."""

    def for_dial(self, now: datetime) -> ssl.SSLContext:
        """Return the context to use now. Raises: CertificateFault if it is of no use any more."""


class RemoteRing:
    """The ring of an ingress at `url`. Thread: event loop.

    The ingress must prove to be `server_hostname`, where that is not the host of the URL. All rings of a
    worker share `attended`: an ingress that two of them reach (by two addresses, say) would drop the one, and
    its lanes, for the other. It says who it is before a HELLO, and the ring that came later stands by.
    """

    def __init__(
        self,
        url: str,
        tls: TlsSource,
        *,
        server_hostname: str | None = None,
        attended: "dict[str, RemoteRing] | None" = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._url = url.rstrip("/")
        self._tls = tls
        self._server_hostname = server_hostname
        self._attended = {} if attended is None else attended  # by ingress id
        self._ingress_id = ""  # of what answered last
        self._backoff = Backoff(chance)
        self._listener: RingListener | None = None
        self._connection: Connection | None = None  # while attached
        self._attached_at = 0.0
        self._has_attached = False
        self._task: asyncio.Task[None] | None = None
        self._last_words: str | None = None  # the state last logged

    def __str__(self) -> str:
        return self._url if self._server_hostname is None else f"{self._url} ({self._server_hostname})"

    # -- the worker's calls; without a connection there is nobody to hear them --

    def attach(self, hello: Hello, listener: RingListener) -> None:
        self._listener = listener
        self._task = asyncio.get_running_loop().create_task(self._run(hello), name=f"ring {self}")

    def credit(self, n_lanes: int) -> None:
        if self._connection is not None:
            self._connection.send(Credit(n_lanes, self._connection.n_seen))

    def head(self, ref: LaneRef, head: Head) -> None:
        self._send(OfLane(ref, head))

    def body(self, ref: LaneRef, data: bytes, progress: bytes) -> None:
        if self._connection is not None:
            self._connection.send_body(ref, data, progress)

    def end(self, ref: LaneRef, end: End) -> None:
        self._send(OfLane(ref, end))

    def fail(self, ref: LaneRef, fail: Fail) -> None:
        self._send(OfLane(ref, fail))

    def release(self, ref: LaneRef) -> None:
        self._send(OfLane(ref, LaneSignal.RELEASE))

    def working(self, ref: LaneRef) -> None:
        self._send(OfLane(ref, LaneSignal.WORKING))

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        self._send(heartbeat)

    def draining(self) -> None:
        self._send(RingSignal.DRAINING)

    def detach(self) -> None:
        self._listener = None
        if self._connection is not None:
            self._connection.leave()
        elif self._task is not None:
            self._task.cancel()

    async def closed(self) -> None:
        """Wait, after `detach`, until what was said has been sent and the connection is closed."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def _send(self, message: Message) -> None:
        if self._connection is not None:
            self._connection.send(message)

    # -- the connection, again and again --

    async def _run(self, hello: Hello) -> None:
        while self._listener is not None:
            try:
                self._stand_by()
                await self._attend(hello)
            except RingRefused as refused:
                self._note(str(refused))
                delay_s = self._backoff.after_refusal_s(refused.retry_after_s)
            except RingLost as lost:
                self._note(str(lost))
                delay_s = self._backoff.next_s()
            except Exception:
                logger.exception("%s failed in this worker", self)
                delay_s = self._backoff.next_s()
            if self._listener is not None:
                await asyncio.sleep(delay_s)

    def _stand_by(self) -> None:
        """Raises: RingLost while another ring of this worker serves the same process of an ingress."""
        other = self._attended.get(self._ingress_id)
        if other is not None:
            raise RingLost(f"it is the ingress that this worker serves as {other}")

    async def _attend(self, hello: Hello) -> Never:
        """Dial, attach, and serve until the end. Raises: RingLost, however it ends."""
        # The one way to see the headers with which a connection becomes a WebSocket.
        async with aiohttp.ClientSession(raise_for_status=self._meet) as session:
            connection = Connection(await self._dial(session), self._presented(hello), self._hear)
            try:
                self._take_place(connection)
                await connection.serve()
            finally:
                self._detached()
                await connection.close()

    def _presented(self, hello: Hello) -> Hello:
        """Take another's place once: two instances that both did so again would drop each other for ever."""
        return replace(hello, takeover=False) if self._has_attached else hello

    async def _meet(self, answer: aiohttp.ClientResponse) -> None:
        """Note which process of an ingress answers."""
        self._ingress_id = answer.headers.get(INGRESS_ID_HEADER, "")

    def _take_place(self, connection: Connection) -> None:
        """Raises: RingLost, having said nothing, if the place is taken."""
        try:
            self._stand_by()
        except RingLost:
            connection.leave("this worker serves this ingress by another connection")
            raise
        if self._ingress_id:
            self._attended[self._ingress_id] = self

    async def _dial(self, session: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        """Raises: RingLost."""
        try:
            async with asyncio.timeout(DIAL_S):
                return await session.ws_connect(
                    self._url + RING_PATH,
                    ssl=self._tls.for_dial(datetime.now(UTC)),
                    server_hostname=self._server_hostname,
                    timeout=ClientWSTimeout(ws_close=CLOSE_S),
                    autoclose=False,
                    autoping=False,
                    max_msg_size=MAX_MESSAGE_BYTES,
                )
        except CertificateFault as fault:
            raise RingLost(str(fault)) from fault
        except aiohttp.WSServerHandshakeError as error:
            raise RingLost(f"it is no ingress's listener for workers: HTTP status {error.status}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise RingLost(explain(error)) from error

    def _hear(self, connection: Connection, message: Message) -> None:
        """Act on a message of the ingress. Raises: RingLost if it is out of place."""
        listener = self._listener
        if listener is None:
            return
        match message:
            case Welcome() if self._connection is None:
                self._attached(connection, message, listener)
            case Refusal() if self._connection is None:
                raise RingRefused(message)
            case _ if self._connection is None:
                raise RingLost("its first word is not a WELCOME")
            case Grant():
                listener.on_grant(self, message)
            case OfLane(ref=ref, content=LaneSignal.CANCEL):
                listener.on_cancel(self, ref)
            case OfLane(ref=ref, content=LaneSignal.PAUSE):
                listener.on_pause(self, ref)
            case OfLane(ref=ref, content=LaneSignal.RESUME):
                listener.on_resume(self, ref)
            case RingSignal.DRAIN:
                listener.on_drain(self)
            case _:
                raise RingLost("it sent a second WELCOME, or a REFUSED behind it")

    def _attached(self, connection: Connection, welcome: Welcome, listener: RingListener) -> None:
        connection.welcome(welcome.heartbeat_timeout_s)
        self._connection = connection
        self._has_attached = True
        self._attached_at = asyncio.get_running_loop().time()
        self._last_words = None
        listener.on_attached(self)

    def _detached(self) -> None:
        """Give up the place, and tell the worker what it has lost, if it was attached."""
        if self._attended.get(self._ingress_id) is self:
            del self._attended[self._ingress_id]
        if self._connection is None:
            return
        self._connection = None
        if asyncio.get_running_loop().time() - self._attached_at > STEADY_S:
            self._backoff.reset()
        if self._listener is not None:
            self._listener.on_detached(self)

    def _note(self, state: str) -> None:
        """Log a change of state, once."""
        if self._listener is not None and state != self._last_words:
            self._last_words = state
            logger.warning("%s: %s; it is dialled until it answers", self, shown(state))
