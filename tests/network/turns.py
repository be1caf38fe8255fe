"""A turn of a conversation as its client sees it, and what all its events must be like.

turn = await Turn.begin(http, "Tell a story.", conversation_id=ID)
await turn.read(10)       # ten more tokens
said = await turn.rest()  # a Said; the numbers of its events are checked
"""

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from tests.network.fleet import MODEL, PATIENCE_S, Ingress

INFER = "/coordinator/infer"


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """A complete answer; equal ones may have found more or less in the cache."""

    text: str
    finish_reason: str
    usage: dict[str, Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Said) and self._facts() == other._facts()

    def _facts(self) -> tuple[str, str, int, int]:
        n_prompt, n_answer = self.usage["prompt_tokens"], self.usage["completion_tokens"]
        return self.text, self.finish_reason, n_prompt, n_answer

    @property
    def n_cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


class Turn:
    """One answer on its way. Temperature 0 unless told otherwise."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._events = _events(response)
        self.events: list[dict[str, Any]] = []

    @classmethod
    async def begin(
        cls, http: httpx.AsyncClient, prompt: str, *, conversation_id: str, **fields: Any
    ) -> "Turn":
        """Ask; returns when the answer's head is there."""
        response = await http.send(
            http.build_request("POST", INFER, json=body(prompt, conversation_id, **fields)), stream=True
        )
        assert response.status_code == 200, await response.aread()
        return cls(response)

    async def read(self, n_tokens: int) -> None:
        """Read on until `n_tokens` more have come."""
        for _ in range(n_tokens):
            self.events.append(await anext(self._events))

    async def rest(self) -> Said:
        """Read to the end: events numbered from 0, the last of which says how it ended."""
        async for event in self._events:
            self.events.append(event)
        assert [event["seq"] for event in self.events] == list(range(len(self.events)))
        *tokens, last = self.events
        assert "token" not in last
        return Said("".join(event["token"] for event in tokens), last["finish_reason"], last["usage"])

    async def leave(self) -> None:
        """Close the connection, as a client that has had enough."""
        await self._response.aclose()


def body(prompt: str, conversation_id: str, **fields: Any) -> dict[str, Any]:
    """The body of a turn."""
    asked = {"conversation_id": conversation_id, "prompt": prompt, "model": MODEL, "max_tokens": 24}
    return {**asked, "temperature": 0, **fields}


async def say(http: httpx.AsyncClient, prompt: str, *, conversation_id: str, **fields: Any) -> Said:
    """A whole turn."""
    return await (await Turn.begin(http, prompt, conversation_id=conversation_id, **fields)).rest()


def new_id() -> str:
    """A conversation that nobody knows."""
    return str(uuid.uuid4())


def http_of(ingress: Ingress) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=ingress.url, timeout=PATIENCE_S, trust_env=False)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line:
            yield orjson.loads(line.removeprefix("data: "))
