"""A streamed answer as its client sees it: the official SDK, unchanged, and what all its chunks must be like.

chat = await Chat.begin(sdk, "Tell a story.", max_tokens=100)
await chat.read(10)         # ten more pieces of text
await worker.kill()
answer = await chat.rest()  # an Answer; its shape is checked
"""

from dataclasses import dataclass
from typing import Any

import openai
from openai import AsyncStream
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionChunk

from tests.network.fleet import MODEL, PATIENCE_S, Ingress


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer."""

    id: str
    text: str
    finish_reason: str
    usage: CompletionUsage


class Chat:
    """One answer on its way. Temperature 0 unless told otherwise; `history` are turns before the prompt."""

    def __init__(self, stream: AsyncStream[ChatCompletionChunk]) -> None:
        self._stream = stream
        self.chunks: list[ChatCompletionChunk] = []

    @classmethod
    async def begin(cls, sdk: openai.AsyncOpenAI, prompt: str, **fields: Any) -> "Chat":
        """Ask; returns when the answer's head is there."""
        fields = {"model": MODEL, "temperature": 0, **fields}
        stream: AsyncStream[ChatCompletionChunk] = await sdk.chat.completions.create(
            messages=[*fields.pop("history", ()), {"role": "user", "content": prompt}],
            stream=True,
            stream_options={"include_usage": True},
            **fields,
        )
        return cls(stream)

    @property
    def text(self) -> str:
        """What has come so far."""
        return "".join(_text_of(chunk) for chunk in self.chunks)

    async def read(self, n_pieces: int) -> None:
        """Read on until `n_pieces` more pieces of text have come."""
        while n_pieces:
            chunk = await anext(self._stream)
            self.chunks.append(chunk)
            n_pieces -= bool(_text_of(chunk))

    async def rest(self) -> Answer:
        """Read to the end. One id, role, finish reason and usage, each in its place, whatever happened."""
        async for chunk in self._stream:
            self.chunks.append(chunk)
        (id_,) = {(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in self.chunks}
        roles = [chunk.choices[0].delta.role is not None for chunk in self.chunks[:-1]]
        assert roles == [True, *[False] * (len(roles) - 1)], roles
        finishes = [chunk.choices[0].finish_reason for chunk in self.chunks[:-1]]
        assert not any(finishes[:-1]), finishes
        usage, finish = self.chunks[-1].usage, finishes[-1]
        assert usage is not None
        assert finish is not None
        assert not self.chunks[-1].choices
        return Answer(id_[0], self.text, finish, usage)

    async def leave(self) -> None:
        """Close the connection, as a client that has had enough."""
        await self._stream.close()


async def ask(sdk: openai.AsyncOpenAI, prompt: str, **fields: Any) -> Answer:
    """A whole answer, streamed."""
    return await (await Chat.begin(sdk, prompt, **fields)).rest()


async def ask_whole(sdk: openai.AsyncOpenAI, prompt: str, **fields: Any) -> Answer:
    """A whole answer, in one piece."""
    fields = {"model": MODEL, "temperature": 0, **fields}
    answer = await sdk.chat.completions.create(messages=[{"role": "user", "content": prompt}], **fields)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert answer.usage is not None
    return Answer(answer.id, choice.message.content or "", choice.finish_reason, answer.usage)


def sdk_of(ingress: Ingress) -> openai.AsyncOpenAI:
    """The official client, except that it does not hide a refusal by trying again."""
    return openai.AsyncOpenAI(base_url=f"{ingress.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def _text_of(chunk: ChatCompletionChunk) -> str:
    return (chunk.choices[0].delta.content or "") if chunk.choices else ""
