"""The control listener: workers connect here over mutual TLS, one WebSocket each, and pull lanes.

Who a worker is, its certificate says and not the worker. Each connection has one task that reads and one that
writes; whatever goes wrong with it ends it with one logged reason, gives its lanes back, and is no concern of
any other. aiohttp serves here because hypercorn does not show an application the peer's certificate.

Owns: the open connections. Called by: the command line that serves.
"""

import asyncio
import logging
import socket
import ssl
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Never

from aiohttp import WSCloseCode, WSMsgType, web
from aiohttp.http_exceptions import HttpProcessingError

from llm_ingress.attachment import Attachment, AttachRules
from llm_ingress.certs import identity_of
from llm_ingress.endpoint import Endpoint
from llm_ingress.errors import CertificateFault, ConfigError, ProtocolFault, WorkerRefused
from llm_ingress.gateway import Gateway
from llm_ingress.labels import shown
from llm_ingress.outbox import MAX_MESSAGE_BYTES
from llm_ingress.tls_listener import TlsListener
from llm_ingress.wire import INGRESS_ID_HEADER, RefusedFor

logger = logging.getLogger(__name__)

RING_PATH = "/ring"
HELLO_S = 10.0
CLOSE_S = 1.0  # for the last words to a peer that may not listen
# A worker that takes nothing for so long is beyond a frozen process or a cut line.
STUCK_S = 60.0
# What is written and not yet under way: a CANCEL waits behind no more than that.
UNSENT_BYTES = 64 * 1024
MAX_REASON_BYTES = 120  # of a WebSocket's closing frame


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """Where workers connect, and which of them may. Port 0 is any free port; `allow` None allows all."""

    host: str = "127.0.0.1"
    port: int = 8444
    allow: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"control port is {self.port}, must be 0 to 65535")


async def serve_control(gateway: Gateway, tls: ssl.SSLContext, config: ControlConfig) -> "Control":
    """Accept workers from now on, until the returned listener is closed.

    Raises: ConfigError if the address cannot be had.
    """
    control = Control(gateway, tls, config)
    try:
        await control.listen()
    except OSError as error:
        message = f"cannot listen for workers on {config.host} port {config.port}: {error.strerror}"
        raise ConfigError(message) from error
    return control


