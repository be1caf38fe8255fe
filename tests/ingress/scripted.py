"""A worker that does what a test tells it, and a real server around a gateway for it.

Used by the tests of the HTTP surface: everything but the model is real, hypercorn and sockets included.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from llm_ingress.conversations import Conversations
from llm_ingress.draining import Drain
from llm_ingress.gateway import Gateway, GatewayConfig
from llm_ingress.public import Public, PublicConfig
from llm_ingress.serving import ServingConfig, listen, serve
from llm_ingress.tls import LiveContext
from llm_ingress.wire import (
    End,
    Fail,
    FinishReason,
    Grant,
    Head,
    Heartbeat,
    Hello,
    LaneRef,
    ModelCard,
)

CHAT = "/v1/chat/completions"
STREAM_HEAD = Head(
    status=200,
    headers=(("content-type", "text/event-stream"),),
)
JSON_HEAD = Head(status=200, headers=(("content-type", "application/json"),))
CARD = ModelCard(
    name="m", aliases=("alias",), file="m.gguf", n_params=1000, n_ctx=4096, fingerprint="f", created=1
)


def chat(content: str = "hi", **fields: Any) -> dict[str, Any]:
    """The body of a request."""
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}


def event(text: str) -> bytes:
    """One chunk of a stream."""
    chunk = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}],
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


class ScriptedWorker:
    """A worker with places and no model. It hears what the gateway tells it, and answers when told to."""

    def __init__(self, gateway: Gateway, *, n_places: int = 4, card: ModelCard = CARD) -> None:
        self._gateway = gateway
        self._grants: asyncio.Queue[Grant] = asyncio.Queue()
        self._cancels: asyncio.Queue[LaneRef] = asyncio.Queue()
        self.paused: list[LaneRef] = []
        self.resumed: list[LaneRef] = []
        self.pause_heard = asyncio.Event()
        self._n_granted = 0
        hello = Hello(worker="w", instance_id="i", model=card, max_inflight=n_places)
        self.id = gateway.workers.attach(hello, self)
        self.offer(n_places)
        self.beat(inflight=0, max_inflight=n_places)

    # What the gateway says.

    def grant(self, grant: Grant) -> None:
        self._n_granted += 1
        self._grants.put_nowait(grant)

    def cancel(self, ref: LaneRef) -> None:
        self._cancels.put_nowait(ref)

    def pause(self, ref: LaneRef) -> None:
        self.paused.append(ref)
        self.pause_heard.set()

    def resume(self, ref: LaneRef) -> None:
        self.resumed.append(ref)

    def drain(self) -> None:
        pass

    def close(self, why: str) -> None:
        raise AssertionError(f"the gateway let go of the worker: {why}")

    # What a test makes it do.

    async def granted(self) -> Grant:
        """The next lane it is given."""
        async with asyncio.timeout(5):
            return await self._grants.get()

    async def cancelled(self) -> LaneRef:
        """The next lane it is told to stop."""
        async with asyncio.timeout(5):
            return await self._cancels.get()

    def offer(self, n: int) -> None:
        self._gateway.workers.credit(self.id, n, self._n_granted)

    def beat(self, *, inflight: int, max_inflight: int) -> None:
        self._gateway.workers.heartbeat(
            self.id,
            Heartbeat(
                inflight=inflight,
                decoding=inflight,
                max_inflight=max_inflight,
                available_slots=max_inflight - inflight,
                step_ms=1.0,
                step_age_s=0.0,
                kv_promised_tokens=0,
                tokens_per_second=10.0,
            ),
        )

    def begin(self, grant: Grant, head: Head = STREAM_HEAD) -> None:
        self._gateway.workers.head(self.id, grant.ref, head)

    def say(self, grant: Grant, data: bytes, progress: bytes = b"") -> None:
        self._gateway.workers.body(self.id, grant.ref, data, progress)

    def end(self, grant: Grant, reason: FinishReason = FinishReason.STOP, record: bytes = b"") -> None:
        end = End(finish_reason=reason, n_prompt=3, n_cached=1, n_completion=2, record=record)
        self._gateway.workers.end(self.id, grant.ref, end)

    def fail(self, grant: Grant, *, retryable: bool = False) -> None:
        self._gateway.workers.fail(
            self.id, grant.ref, Fail(message="/secret/path broke", retryable=retryable)
        )

    def answer(self, grant: Grant, *texts: str) -> None:
        """A whole stream."""
        self.begin(grant)
        for text in texts:
            self.say(grant, event(text))
        self.say(grant, b"data: [DONE]\n\n")
        self.end(grant)

    async def answer_all(self) -> None:
        """Answer whatever comes, each with the role's chunk and one word."""
        while True:
            grant = await self._grants.get()
            self.offer(1)
            self.answer(grant, "hello")


@dataclass(slots=True, eq=False, kw_only=True)
class Server:
    """A server under test, on a loopback port."""

    gateway: Gateway
    public: Public
    drain: Drain
    task: asyncio.Task[None]
    host: str
    port: int
    tls: LiveContext | None

    @property
    def url(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://{self.host}:{self.port}"

    async def has_open(self, n_lanes: int) -> None:
        """Wait until so many lanes are open."""
        async with asyncio.timeout(5):
            while self.gateway.snapshot().open != n_lanes:  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0)

    async def counts(self) -> tuple[int, int, int, int]:
        """Accepted, finished, cancelled, failed, once nothing is open any more."""
        async with asyncio.timeout(5):
            while not (self.gateway.is_idle and self.public.is_idle):  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0)
        snapshot = self.gateway.snapshot()
        assert snapshot.accepted == snapshot.finished + snapshot.cancelled + snapshot.failed
        return snapshot.accepted, snapshot.finished, snapshot.cancelled, snapshot.failed


@asynccontextmanager
async def serving(
    gateway: Gateway | None = None,
    *,
    public: PublicConfig | None = None,
    config: ServingConfig | None = None,
    conversations: Conversations | None = None,
) -> AsyncIterator[Server]:
    """Run a server until the block ends; whatever is open then is cut short."""
    gateway = gateway or Gateway(GatewayConfig())
    config = config or ServingConfig(port=0, drain_timeout_s=0)
    app = Public(gateway, public, conversations=conversations)
    listener = listen(config)
    host, port = listener.socket.getsockname()[:2]
    drain = Drain()
    task = asyncio.create_task(serve(app, gateway, listener, config, drain))
    server = Server(
        gateway=gateway, public=app, drain=drain, task=task, host=host, port=port, tls=listener.tls
    )
    try:
        yield server
    finally:
        drain.ask()
        if not app.is_idle:
            drain.is_urgent.set()
        await task


async def raw_post(
    server: Server, body: bytes, headers: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a chat request over a bare socket."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer
