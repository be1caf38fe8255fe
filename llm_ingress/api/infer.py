"""The shape of a turn of a conversation: the body of POST /coordinator/infer.

Like a chat completion's, it is complete without a model and without the conversation. The public surface
parses it before the request takes its place in line, the worker again.
"""

import re
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from llm_ingress.api.errors import invalid_value
from llm_ingress.api.schemas import INT64_MAX, INT64_MIN, TokenLimit, check_token_limits, read_body

USER_MAX_CHARS = 256

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


class InferRequest(Struct, frozen=True, kw_only=True):
    """What a client asks for: the next turn of a conversation whose earlier turns are kept here."""

    conversation_id: str
    prompt: Annotated[str, Meta(min_length=1)]
    model: Annotated[str, Meta(min_length=1)]
    max_tokens: TokenLimit

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)] | None = None
    user: Annotated[str, Meta(max_length=USER_MAX_CHARS)] | None = None

    @property
    def session_id(self) -> str:
        """The conversation's id in the one way it is kept under."""
        return normal_id(self.conversation_id)


_DECODER = msgspec.json.Decoder(InferRequest)


def parse_infer(body: bytes) -> InferRequest:
    """Read and check a request body. Raises: ApiError, a 400 whose `param` is the field at fault."""
    request = read_body(body, _DECODER)
    check_token_limits(request, "max_tokens")
    if _UUID.fullmatch(request.session_id) is None:
        raise invalid_value(
            "conversation_id", "it must be a UUID, such as 550e8400-e29b-41d4-a716-446655440000"
        )
    return request


def normal_id(text: str) -> str:
    """A UUID in small letters: capitals make no other conversation."""
    return text.lower()
