"""A fake OpenAI backend: a small HTTP server that answers every chat with the events of a load.

It stands behind the gateways that are measured beside ours, and does the least that they ask for: keep-alive,
and 200 for whatever else they look at.
"""

import asyncio
import json
import re
from multiprocessing.connection import Connection

from bench.sources import MODEL, Load, obey

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_LAST_EVENTS = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
)
_MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


def run_backend(parent: Connection) -> None:
    """Serve on any free port, told to the parent process first."""
    asyncio.run(_run(parent))


async def _run(parent: Connection) -> None:
    backend = Backend()
    server = await asyncio.get_running_loop().create_server(lambda: _Client(backend), "127.0.0.1", 0)
    parent.send(server.sockets[0].getsockname()[1])
    await obey(parent, backend)


class Backend:
    """A source of loads over HTTP."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[asyncio.Transport] = asyncio.Queue()
        self._streams: list[asyncio.Transport] = []

    async def begin(self, load: Load) -> None:
        self._streams = [await self.asked.get() for _ in range(load.n_streams)]
        for stream in self._streams:
            stream.write(_HEAD)

    def step(self, event: bytes) -> None:
        chunk = _chunk(event)
        for stream in self._streams:
            stream.write(chunk)

    def end(self) -> None:
        for stream in self._streams:
            stream.write(b"".join(map(_chunk, _LAST_EVENTS)) + b"0\r\n\r\n")


class _Client(asyncio.Protocol):
    """One connection of a gateway; one request after the other."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, blank, rest = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        n_body = int(length[1]) if length else 0
        if not blank or len(rest) < n_body:
            return
        self._received = rest[n_body:]
        if head.startswith(b"POST"):
            self._backend.asked.put_nowait(self._transport)
        else:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (len(_MODELS), _MODELS)
            )


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
