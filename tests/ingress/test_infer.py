"""The body of a turn: what is asked for, and which field is at fault."""

import json
from typing import Any

import pytest

from llm_ingress.api.errors import ApiError
from llm_ingress.api.infer import parse_infer

ID = "550e8400-e29b-41d4-a716-446655440000"


def body(**fields: Any) -> bytes:
    asked = {"conversation_id": ID, "prompt": "hi", "model": "m", "max_tokens": 5, **fields}
    return json.dumps({name: value for name, value in asked.items() if value is not ...}).encode()


def test_a_turn() -> None:
    request = parse_infer(body(temperature=0, seed=7, user="u", another=1))
    assert (request.session_id, request.prompt, request.model, request.max_tokens) == (ID, "hi", "m", 5)
    assert (request.temperature, request.seed, request.user) == (0, 7, "u")


def test_capitals_make_no_other_conversation() -> None:
    assert parse_infer(body(conversation_id=ID.upper())).session_id == ID


@pytest.mark.parametrize("name", ["conversation_id", "prompt", "model", "max_tokens"])
@pytest.mark.parametrize("value", [..., None])
def test_a_missing_field_is_named(name: str, value: object) -> None:
    with pytest.raises(ApiError) as refused:
        parse_infer(body(**{name: value}))
    error = refused.value
    assert (error.status, error.param, error.code) == (400, name, "missing_required_parameter")


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("conversation_id", "1234", "invalid_value"),
        ("conversation_id", f"{ID}0", "invalid_value"),
        ("conversation_id", f"{{{ID}}}", "invalid_value"),
        ("conversation_id", ID.replace("-", ""), "invalid_value"),
        ("conversation_id", 7, "invalid_type"),
        ("prompt", "", "invalid_value"),
        ("prompt", ["hi"], "invalid_type"),
        ("model", "", "invalid_value"),
        ("max_tokens", 0, "invalid_value"),
        ("max_tokens", 1.5, "invalid_type"),
        ("max_tokens", "9", "invalid_type"),
        ("temperature", 3, "invalid_value"),
        ("user", "u" * 257, "invalid_value"),
    ],
)
def test_a_wrong_field_is_named(name: str, value: object, code: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_infer(body(**{name: value}))
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, name, code)


def test_half_a_surrogate_pair_is_placed() -> None:
    with pytest.raises(ApiError) as refused:
        parse_infer(body().replace(b'"hi"', b'"\\ud800"'))
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7"])
def test_what_is_no_object_is_a_400(text: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse_infer(text)
    assert refused.value.status == 400
