"""The ring on the network, for tests: a listener in front of a gateway whose time runs, a worker of bytes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
from aiohttp import WSMessage, WSMsgType

from llm_ingress.certs import CertificateFiles
from llm_ingress.control import Control, ControlConfig, serve_control
from llm_ingress.frames import FrameReader, pack
from llm_ingress.gateway import Gateway, Lane, LaneRequest
from llm_ingress.payloads import FROM_INGRESS
from llm_ingress.pki import Period
from llm_ingress.pki_folder import issue_worker
from llm_ingress.tls import LiveContext, control_context, worker_context
from llm_ingress.wire import Grant, Heartbeat, Hello, Message, ModelCard, Welcome
from tests.certificates import TODAY, Issued

TICK_S = 0.02
PATIENCE_S = 10.0
CARD = ModelCard(name="echo", file="echo.gguf", n_params=1, n_ctx=10, fingerprint="f", created=1)
HELLO = Hello(worker="w", instance_id="i", model=CARD, max_inflight=4)
HEARTBEAT = Heartbeat(  # of that worker, while it has nothing to do
    inflight=0,
    decoding=0,
    max_inflight=4,
    available_slots=4,
    step_ms=1.0,
    step_age_s=0.0,
    kv_promised_tokens=0,
    tokens_per_second=0.0,
)


def another_worker(issued: Issued, folder: Path, name: str) -> CertificateFiles:
    """The certificate of one more worker of the same CA."""
    issue_worker(issued.ingress.cert.parent, name, folder, Period(TODAY, 60))
    return CertificateFiles.in_folder(folder)


@asynccontextmanager
async def controlled(
    gateway: Gateway, issued: Issued, *, allow: frozenset[str] | None = None, port: int = 0
) -> AsyncIterator[Control]:
    """A control listener in front of a gateway whose time runs."""
    tls = LiveContext(control_context, issued.ingress, datetime.now(UTC)).for_listener()
    control = await serve_control(gateway, tls, ControlConfig(port=port, allow=allow))
    ticker = asyncio.create_task(_tick(gateway))
    try:
        yield control
    finally:
        ticker.cancel()
        await control.close()


async def _tick(gateway: Gateway) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        gateway.tick()


def open_lane(gateway: Gateway, body: bytes = b"{}") -> Lane:
    request = LaneRequest(path="/v1/chat/completions", body=body, model="echo", request_id="r", tenant="t")
    return gateway.open_lane(request, lambda: None)


class RawWorker:
    """A worker that sends what bytes a test likes, and reads what it is sent when told to."""

    def __init__(self, session: aiohttp.ClientSession, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.ws = ws
        self._session = session
        self._reader = FrameReader(FROM_INGRESS, max_open_bytes=100 * 1024 * 1024)
        self._unread: list[Message] = []

    async def say(self, *messages: Message) -> None:
        await self.send(b"".join(map(pack, messages)))

    async def send(self, data: bytes) -> None:
        await self.ws.send_bytes(data)

    async def hear(self) -> Message:
        """The next message."""
        async with asyncio.timeout(PATIENCE_S):
            while not self._unread:
                message = await self.ws.receive()
                assert message.type is WSMsgType.BINARY, message
                self._unread += self._reader.feed(message.data)
        return self._unread.pop(0)

    async def granted(self) -> Grant:
        message = await self.hear()
        assert isinstance(message, Grant), message
        return message

    async def present(self, hello: Hello = HELLO) -> None:
        """Say HELLO and be welcome."""
        await self.say(hello)
        assert isinstance(await self.hear(), Welcome)

    async def vanish(self) -> None:
        """Close the socket with no more words, as a killed process does."""
        await self._session.close()

    async def ended(self) -> WSMessage:
        """How the ingress ends the connection; what it says until then is passed over."""
        async with asyncio.timeout(PATIENCE_S):
            while (message := await self.ws.receive()).type is WSMsgType.BINARY:
                pass
        return message


@asynccontextmanager
async def raw_worker(control: Control, files: CertificateFiles) -> AsyncIterator[RawWorker]:
    """A connection that has said nothing yet."""
    async with raw_worker_at(control.port, files) as worker:
        yield worker


@asynccontextmanager
async def raw_worker_at(port: int, files: CertificateFiles) -> AsyncIterator[RawWorker]:
    """The same, to whatever listens for workers on a port of this machine."""
    context = worker_context(files, datetime.now(UTC))
    url = f"https://localhost:{port}/ring"
    timeout = aiohttp.ClientWSTimeout(ws_close=1.0)
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url, ssl=context, max_msg_size=0, timeout=timeout) as ws,
    ):
        yield RawWorker(session, ws)
