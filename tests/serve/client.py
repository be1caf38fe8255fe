"""A client that looks at the bytes: bodies to send, answers taken apart, and a connection it can cut.

What the official client would hide is what these tests are about; where they use that one, they say `sdk`.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import httpx

from tests.serve.process import PATIENCE_S, LlmServe

CHAT = "/v1/chat/completions"
DONE = "data: [DONE]\n\n"
MODEL = "smollm2"
STORY = "Tell me a very long story about a lighthouse keeper and a whale."

Json: TypeAlias = dict[str, Any]
Headers: TypeAlias = dict[str, str]


def chat(text: str, **fields: Any) -> Json:
    """The body of a question, answered greedily unless it says otherwise."""
    turns = [{"role": "user", "content": text}]
    return {"model": MODEL, "temperature": 0, "messages": turns, **fields}


@dataclass(frozen=True, slots=True)
class Said:
    """What an answer came to, streamed or not; equal ones may have found more or less in the cache."""

    text: str
    finish_reason: str
    usage: Json
    n_cached: int = field(compare=False)

    @classmethod
    def of(cls, text: str, finish_reason: str, usage: Json) -> Self:
        counts = dict(usage)
        details = counts.pop("prompt_tokens_details")
        return cls(text, finish_reason, counts, details["cached_tokens"])

    @classmethod
    def whole(cls, answer: Json) -> Self:
        (choice,) = answer["choices"]
        return cls.of(choice["message"]["content"], choice["finish_reason"], answer["usage"])

    @classmethod
    def streamed(cls, chunks: list[Json]) -> Self:
        """What a stream with usage came to."""
        *parts, usage = chunks
        return cls.of("".join(deltas(parts)), parts[-1]["choices"][0]["finish_reason"], usage["usage"])


def deltas(chunks: list[Json]) -> list[str]:
    """The text of each chunk that has a choice."""
    return [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]


def events(body: str) -> list[Json]:
    """The chunks of a stream that ended as it should."""
    assert body.endswith(DONE), body[-200:]
    *chunks, done, nothing = body.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


class Client:
    """Asks one server."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def post(self, body: Json | bytes | str) -> httpx.Response:
        """Send a body as it is."""
        content = json.dumps(body) if isinstance(body, dict) else body
        return await self._http.post(CHAT, content=content, headers={"content-type": "application/json"})

    async def get(self, path: str, method: str = "GET") -> httpx.Response:
        return await self._http.request(method, path)

    async def whole(self, text: str, **fields: Any) -> Said:
        response = await self.post(chat(text, **fields))
        assert response.status_code == 200, response.text
        return Said.whole(response.json())

    async def chunks(self, text: str, **fields: Any) -> list[Json]:
        """The chunks of a streamed answer."""
        response = await self.post(chat(text, stream=True, **fields))
        assert response.status_code == 200, response.text
        return events(response.text)

    async def streamed(self, text: str, **fields: Any) -> Said:
        return Said.streamed(await self.chunks(text, stream_options={"include_usage": True}, **fields))


@asynccontextmanager
async def client_of(server: LlmServe) -> AsyncIterator[Client]:
    """A client with as many connections as it wants."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=PATIENCE_S, limits=limits, trust_env=False
    ) as http:
        yield Client(http)


class Connection:
    """One request on a socket of its own, that can be read slowly or cut off."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def until(self, text: bytes) -> bytes:
        """Read up to the end of `text`."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readuntil(text)

    async def rest(self) -> bytes:
        """Read to the end of the connection."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()

    async def head(self) -> tuple[int, Headers]:
        """The status and the headers of the answer."""
        first, *lines = (await self.until(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
        return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The chunks of the body as HTTP frames them, up to the one of no length."""
        while size := int(await self.until(b"\r\n"), 16):
            async with asyncio.timeout(PATIENCE_S):
                piece = await self.reader.readexactly(size + 2)
            yield piece[:-2]
        await self.until(b"\r\n")

    async def cut(self) -> None:
        """Leave without a word."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


@asynccontextmanager
async def sending(
    server: LlmServe, headers: str, data: bytes = b"", *, room_bytes: int = 2**16
) -> AsyncIterator[Connection]:
    """Send what is given as a body; the connection is to end with the answer, or with the block.

    `room_bytes` is about what this side takes in beyond what was read.
    """
    wire = socket.socket()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room_bytes)
    wire.setblocking(False)
    await asyncio.get_running_loop().sock_connect(wire, server.address)
    connection = Connection(*await asyncio.open_connection(sock=wire, limit=room_bytes))
    try:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        await connection.write(f"{head}{headers}\r\n".encode() + data)
        yield connection
    finally:
        await connection.cut()


@asynccontextmanager
async def asking(
    server: LlmServe, body: Json, headers: str = "", *, room_bytes: int = 2**16
) -> AsyncIterator[Connection]:
    """Send a question."""
    data = json.dumps(body).encode()
    headers += f"Content-Length: {len(data)}\r\n"
    async with sending(server, headers, data, room_bytes=room_bytes) as connection:
        yield connection
