"""What is read of an answer, however its bytes come."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.answers import Exchange

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}


def event(payload: Any) -> bytes:
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return b"data: " + data + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


EVENTS = (
    delta(role="assistant", content=None),
    delta(reasoning_content="h"),
    delta(content="i\n\u00e9"),
    {"choices": [], "usage": USAGE},
    b"[DONE]",
)
WHOLE = HEAD + b"".join(chunk(event(each)) for each in EVENTS) + b"0\r\n\r\n"


def exchange(reads: Sequence[tuple[float, bytes]]) -> Exchange:
    seen = Exchange("host", "/v1/chat/completions", {"model": "m"}, asked_at=1.0)
    seen.reads.extend(reads)
    return seen


@given(st.lists(st.integers(1, len(WHOLE) - 1), max_size=12, unique=True))
def test_any_split_of_the_bytes_gives_the_same_answer(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(WHOLE)]
    pieces = [WHOLE[begin:end] for begin, end in pairwise(edges)]
    answer = exchange([(2.0, piece) for piece in pieces]).answer()
    assert (answer.status, answer.text, answer.text_at) == (200, "hi\n\u00e9", (2.0, 2.0))
    assert (answer.n_prompt, answer.n_cached, answer.n_tokens) == (7, 5, 2)


def test_times_are_those_of_the_reads_that_complete_a_text() -> None:
    first, second = chunk(event(delta(content="a"))), chunk(event(delta(content="b")))
    rest = chunk(event(b"[DONE]")) + b"0\r\n\r\n"
    reads = [(1.5, HEAD + first[:-9]), (2.0, first[-9:]), (2.25, second), (3.0, rest), (3.5, b"")]
    answer = exchange(reads).answer()
    assert answer.text_at == (2.0, 2.25)
    assert (answer.first_s, answer.gaps_s, answer.last_s) == (1.0, [0.25], 2.0)


def test_the_request_streams_and_asks_for_the_usage() -> None:
    head, _, body = exchange([]).sent.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert json.loads(body) == {"model": "m", "stream": True, "stream_options": {"include_usage": True}}


def test_an_answer_that_is_cut_short_is_no_answer() -> None:
    cut = WHOLE[: WHOLE.index(b"[DONE]")]
    with pytest.raises(RuntimeError, match="cut short"):
        exchange([(2.0, cut), (3.0, b"")]).answer()


def test_an_answer_without_done_is_not_complete() -> None:
    with pytest.raises(RuntimeError, match="not complete"):
        exchange([(2.0, HEAD + chunk(event(delta(content="a"))) + b"0\r\n\r\n")]).answer()


def test_a_client_that_left_keeps_what_it_had() -> None:
    left = exchange([(2.0, HEAD + chunk(event(delta(content="a"))))])
    left.is_left = True
    assert left.answer().text_at == (2.0,)


def test_an_error_in_the_stream_is_told() -> None:
    with pytest.raises(RuntimeError, match="gone"):
        exchange(
            [
                (
                    2.0,
                    HEAD
                    + chunk(event({"error": {"message": "gone"}}))
                    + chunk(event(b"[DONE]"))
                    + b"0\r\n\r\n",
                )
            ]
        ).answer()


def test_a_refusal_is_an_answer_but_not_a_served_one() -> None:
    refusal = b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 17\r\n\r\n{"error": "full"}'
    assert exchange([(2.0, refusal)]).answer().is_refused
    with pytest.raises(RuntimeError, match=r"503.*full"):
        exchange([(2.0, refusal)]).served()
