"""The chat request's parse: what is malformed is a 400 that names the field, what is well formed passes."""

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_ingress.api.errors import ApiError
from llm_ingress.api.schemas import ROLES, STOPS_MAX, ChatRequest, parse_chat
from llm_ingress.api.surrogates import find_half_pair

USER = {"role": "user", "content": "hi"}


def parse(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def parse_messages(*messages: Any) -> ChatRequest:
    return parse(messages=list(messages))


def refusal(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"
    return caught.value


def refusal_of(**fields: Any) -> tuple[str | None, str | None]:
    error = refusal(json.dumps({"model": "m", "messages": [USER], **fields}).encode())
    return error.param, error.code


def refusal_of_messages(*messages: Any) -> tuple[str | None, str | None]:
    return refusal_of(messages=list(messages))


def test_the_least_request() -> None:
    request = parse()
    assert request.model == "m"
    assert request.turns == (USER,)
    assert not request.streams
    assert not request.thinking
    assert not request.include_usage
    assert request.token_limit is None
    assert request.stops == ()


def test_null_means_absent_for_every_optional_field() -> None:
    optional = set(ChatRequest.__struct_fields__) - {"model", "messages"}
    assert parse(**dict.fromkeys(optional)) == parse()


def test_unknown_fields_are_ignored() -> None:
    assert parse(favourite_colour="blue", nested={"a": [1, {"b": None}]}) == parse()


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("stream", "false", "invalid_type"),
        ("stream", 1, "invalid_type"),
        ("truncation", "middle", "invalid_value"),
        ("truncation", "", "invalid_value"),
        ("truncation", True, "invalid_type"),
        ("temperature", "hot", "invalid_type"),
        ("temperature", True, "invalid_type"),
        ("temperature", -1, "invalid_value"),
        ("temperature", 2.01, "invalid_value"),
        ("top_p", 2, "invalid_value"),
        ("top_p", 0, "invalid_value"),
        ("top_k", -1, "invalid_value"),
        ("top_k", 1.5, "invalid_type"),
        ("top_k", 2**31, "invalid_value"),
        ("min_p", 1.1, "invalid_value"),
        ("seed", 2**63, "invalid_value"),
        ("seed", "7", "invalid_type"),
        ("presence_penalty", 2.5, "invalid_value"),
        ("frequency_penalty", -2.5, "invalid_value"),
        ("repeat_penalty", 0, "invalid_value"),
        ("repetition_penalty", -1, "invalid_value"),
        ("stop", "", "invalid_value"),
        ("stop", 5, "invalid_type"),
        ("stop", ["x"] * (STOPS_MAX + 1), "invalid_value"),
        ("stop", "x" * 5000, "invalid_value"),
        ("think", "yes", "invalid_type"),
        ("user", 5, "invalid_type"),
        ("prompt_cache_key", 5, "invalid_type"),
        ("conversation_id", ["c"], "invalid_type"),
        ("stream_options", [], "invalid_type"),
        ("messages", {}, "invalid_type"),
        ("messages", [], "invalid_value"),
        ("messages", None, "missing_required_parameter"),
        ("model", "", "invalid_value"),
        ("model", 5, "invalid_type"),
        ("model", None, "missing_required_parameter"),
    ],
)
def test_a_wrong_value_is_named(field: str, value: Any, code: str) -> None:
    assert refusal_of(**{field: value}) == (field, code)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("max_tokens", "10", "expected integer, number or null, got string"),
        ("stream", 1, "expected boolean or null, got integer"),
        ("temperature", True, "expected number or null, got boolean"),
        ("temperature", 3, "expected number <= 2.0"),
        ("top_k", 1.5, "expected integer or null, got number"),
        ("top_k", -1, "expected integer >= 0"),
        ("stop", 5, "expected string, array or null, got integer"),
        ("stop", "", "expected string of length >= 1"),
        ("messages", {}, "expected array, got object"),
        ("messages", [], "expected array of length >= 1"),
        ("stream_options", [], "expected object or null, got array"),
    ],
)
def test_what_was_expected_is_said_in_the_words_of_json(field: str, value: Any, reason: str) -> None:
    error = refusal(json.dumps({"model": "m", "messages": [USER], field: value}).encode())
    assert error.message == f"Invalid '{field}': {reason}."


@pytest.mark.parametrize("field", ["model", "messages"])
def test_a_required_field_is_missed(field: str) -> None:
    fields: dict[str, Any] = {"model": "m", "messages": [USER]}
    del fields[field]
    error = refusal(json.dumps(fields).encode())
    assert (error.param, error.code) == (field, "missing_required_parameter")


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0, "invalid_value"),
        (-1, "invalid_value"),
        (-2, "invalid_value"),
        (0.5, "invalid_value"),
        (1.5, "invalid_type"),
        ("10", "invalid_type"),
        (True, "invalid_type"),
        ([], "invalid_type"),
    ],
)
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_an_odd_token_limit_is_refused(field: str, value: Any, code: str) -> None:
    assert refusal_of(**{field: value}) == (field, code)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize(("value", "limit"), [(None, None), (1, 1), (1e9, 10**9), (10**30, 10**30)])
def test_a_token_limit_is_an_upper_bound(field: str, value: Any, limit: int | None) -> None:
    request = parse(**{field: value})
    assert request.token_limit == limit
    assert request.token_limit is None or type(request.token_limit) is int


def test_the_newer_name_of_the_token_limit_wins() -> None:
    assert parse(max_tokens=5, max_completion_tokens=7).token_limit == 7
    assert parse(max_tokens=5, max_completion_tokens=None).token_limit == 5


@pytest.mark.parametrize("truncation", ["auto", "disabled", None])
def test_truncation_is_one_of_two_or_left_to_the_server(truncation: str | None) -> None:
    assert parse(truncation=truncation).truncation == truncation


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_any_signed_64_bit_seed_is_a_seed(seed: int) -> None:
    assert parse(seed=seed).seed == seed


def test_stop_is_a_string_or_several() -> None:
    assert parse(stop="a").stops == ("a",)
    assert parse(stop=["a", "b"]).stops == ("a", "b")
    assert parse(stop=[]).stops == ()
    assert refusal_of(stop=["a", ""]) == ("stop[1]", "invalid_value")


def test_the_repeat_penalty_has_two_names() -> None:
    assert parse(repeat_penalty=1.1).penalty_of_repeats == 1.1
    assert parse(repetition_penalty=1.2).penalty_of_repeats == 1.2
    assert parse(repeat_penalty=1.1, repetition_penalty=1.2).penalty_of_repeats == 1.1
    assert parse().penalty_of_repeats is None


def test_thinking_is_asked_for_in_two_ways() -> None:
    assert parse(think=True).thinking
    assert parse(chat_template_kwargs={"enable_thinking": True, "other": 1}).thinking
    assert not parse(think=False, chat_template_kwargs={"enable_thinking": True}).thinking
    assert refusal_of(chat_template_kwargs={"enable_thinking": "yes"}) == (
        "chat_template_kwargs.enable_thinking",
        "invalid_type",
    )


def test_stream_options_need_a_stream() -> None:
    options = {"include_usage": True}
    assert parse(stream=True, stream_options=options).include_usage
    assert not parse(stream=True, stream_options={}).include_usage
    assert refusal_of(stream_options=options) == ("stream_options", "invalid_value")
    assert refusal_of(stream=False, stream_options=options) == ("stream_options", "invalid_value")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 2),
        ("n", 1000),
        ("logprobs", True),
        ("top_logprobs", 2),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("logit_bias", {"50256": -100}),
    ],
)
def test_what_is_not_there_yet_is_refused_by_name(field: str, value: Any) -> None:
    assert refusal_of(**{field: value}) == (field, "invalid_value")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1),
        ("logprobs", False),
        ("response_format", {"type": "text"}),
        ("tools", []),
        ("tool_choice", "none"),
        ("functions", []),
        ("function_call", "none"),
        ("modalities", ["text"]),
        ("logit_bias", {}),
    ],
)
def test_what_is_not_there_yet_may_be_switched_off(field: str, value: Any) -> None:
    parse(**{field: value})


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_a_known_role_is_taken(role: str) -> None:
    assert parse_messages({"role": role, "content": "x"}).turns == ({"role": ROLES[role], "content": "x"},)


def test_a_developer_is_a_system() -> None:
    assert parse_messages({"role": "developer", "content": "x"}).turns[0]["role"] == "system"


@pytest.mark.parametrize("role", ["robot", "tool", "function", "", "User"])
def test_an_unknown_role_is_named(role: str) -> None:
    assert refusal_of_messages(USER, {"role": role, "content": "x"}) == ("messages[1].role", "invalid_value")


def test_all_text_parts_are_used_in_order() -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "PLUM"}]
    assert (
        parse_messages({"role": "user", "content": parts}).turns
        == parse_messages({"role": "user", "content": "Say PLUM"}).turns
    )


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_content_may_be_empty(content: Any) -> None:
    assert parse_messages({"role": "user", "content": content}).turns[0]["content"] == ""


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        (1, "messages[1]", "invalid_type"),
        (None, "messages[1]", "invalid_type"),
        ({}, "messages[1].role", "missing_required_parameter"),
        ({"role": 5, "content": ""}, "messages[1].role", "invalid_type"),
        ({"role": "user"}, "messages[1].content", "missing_required_parameter"),
        ({"role": "user", "content": None}, "messages[1].content", "missing_required_parameter"),
        ({"role": "assistant", "content": None}, "messages[1].content", "missing_required_parameter"),
        ({"role": "user", "content": 5}, "messages[1].content", "invalid_type"),
        ({"role": "user", "content": {}}, "messages[1].content", "invalid_type"),
        ({"role": "user", "content": ["a"]}, "messages[1].content[0]", "invalid_type"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
            "messages[1].content[1].type",
            "invalid_value",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            "messages[1].content[0].type",
            "invalid_value",
        ),
        (
            {"role": "user", "content": [{"text": "a"}]},
            "messages[1].content[0].type",
            "missing_required_parameter",
        ),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "messages[1].content[0].text",
            "missing_required_parameter",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": 5}]},
            "messages[1].content[0].text",
            "invalid_type",
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]},
            "messages[1].tool_calls",
            "invalid_value",
        ),
        (
            {"role": "assistant", "content": "", "function_call": {"name": "f"}},
            "messages[1].function_call",
            "invalid_value",
        ),
    ],
)
def test_a_malformed_message_is_named_to_the_field(message: Any, param: str, code: str) -> None:
    assert refusal_of_messages(USER, message) == (param, code)


def test_an_answer_of_the_sdk_goes_back_into_the_history() -> None:
    dumped: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "tool_calls": None,
        "function_call": None,
        "audio": None,
        "annotations": [],
    }
    assert parse_messages(USER, dumped, USER).turns[1] == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b'{"a":',
        b"{",
        b"nonsense",
        b'{"model":"m","messages":[{"role":"user","content":"x"}]} trailing',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"whatever":Infinity}',
        b'{"model":"\xff","messages":[]}',
        b"\xef\xbb\xbf{}",
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"x":'
        + b"[" * 100_000
        + b"]" * 100_000
        + b"}",
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"x":'
        + b'{"a":' * 100_000
        + b"1"
        + b"}" * 100_000
        + b"}",
    ],
    ids=lambda body: repr(body[:60]),
)
def test_what_is_not_json_is_a_400_without_a_field(body: bytes) -> None:
    error = refusal(body)
    assert (error.param, error.code) == (None, None)


@pytest.mark.parametrize(
    ("text", "escape"),
    [
        (r"\ud800", r"\ud800"),
        (r"\udc00", r"\udc00"),
        (r"so \uD83D", r"\uD83D"),
        (r"\ud83d\ude00 \ud83d!", r"\ud83d"),
        (r"\ud83d\u0041", r"\ud83d"),
        (r"\ud83d\ud83d\ude00", r"\ud83d"),
        (r"\ude00\ud83d", r"\ude00"),
        (r"\\\ud800", r"\ud800"),
        (r"\"\ud800", r"\ud800"),
        (r"\ud7ff\ue000\ud800", r"\ud800"),
    ],
)
def test_half_a_surrogate_pair_is_named_with_its_field(text: str, escape: str) -> None:
    body = r'{"model":"m","messages":[{"role":"user","content":"\\ud800"},{"role":"user","content":"%s"}]}'
    error = refusal((body % text).encode())
    assert (error.param, error.code) == ("messages[1].content", "invalid_value")
    assert f"{escape} is half of a surrogate pair" in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (rb'{"model":"\udfff","messages":[]}', "model"),
        (
            rb'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"\udfff"}]}]}',
            "messages[0].content[0].text",
        ),
        (rb'{"model":"m","stop":["a","\udfff"],"messages":[]}', "stop[1]"),
    ],
)
def test_half_a_surrogate_pair_is_found_in_every_field_of_text(body: bytes, param: str) -> None:
    assert refusal(body).param == param


