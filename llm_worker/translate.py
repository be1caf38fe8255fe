"""Between the API's words and the engine's: a chat completion as a generation, a refusal as an API error.

Called by: `preparation.py` on the preparation thread, `job.py` on the event loop. Pure.
"""

from typing import TypeVar

from llm_engine.errors import PromptTooLong, RequestError, TemplateRefused
from llm_engine.generation import GenerateRequest
from llm_engine.sampling import SamplingParams
from llm_ingress.api.errors import ApiError, context_length_exceeded, invalid_value
from llm_ingress.api.schemas import ChatRequest

T = TypeVar("T")

DEFAULTS = SamplingParams()


def generate_request(
    chat: ChatRequest, *, seed: int, max_tokens: int | None, resumed: tuple[int, ...] = ()
) -> GenerateRequest:
    """The generation a request asks for, under a seed and a limit decided by the caller.

    Raises: RequestError for a sampling parameter the engine cannot take.
    """
    return GenerateRequest(
        messages=chat.turns,
        max_tokens=max_tokens,
        sampling=_sampling(chat, seed),
        stop=chat.stops,
        think=chat.thinking,
        resumed=resumed,
    )


def refusal(error: RequestError) -> ApiError:
    """What the client is told when the engine can never honour its request."""
    match error:
        case PromptTooLong(n_prompt=n_prompt, n_ctx=n_ctx):
            return context_length_exceeded(n_prompt, n_ctx)
        case TemplateRefused():
            return invalid_value("messages", f"the model's chat template refused them: {error}")
        case _:
            return invalid_value(None, str(error))


def _sampling(chat: ChatRequest, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=_given(chat.temperature, DEFAULTS.temperature),
        top_p=_given(chat.top_p, DEFAULTS.top_p),
        top_k=_given(chat.top_k, DEFAULTS.top_k),
        min_p=_given(chat.min_p, DEFAULTS.min_p),
        seed=seed,
        presence_penalty=_given(chat.presence_penalty, DEFAULTS.presence_penalty),
        frequency_penalty=_given(chat.frequency_penalty, DEFAULTS.frequency_penalty),
        repeat_penalty=_given(chat.penalty_of_repeats, DEFAULTS.repeat_penalty),
    )


def _given(value: T | None, default: T) -> T:
    return default if value is None else value
