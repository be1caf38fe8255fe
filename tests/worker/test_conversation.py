"""A turn of a conversation on the worker: what it asks for, its numbered events, and the record it leaves."""

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_engine.errors import PromptTooLong
from llm_ingress.api.errors import ApiError
from llm_ingress.dialects import INFER
from llm_ingress.turns import Does, TurnRecord, pack_asked, unpack_turn
from llm_ingress.wire import End, Fail, FinishReason, Grant, LaneRef
from llm_worker.answer import COMPACTION_HEADER
from llm_worker.compaction import OPENING
from llm_worker.conversation import Said, read_turn, record_of
from llm_worker.job import Job, JobState
from llm_worker.preparation import Unsummarised, advance, preparation
from llm_worker.summaries import Summaries
from tests.fakes import Body, FakeEngine, ScriptedLane, ScriptedRing, next_claim, prepare

ID = "550e8400-e29b-41d4-a716-446655440000"
HELLO = record_of(Does.FOLLOWS, (Said("user", "hello"), Said("assistant", "hi there")), closing=b"").content


def asked(prompt: str, *history: bytes, limit_bytes: int = 10**6, **fields: Any) -> Grant:
    """A lane whose turn asks the fake engine to say `prompt`."""
    body = {"conversation_id": ID, "prompt": prompt, "model": "echo", "max_tokens": 100, **fields}
    return Grant(
        ref=LaneRef(1, 1),
        path=INFER,
        body=pack_asked(orjson.dumps(body), history, limit_bytes=limit_bytes),
        request_id="r1",
        queued_ms=0.0,
    )


class Claim:
    """A job with its ring and engine, begun."""

    def __init__(self, grant: Grant) -> None:
        self.engine = FakeEngine()
        self.ring = ScriptedRing()
        self.lane: ScriptedLane = self.ring.open(grant.ref)
        self.job = Job(self.ring, grant.ref, lambda job: None)
        self.job.begin(self.engine, prepare(grant, self.engine, 1700000000))

    def run(self) -> ScriptedLane:
        self.engine.finish()
        assert self.job.state is JobState.CLOSED
        return self.lane


def end_of(lane: ScriptedLane) -> End:
    end = lane.frames[-1]
    assert isinstance(end, End)
    return end


def record_in(lane: ScriptedLane) -> TurnRecord:
    return unpack_turn(end_of(lane).record)


def events(data: bytes) -> list[dict[str, Any]]:
    *events, nothing = data.split(b"\n\n")
    assert nothing == b""
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events]


def test_tokens_are_numbered_and_the_closing_says_how_it_ended() -> None:
    lane = Claim(asked("abcdef")).run()
    assert events(lane.data) == [{"token": "abc", "seq": 0}, {"token": "def", "seq": 1}]
    assert events(record_in(lane).closing) == [
        {
            "seq": 2,
            "finish_reason": "stop",
            "usage": {
                "prompt_tokens": 2,
                "completion_tokens": 3,
                "total_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 1},
            },
        }
    ]
    assert end_of(lane).finish_reason is FinishReason.STOP
    assert lane.head is not None
    assert dict(lane.head.headers)["content-type"].startswith("text/event-stream")


def test_a_turn_leaves_its_question_and_its_answer() -> None:
    record = record_in(Claim(asked("Grüße,\u2028 世界! ❄️", HELLO)).run())
    assert record.does is Does.FOLLOWS
    assert orjson.loads(record.content) == [
        {"role": "user", "content": "Grüße,\u2028 世界! ❄️"},
        {"role": "assistant", "content": "Grüße,\u2028 世界! ❄️"},
    ]


def test_what_was_said_before_is_what_the_model_reads_before() -> None:
    claim = Claim(asked("and now?", HELLO, temperature=0, seed=5))
    (request,) = claim.engine.requests
    assert [(m["role"], m["content"]) for m in request.messages] == [
        ("user", "hello"),
        ("assistant", "hi there"),
        ("user", "and now?"),
    ]
    assert (request.max_tokens, request.sampling.temperature, request.sampling.seed) == (100, 0, 5)


def test_a_replaced_history_is_read_like_any_other() -> None:
    said = (Said("user", "summary"), Said("user", "hello"), Said("assistant", "hi"))
    record = record_of(Does.REPLACES, said, closing=b"")
    assert read_turn(asked("next", record.content, HELLO).body).earlier == (
        *said,
        Said("user", "hello"),
        Said("assistant", "hi there"),
    )


def test_no_reader_finds_a_line_break_in_an_event() -> None:
    lane = Claim(asked("a\u2028b\u0085c\nd")).run()
    assert len(lane.data.decode().splitlines()) == 2 * len(events(lane.data))


def test_an_answer_cut_by_its_limit_says_so() -> None:
    record = record_in(Claim(asked("abcdefghi", max_tokens=2)).run())
    assert events(record.closing)[0]["finish_reason"] == "length"
    assert orjson.loads(record.content)[1]["content"] == "abcdef"


