"""What differs between the paths that take a lane: how a request is checked, how an error ends a stream.

A path that is not in `DIALECTS` takes no lane. Pure; shared with the worker.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llm_ingress.api.errors import ApiError
from llm_ingress.api.schemas import parse_chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One path's ways.

    `model_of` checks a body completely and returns the model it asks for, or raises ApiError.
    `error_event` is the last thing in a stream that fails after its first byte.
    """

    model_of: Callable[[bytes], str]
    error_event: Callable[[ApiError], bytes]


def _chat_model(body: bytes) -> str:
    return parse_chat(body).model


def _sse_error(error: ApiError) -> bytes:
    """An event SDKs raise from. No `[DONE]` follows: the answer is not complete."""
    return b"data: " + error.body() + b"\n\n"


DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": Dialect(model_of=_chat_model, error_event=_sse_error),
}