class Control:
    """The listener and its connections; `serve_control` makes it. Thread: event loop."""

    def __init__(self, gateway: Gateway, tls: ssl.SSLContext, config: ControlConfig) -> None:
        self._gateway = gateway
        self._config = config
        self._rules = AttachRules(ingress_id=uuid.uuid4().hex, allow=config.allow)
        self._connections: set[_Connection] = set()
        self._http = web.Server(self._serve_request)
        self._listener = TlsListener(self._make_peer, tls)

    async def listen(self) -> None:
        """Open the socket. Raises: OSError."""
        await self._listener.open(self._config.host, self._config.port)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._listener.port

    @property
    def endpoint(self) -> Endpoint:
        """Where it listens."""
        return Endpoint(self._config.host, self.port)

    def drain(self) -> None:
        """Tell every worker to ask for nothing more here, and to finish what it holds."""
        for connection in self._connections:
            if connection.attachment.hello is not None:
                connection.attachment.drain()

    async def close(self) -> None:
        """Close the listener and every connection, each with what is still to be sent on it. Idempotent."""
        self._listener.close()
        for connection in tuple(self._connections):
            connection.end("this ingress goes away", WSCloseCode.GOING_AWAY, is_expected=True)
        await self._http.shutdown(timeout=2 * CLOSE_S)

    def _make_peer(self) -> web.RequestHandler:
        loop = asyncio.get_running_loop()
        return _Peer(self._http, loop=loop, access_log=None)  # type: ignore[arg-type]  # None is no log

    async def _serve_request(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != RING_PATH:
            raise web.HTTPNotFound
        connection = _Connection(self._gateway, self._rules, request)
        self._connections.add(connection)
        try:
            return await connection.run()
        finally:
            self._connections.discard(connection)


class _Peer(web.RequestHandler):
    """A connection as aiohttp serves it, except that what is no HTTP is one line, and the peer's fault."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        reason = shown(exc.message.partition("\n")[0])
        logger.warning(
            "worker %s: it does not speak HTTP: %s", _name_of(_identity(request)[0], request), reason
        )
        response = web.Response(status=status)
        response.force_close()
        return response


class _End(NamedTuple):
    """Why a connection ends."""

    why: str
    code: int
    is_expected: bool


class _Lost(Exception):
    """The worker's end of the connection is gone."""


class _Connection:
    """One worker's connection, from its certificate to its end."""

    def __init__(self, gateway: Gateway, rules: AttachRules, request: web.BaseRequest) -> None:
        self._gateway = gateway
        self._request = request
        self._ws = web.WebSocketResponse(
            timeout=CLOSE_S,
            autoclose=False,
            autoping=False,
            compress=False,
            max_msg_size=MAX_MESSAGE_BYTES,
            writer_limit=UNSENT_BYTES,
        )
        self._ws.headers[INGRESS_ID_HEADER] = rules.ingress_id
        self._ended: asyncio.Future[_End] = asyncio.get_running_loop().create_future()
        self._has_output = asyncio.Event()
        self._pong: bytes | None = None
        identity, self._fault = _identity(request)
        self._peer = _name_of(identity, request)
        self.attachment = Attachment(
            gateway, rules, identity, on_output=self._has_output.set, on_close=self._close
        )

    async def run(self) -> web.WebSocketResponse:
        """Serve the worker until one side ends it."""
        await self._ws.prepare(self._request)
        self._bound_what_is_unsent()
        tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        why = "the connection was dropped"
        try:
            end = await self._ended
            why = end.why
        finally:
            self.attachment.lose(why)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        logger.log(logging.INFO if end.is_expected else logging.WARNING, "worker %s: %s", self._peer, why)
        await self._part(end)
        return self._ws

    def end(self, why: str, code: int = WSCloseCode.POLICY_VIOLATION, *, is_expected: bool = False) -> None:
        """End the connection; the first reason counts."""
        if not self._ended.done():
            self._ended.set_result(_End(shown(why), code, is_expected))

    def _close(self, why: str) -> None:
        """The gateway has had enough."""
        self.end(why)

    # Reading.

    async def _read(self) -> Never:
        try:
            await self._greet()
            while True:
                await self._receive()
        except WorkerRefused as refused:
            self.end(f"refused for {refused.reason}: {refused.message}")
            raise
        except (_Lost, ProtocolFault) as fault:
            self.end(str(fault))
            raise
        except Exception:
            logger.exception("serving worker %s failed", self._peer)
            self.end("this ingress failed", WSCloseCode.INTERNAL_ERROR)
            raise

    async def _greet(self) -> None:
        """Wait for the HELLO."""
        if self._fault is not None:
            raise self.attachment.refuse(WorkerRefused(RefusedFor.IDENTITY, self._fault))
        try:
            async with asyncio.timeout(HELLO_S):
                while (hello := self.attachment.hello) is None:
                    await self._receive()
        except TimeoutError:
            raise ProtocolFault(f"no HELLO within {HELLO_S:g} s") from None
        logger.info(
            "worker %s is attached as %s with %s: instance %s, %d places",
            self._peer,
            hello.worker,
            hello.model.name,
            hello.instance_id,
            hello.max_inflight,
        )
        if n_in_vain := self._gateway.n_places_in_vain:
            logger.warning(
                "%d places of the workers stay empty: see --max-in-flight-decodes and --ring-streams",
                n_in_vain,
            )
        for name, (other, owner) in self._gateway.shared_names(hello.model).items():
            logger.warning(
                "both %s and %s go by the name %s: requests for it are for %s",
                hello.model.name,
                other,
                name,
                owner,
            )

    async def _receive(self) -> None:
        """Act on the next WebSocket message. Raises: ProtocolFault, WorkerRefused, _Lost."""
        message = await self._ws.receive()
        self.attachment.note_message()
        match message.type:
            case WSMsgType.BINARY:
                self.attachment.feed(message.data)
            case WSMsgType.PING:
                # From here it would wait for what is being written, and the worker's lease with it.
                self._pong = message.data
                self._has_output.set()
            case WSMsgType.PONG:
                pass
            case WSMsgType.TEXT:
                raise ProtocolFault("a text message")
            case WSMsgType.ERROR:
                raise ProtocolFault(str(message.data))
            case WSMsgType.CLOSE if message.data == WSCloseCode.OK:
                self.end(f"it has left{_reason_of(message.extra)}", WSCloseCode.OK, is_expected=True)
                raise _Lost
            case _:
                raise _Lost(f"the connection was lost{_reason_of(message.extra)}")

    # Writing.

    async def _write(self) -> None:
        try:
            while True:
                await self._has_output.wait()
                self._has_output.clear()
                async with asyncio.timeout(STUCK_S):
                    await self._flush()
        except TimeoutError:
            self.end(f"it has taken nothing for {STUCK_S:g} s")
        except (ConnectionError, RuntimeError) as error:
            self.end(f"the connection was lost: {error}")

    async def _flush(self) -> None:
        """Send what there is. Suspends while the worker's side takes no more."""
        while True:
            if self._pong is not None:
                pong, self._pong = self._pong, None
                await self._ws.pong(pong)
            message = self.attachment.outbox.take()
            if not message:
                return
            await self._ws.send_bytes(message)

    def _bound_what_is_unsent(self) -> None:
        transport = self._request.transport
        if transport is not None:
            transport.set_write_buffer_limits(high=UNSENT_BYTES)
            connection = transport.get_extra_info("socket")
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)

    async def _part(self, end: _End) -> None:
        """Say last words to a peer that may be gone, and close."""
        with suppress(TimeoutError, ConnectionError, RuntimeError):
            async with asyncio.timeout(CLOSE_S):
                await self._flush()
                reason = end.why.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
                await self._ws.close(code=end.code, message=reason.encode())
        if self._request.transport is not None:
            self._request.transport.abort()


def _identity(request: web.BaseRequest) -> tuple[str, str | None]:
    """Return the name in the peer's certificate, or what is wrong with it."""
    assert request.transport is not None, "a request without a connection"
    der = request.transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
    try:
        return identity_of(der), None
    except CertificateFault as fault:
        return "", str(fault)


def _name_of(identity: str, request: web.BaseRequest) -> str:
    """Return what a peer is called in the log."""
    return f"{identity or 'a worker without a name'} at {request.remote}"


def _reason_of(extra: object) -> str:
    return f": {extra}" if extra else ""