@pytest.mark.parametrize("n_before", range(6))
def test_another_worker_numbers_on_and_leaves_the_same_record(n_before: int) -> None:
    grant = asked("Grüße, 世界! and more ❄️", HELLO, seed=1)
    undisturbed = Claim(grant).run()
    first = Claim(grant)
    first.engine.step(n_before)
    second = Claim(next_claim(grant, first.lane.progress))
    lane = second.run()
    assert first.lane.data + lane.data == undisturbed.data
    seqs = [event["seq"] for event in events(first.lane.data + lane.data)]
    assert seqs == list(range(len(seqs)))
    assert end_of(lane).record == end_of(undisturbed).record


def test_an_answer_that_was_complete_when_its_worker_was_lost_leaves_its_record_all_the_same() -> None:
    grant = asked("abcdef", seed=1)
    undisturbed = Claim(grant).run()
    lane = Claim(next_claim(grant, undisturbed.progress)).lane
    assert lane.data == b""
    assert end_of(lane).record == end_of(undisturbed).record


@given(st.text(min_size=1).filter(lambda text: text.isprintable()), st.integers(0, 30))
def test_whatever_is_said_is_kept_wherever_the_worker_is_lost(text: str, n_before: int) -> None:
    grant = asked(text, seed=1)
    first = Claim(grant)
    first.engine.step(n_before)
    lane = first.lane
    if first.job.state is not JobState.CLOSED:
        lane = Claim(next_claim(grant, first.lane.progress)).run()
        said = events(first.lane.data + lane.data)
    else:
        said = events(lane.data)
    answer = orjson.loads(record_in(lane).content)[1]["content"]
    assert "".join(event["token"] for event in said) == answer
    assert [event["seq"] for event in said] == list(range(len(said)))


def test_a_conversation_that_no_longer_fits_goes_on_with_a_summary_that_replaces_it() -> None:
    long = record_of(Does.FOLLOWS, (Said("user", "x" * 1500), Said("assistant", "y" * 1500)), closing=b"")
    grant, engine, ring = asked("short", long.content), FakeEngine(n_ctx=1000), ScriptedRing()
    lane, job = ring.open(grant.ref), Job(ring, grant.ref, lambda job: None)
    ready = advance(preparation(grant, engine, 0, Summaries().recall))
    assert isinstance(ready, Unsummarised)
    while isinstance(ready, Unsummarised):
        ready = advance(ready.steps, "what was said")
    job.begin(engine, ready)
    engine.finish()
    record = record_in(lane)
    assert record.does is Does.REPLACES
    assert orjson.loads(record.content) == [
        {"role": "user", "content": f"{OPENING}what was said"},
        {"role": "user", "content": "short"},
        {"role": "assistant", "content": "".join(event["token"] for event in events(lane.data))},
    ]
    assert events(record.closing)[0]["usage"]["compaction"]["turns_replaced"] == 2
    assert lane.head is not None
    assert COMPACTION_HEADER in dict(lane.head.headers)


@pytest.mark.parametrize("limit_bytes", [900, 600])
def test_a_conversation_longer_than_is_kept_is_shortened_though_it_fits_the_context(limit_bytes: int) -> None:
    turns = (Said("user", "x" * 400), Said("assistant", "y" * 400))
    records = [record_of(Does.FOLLOWS, turns, closing=b"").content]
    grant, engine, ring = asked("short", *records, limit_bytes=limit_bytes), FakeEngine(), ScriptedRing()
    job, lane = Job(ring, grant.ref, lambda job: None), ring.open(grant.ref)
    ready = advance(preparation(grant, engine, 0, Summaries().recall))
    while isinstance(ready, Unsummarised):
        ready = advance(ready.steps, "what was said")
    job.begin(engine, ready)
    engine.finish()
    record = record_in(lane)
    assert record.does is Does.REPLACES
    assert len(record.content) < limit_bytes // 2
    assert [said["content"] for said in orjson.loads(record.content)] == [
        f"{OPENING}what was said",
        "short",
        "short",
    ]


@pytest.mark.parametrize("history", [(), (HELLO,)])
def test_a_prompt_that_fits_no_conversation_is_too_long(history: tuple[bytes, ...]) -> None:
    with pytest.raises(ApiError) as refused:
        prepare(asked("x" * 3000, *history), FakeEngine(n_ctx=1000), 0)
    error = refused.value
    assert (error.status, error.param, error.extra["reason"]) == (413, "prompt", "prompt_too_long")
    assert error.extra["n_prompt_tokens"] >= error.extra["n_ctx"] == 1000


def test_a_chat_that_no_longer_fits_is_what_it_was() -> None:
    body = {"model": "echo", "messages": [{"role": "user", "content": "x" * 3000}]}
    grant = replace(asked("x"), path="/v1/chat/completions", body=orjson.dumps(body))
    with pytest.raises(PromptTooLong):
        prepare(grant, FakeEngine(n_ctx=1000), 0)


@pytest.mark.parametrize("record", [b"", b"{}", b"[1]", b'[{"role":"user"}]', b"\xff"])
def test_a_history_that_cannot_be_read_is_gone(record: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        prepare(asked("hi", record), FakeEngine(), 0)
    assert (refused.value.status, refused.value.code) == (409, "session_gone")


def test_an_engine_that_fails_may_be_replaced() -> None:
    claim = Claim(asked("abcdef"))
    claim.engine.step()
    claim.engine.running[0].fail(PromptTooLong(1, 1))
    assert claim.lane.frames[-1] == Fail(message="the engine failed", retryable=True)
    assert all(body.progress for body in claim.lane.frames if isinstance(body, Body))
