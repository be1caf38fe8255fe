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

from llm_engine.errors import PromptTooLong, RequestError
from llm_ingress.api.errors import ApiError, prompt_too_long, session_full, session_gone
from llm_ingress.api.infer import InferRequest, parse_infer
from llm_ingress.api.schemas import ChatMessage, ChatRequest
from llm_ingress.errors import WireError
from llm_ingress.turns import Does, TurnRecord, unpack_asked
from llm_worker.engine import TextEngine
from llm_worker.translate import generate_request


class Said(msgspec.Struct, frozen=True):
    """One message as it is kept."""

    role: str
    content: str


Messages: TypeAlias = tuple[Said, ...]

_MESSAGES = msgspec.json.Decoder(Messages)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a client asks, and what was said before."""

    request: InferRequest
    earlier: Messages

    @property
    def asked(self) -> Said:
        """This turn's question."""
        return Said("user", self.request.prompt)

    def chat(self, *, with_earlier: bool = True) -> ChatRequest:
        """The turn as the chat completion that it is."""
        request = self.request
        said = (*self.earlier, self.asked) if with_earlier else (self.asked,)
        return ChatRequest(
            model=request.model,
            messages=[ChatMessage(role=message.role, content=message.content) for message in said],
            stream=True,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
        )


def read_turn(body: bytes) -> Turn:
    """The turn that a lane of the coordinator's asks for.

    Raises: ApiError, also where what was said before cannot be read here.
    """
    try:
        asked = unpack_asked(body)
        earlier = tuple(message for record in asked.history for message in _MESSAGES.decode(record))
    except (WireError, msgspec.MsgspecError, ValueError) as error:
        raise session_gone("What was said in this conversation cannot be read") from error
    return Turn(parse_infer(asked.request), earlier)


def too_long(turn: Turn, error: PromptTooLong, engine: TextEngine) -> ApiError:
    """What a client is told whose turn does not fit: whether it would in a new conversation."""
    if turn.earlier:
        alone = turn.chat(with_earlier=False)
        try:
            engine.prepare(generate_request(alone, seed=0, max_tokens=alone.token_limit))
        except PromptTooLong as still:
            error = still
        except RequestError:
            pass  # whatever else is wrong with it, it is not its length
        else:
            return session_full(f"It is {error.n_prompt} tokens long, and this model's context {error.n_ctx}")
    return prompt_too_long(error.n_prompt, error.n_ctx)


def record_of(said: Messages, *, closing: bytes, does: Does = Does.FOLLOWS) -> TurnRecord:
    """What is left of a turn: the messages it added, or all of a conversation that was replaced."""
    content = orjson.dumps([{"role": message.role, "content": message.content} for message in said])
    return TurnRecord(does=does, closing=closing, content=content)
