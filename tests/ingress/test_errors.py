"""The error envelope: always the same four keys, always encodable, and statuses an SDK acts on rightly."""

import json

import pytest

from llm_ingress.api import errors
from llm_ingress.api.errors import ApiError, ErrorType, error_body

EVERY_ERROR = [
    errors.bad_json("no"),
    errors.wrong_content_type("text/html"),
    errors.unsupported_charset("utf-16"),
    errors.unsupported_coding("gzip"),
    errors.missing_parameter("messages"),
    errors.invalid_type("stream", "expected a boolean"),
    errors.invalid_value(None, "no"),
    errors.model_not_found("nope"),
    errors.context_length_exceeded(5000, 4096),
    errors.unknown_route("GET", "/nope"),
    errors.wrong_method("GET", "/v1/chat/completions", ("POST",)),
    errors.request_too_large(10),
    errors.body_timeout(30.0),
    errors.head_timeout(30.0),
    errors.unreadable_head(400),
    errors.unreadable_head(501),
    errors.overloaded("ring_full", 1, "full"),
    errors.worker_unavailable("lost"),
    errors.deadline_passed("too late"),
    errors.internal(),
]


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: str(error.status))
def test_every_envelope_has_all_four_keys(error: ApiError) -> None:
    envelope = json.loads(error.body())
    assert list(envelope) == ["error"]
    assert {"message", "type", "param", "code"} <= envelope["error"].keys()
    assert envelope["error"]["message"] == error.message
    assert envelope["error"]["code"] is None or isinstance(envelope["error"]["code"], str)


def test_an_error_can_quote_what_cannot_be_encoded() -> None:
    body = error_body("bad \ud800 text", ErrorType.INVALID_REQUEST)
    assert json.loads(body)["error"]["message"] == "bad ? text"


def test_an_error_quotes_no_more_than_a_line() -> None:
    assert len(errors.model_not_found("x" * 1_000_000).body()) < 500
    assert len(errors.unknown_route("GET", "/" + "x" * 1_000_000).body()) < 500


@pytest.mark.parametrize(("asked", "sent"), [(-5, "1"), (0, "1"), (7, "7"), (30, "30"), (600, "30")])
def test_retry_after_is_whole_seconds_an_sdk_will_wait(asked: int, sent: str) -> None:
    assert dict(errors.overloaded("ring_full", asked, "full").headers)["retry-after"] == sent


def test_an_overload_says_which_kind() -> None:
    error = json.loads(errors.overloaded("draining", 1, "going away").body())["error"]
    assert error["type"] == "service_unavailable_error"
    assert error["code"] == "server_is_overloaded"
    assert error["reason"] == "draining"


def test_a_prompt_too_long_says_by_how_much() -> None:
    error = errors.context_length_exceeded(5000, 4096)
    envelope = json.loads(error.body())["error"]
    assert (error.status, error.param, error.code) == (400, "messages", "context_length_exceeded")
    assert (envelope["n_prompt_tokens"], envelope["n_ctx"]) == (5000, 4096)


def test_what_will_fail_again_is_not_worth_a_retry() -> None:
    for error in EVERY_ERROR:
        is_retried_by_default = error.status in (408, 409, 429) or error.status >= 500
        fails_again = error.status in (500, 501, 504)
        if is_retried_by_default and fails_again:
            assert ("x-should-retry", "false") in error.headers


def test_a_wrong_method_names_the_right_ones() -> None:
    assert ("allow", "POST, OPTIONS") in errors.wrong_method("PUT", "/x", ("POST", "OPTIONS")).headers
