"""A turn of a conversation whose earlier turns the ingress keeps: asked for, and left as a record.

    record's content    JSON: [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]

A record holds messages: those of its turn, which follow the ones before, or a whole conversation in their
place. Reading all of them in order gives what was said so far, whichever worker left them.
Called by: `preparation.py`, on the preparation thread; `turn_answer.py`. Pure.
"""

from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import orjson

from llm_ingress.api.errors import session_gone
from llm_ingress.api.infer import InferRequest, parse_infer
from llm_ingress.api.schemas import ChatMessage, ChatRequest
from llm_ingress.errors import WireError
from llm_ingress.turns import Does, TurnRecord, unpack_asked
from llm_worker.compaction import Compaction, shortened


class Said(msgspec.Struct, frozen=True):
    """One message as it is kept."""

    role: str
    content: str


Messages: TypeAlias = tuple[Said, ...]

_MESSAGES = msgspec.json.Decoder(Messages)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a client asks, and what was said before.

    `share` is how much of it is to be kept: with less than 1 it has to be shortened.
    """

    request: InferRequest
    earlier: Messages
    share: float = 1.0

    @property
    def asked(self) -> Said:
        """This turn's question."""
        return Said("user", self.request.prompt)

    def chat(self) -> ChatRequest:
        """The turn as the chat completion that it is."""
        request = self.request
        return ChatRequest(
            model=request.model,
            messages=[
                ChatMessage(role=message.role, content=message.content)
                for message in (*self.earlier, self.asked)
            ],
            stream=True,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
        )

    def left(self, compaction: Compaction | None) -> tuple[Does, Messages]:
        """What it leaves but for its answer: its question, or all that stands once it was shortened."""
        if compaction is None:
            return Does.FOLLOWS, (self.asked,)
        turns = shortened(self.chat().turns, compaction.n_older, compaction.summary)
        return Does.REPLACES, tuple(Said(turn["role"], turn["content"]) for turn in turns)


def read_turn(body: bytes) -> Turn:
    """The turn that a lane of the coordinator's asks for.

    Raises: ApiError, also where what was said before cannot be read here.
    """
    try:
        asked = unpack_asked(body)
        earlier = tuple(message for record in asked.history for message in _MESSAGES.decode(record))
    except (WireError, msgspec.MsgspecError, ValueError) as error:
        raise session_gone("What was said in this conversation cannot be read") from error
    return Turn(parse_infer(asked.request), earlier, min(1.0, asked.limit_bytes / asked.n_bytes))


def record_of(does: Does, said: Messages, *, closing: bytes) -> TurnRecord:
    """What is left of a turn: the messages it added, or all of a conversation that was replaced."""
    content = orjson.dumps([{"role": message.role, "content": message.content} for message in said])
    return TurnRecord(does=does, closing=closing, content=content)
