"""What the streams of a load carry, and the process that writes it, step by step, when it is told to.

A source is a worker or a backend of fakes: `relay`'s in the serving process itself, `ring`'s at the far end
of mutual TLS, a peer's behind HTTP. Its parent process sends a `Load`, then "go" once the reader has the
warm-up, then "end"; `None` ends the source.
"""

import asyncio
import json
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

WARM_UP_STEPS = 10
MODEL = "m"
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
_BEFORE = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"'
)
_AFTER = b'"},"finish_reason":null}]}\n\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One measurement: so many streams, so many events in each, one at every step."""

    n_streams: int
    n_chunks: int
    size_bytes: int
    interval_s: float

    def event(self, step: int) -> bytes:
        """One chunk of a chat completion, `size_bytes` long; a router may parse it.

        No two of a stream are the same: LiteLLM ends a stream that repeats itself.
        """
        content = b"%06d" % step + b"x" * (self.size_bytes - len(_BEFORE) - len(_AFTER) - 6)
        return b"%s%s%s" % (_BEFORE, content, _AFTER)


class Source(Protocol):
    """Writes to the streams of one load at a time."""

    async def begin(self, load: Load) -> None:
        """Wait for every stream to be asked for, and send its head."""

    def step(self, event: bytes) -> None:
        """Write one event to every stream."""

    def end(self) -> None:
        """End every stream."""


async def obey(parent: Connection, source: Source) -> None:
    """Write the loads the parent process asks for, until it wants no more."""
    while (load := await _hear(parent)) is not None:
        await source.begin(load)
        await _steps(source, load, WARM_UP_STEPS)
        assert await _hear(parent) == "go"
        await _steps(source, load, load.n_chunks)
        assert await _hear(parent) == "end"
        source.end()


async def _steps(source: Source, load: Load, n_steps: int) -> None:
    for step in range(n_steps):
        source.step(load.event(step))
        await asyncio.sleep(load.interval_s)


async def _hear(parent: Connection) -> Any:
    return await asyncio.to_thread(parent.recv)
