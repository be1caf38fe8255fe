"""Requests as generations, and refusals as errors with the parameter named."""

from typing import Any

import orjson
import pytest

from llm_engine.errors import PromptTooLong, RequestError, TemplateRefused
from llm_engine.generation import GenerateRequest
from llm_engine.sampling import SamplingParams
from llm_ingress.api.schemas import parse_chat
from llm_worker.translate import generate_request, refusal


def translated(**fields: Any) -> GenerateRequest:
    body = {"model": "echo", "messages": [{"role": "user", "content": "hi"}], **fields}
    chat = parse_chat(orjson.dumps(body))
    return generate_request(chat, seed=7, max_tokens=chat.token_limit)


def test_what_a_request_leaves_open_is_the_engines_default() -> None:
    request = translated()
    assert request.sampling == SamplingParams(seed=7)
    assert request.max_tokens is None
    assert request.stop == ()
    assert not request.think
    assert request.resumed == ()


def test_null_means_absent() -> None:
    fields = ("temperature", "top_p", "top_k", "min_p", "stop", "max_tokens", "repeat_penalty", "think")
    assert translated(**dict.fromkeys(fields)) == translated()


def test_every_sampling_parameter_arrives() -> None:
    sampling = SamplingParams(
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        seed=7,
        presence_penalty=-1,
        frequency_penalty=1.5,
        repeat_penalty=1.25,
    )
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repeat_penalty",
    )
    assert translated(**{name: getattr(sampling, name) for name in names}).sampling == sampling


def test_max_completion_tokens_wins() -> None:
    assert translated(max_tokens=5, max_completion_tokens=9).max_tokens == 9
    assert translated(max_tokens=5).max_tokens == 5
    assert translated(max_tokens=1e9).max_tokens == 10**9


@pytest.mark.parametrize(
    "fields", [{"think": True}, {"chat_template_kwargs": {"enable_thinking": True}}], ids=["think", "kwargs"]
)
def test_thinking_may_be_asked_for_in_two_ways(fields: dict[str, Any]) -> None:
    assert translated(**fields).think


def test_parts_of_a_message_are_one_text_and_a_developer_is_a_system() -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "PLUM"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert translated(messages=messages).messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say PLUM"},
    )


def test_a_prompt_that_is_too_long_is_told_both_lengths() -> None:
    error = refusal(PromptTooLong(300, 256))
    assert (error.status, error.param, error.code) == (400, "messages", "context_length_exceeded")
    body = orjson.loads(error.body())["error"]
    assert (body["n_prompt_tokens"], body["n_ctx"]) == (300, 256)


def test_messages_the_template_refuses_are_named_with_its_reason() -> None:
    error = refusal(TemplateRefused("roles must alternate"))
    assert (error.status, error.param) == (400, "messages")
    assert "roles must alternate" in error.message


def test_any_other_refusal_of_the_engine_is_a_400() -> None:
    error = refusal(RequestError("top_p is 7: it must be between 0 and 1"))
    assert error.status == 400
    assert "top_p" in error.message
