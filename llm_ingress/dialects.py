"""What differs between the paths that take a lane: how a request is checked, how an error ends a stream.

A path that is not in `DIALECTS` takes no lane. Pure; shared with the worker.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llm_ingress.api.errors import ApiError, internal, worker_failed
from llm_ingress.api.infer import parse_infer
from llm_ingress.api.schemas import parse_chat
from llm_ingress.conversation import Conversation, conversation_of, conversation_of_session
from llm_ingress.limits import AtCap

CHAT = "/v1/chat/completions"
INFER = "/coordinator/infer"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says that the ingress acts on."""

    model: str
    user: str | None
    conversation: Conversation
    session_id: str | None = None  # of a conversation that the ingress keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One path's ways.

    `read` checks a body completely and returns what the ingress needs of it, or raises ApiError.
    `error_event` is the last thing in a stream that fails after its first byte. `at_cap` is what becomes of a
    request while a budget is spent.
    `worker_failed` is what a client meets whose worker says that another would fail as well.
    """

    read: Callable[[bytes], Asked]
    error_event: Callable[[ApiError], bytes]
    worker_failed: Callable[[], ApiError]
    at_cap: AtCap = AtCap.PARK


def _read_chat(body: bytes) -> Asked:
    request = parse_chat(body)
    conversation = conversation_of(
        cache_key=request.prompt_cache_key,
        conversation_id=request.conversation_id,
        messages=[(turn["role"], turn["content"]) for turn in request.turns],
    )
    return Asked(request.model, request.user, conversation)


def _read_infer(body: bytes) -> Asked:
    request = parse_infer(body)
    return Asked(request.model, request.user, conversation_of_session(request.session_id), request.session_id)


def _sse_error(error: ApiError) -> bytes:
    """An event SDKs raise from. No `[DONE]` follows: the answer is not complete."""
    return b"data: " + error.body() + b"\n\n"


DIALECTS: Mapping[str, Dialect] = {
    CHAT: Dialect(read=_read_chat, error_event=_sse_error, worker_failed=internal),
    INFER: Dialect(
        read=_read_infer,
        error_event=_sse_error,
        worker_failed=lambda: worker_failed("The worker failed while it answered."),
        at_cap=AtCap.REFUSE,
    ),
}