@pytest.mark.parametrize(
    "body", [rb'{"model":"m","x":"\ud800"}', rb'{"\ud800":1}', rb'{"model":"m","tools":["\ud800"]}']
)
def test_half_a_surrogate_pair_in_no_known_field_is_told_by_its_place(body: bytes) -> None:
    error = refusal(body)
    assert (error.param, error.code) == (None, None)
    before, _, _ = body.partition(rb'"\ud800')
    assert rf"\ud800 is half of a surrogate pair, which is no text (in the string at byte {len(before)})" in (
        error.message
    )


@given(st.text(st.characters(codec="utf-16"), max_size=20))
def test_whole_surrogate_pairs_are_text(text: str) -> None:
    assert parse_messages({"role": "user", "content": text}).turns[0]["content"] == text
    assert find_half_pair(json.dumps(text).encode()) is None


@given(st.text(st.sampled_from('a"\\\ud83d\ude00'), max_size=8))
def test_half_a_surrogate_pair_is_found_wherever_there_is_one(text: str) -> None:
    try:
        text.encode("utf-16", "surrogatepass").decode("utf-16")
        is_text = True
    except UnicodeDecodeError:
        is_text = False
    assert (find_half_pair(json.dumps(text).encode()) is None) is is_text


@pytest.mark.parametrize("piece", [rb"\u0041", rb"\\", rb"\"", b"a", rb"\ud83d\ude00"])
def test_a_long_body_is_looked_through_in_one_pass(piece: bytes) -> None:
    started = time.monotonic()
    assert find_half_pair(b'{"x":"' + piece * 500_000 + rb'\ud800"}') == (r"\ud800", 5)
    assert find_half_pair(b'{"x":"' + piece * 500_000) is None
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("body", [b"[]", b"null", b"5", b'"x"', b"true", b"[" * 10_000])
def test_json_of_something_else_than_an_object_is_a_400(body: bytes) -> None:
    error = refusal(body)
    assert error.param is None


def test_a_number_beyond_all_floats_is_named() -> None:
    error = refusal(b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":1e999}')
    assert (error.param, error.code) == ("temperature", "invalid_value")


def test_the_last_of_duplicate_keys_counts() -> None:
    body = b'{"model":"a","model":"b","messages":[{"role":"user","content":"x"}]}'
    assert parse_chat(body).model == "b"


def test_nul_is_text() -> None:
    assert parse_messages({"role": "user", "content": "a\0b"}).turns[0]["content"] == "a\0b"


def test_an_error_does_not_repeat_a_long_value() -> None:
    error = refusal(json.dumps({"model": "m", "messages": [{"role": "x" * 100_000}]}).encode())
    assert len(error.body()) < 600


PYTHON_TYPES = re.compile(r"\b(int|float|str|bool|bytes|list|dict|None)\b")


def refusal_if_any(body: bytes) -> ApiError | None:
    try:
        parse_chat(body)
    except ApiError as error:
        return error
    return None


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_parse_or_a_400(body: bytes) -> None:
    error = refusal_if_any(body)
    assert error is None or (error.status == 400 and error.body())


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(ChatRequest.__struct_fields__), JSON_VALUES)
def test_no_value_of_any_field_does_anything_but_parse_or_a_400_that_names_it(field: str, value: Any) -> None:
    error = refusal_if_any(json.dumps({"model": "m", "messages": [USER], field: value}).encode())
    assert error is None or (error.status == 400 and (error.param or "").startswith(field))


@given(st.sampled_from(ChatRequest.__struct_fields__), JSON_VALUES)
def test_no_value_of_the_wrong_type_is_told_of_in_the_words_of_python(field: str, value: Any) -> None:
    error = refusal_if_any(json.dumps({"model": "m", "messages": [USER], field: value}).encode())
    if error is not None and error.code == "invalid_type":
        assert not PYTHON_TYPES.search(error.message.removeprefix(f"Invalid '{error.param}'"))
