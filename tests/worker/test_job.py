"""One claim, from its preparation to its last frame: streamed, whole, refused, failed, continued."""

import logging
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_engine.errors import BackendError, EngineBusy, PromptTooLong
from llm_engine.generation import Delta, Finished, StopReason
from llm_ingress.api.errors import ApiError
from llm_ingress.wire import End, Fail, FinishReason, Grant, Head
from llm_worker.errors import IllegalJobMove, ProgressError
from llm_worker.job import Job, JobState
from llm_worker.progress import unpack
from tests.fakes import (
    Body,
    FakeEngine,
    Released,
    ScriptedLane,
    ScriptedRing,
    chat_grant,
    next_claim,
    prepare,
    tokenise,
)

TEXT = "Grüße, 世界! ❄️ and more"


class Claim:
    """A job with its ring and engine, begun unless told otherwise."""

    def __init__(self, grant: Grant, *, engine: FakeEngine | None = None, begin: bool = True) -> None:
        self.engine = engine or FakeEngine()
        self.ring = ScriptedRing()
        self.lane: ScriptedLane = self.ring.open(grant.ref)
        self.n_closed = 0
        self.job = Job(self.ring, grant.ref, self._closed)
        if begin:
            self.job.begin(self.engine, prepare(grant, self.engine, 1700000000))

    def _closed(self, job: Job) -> None:
        assert job is self.job
        self.n_closed += 1

    def run(self) -> ScriptedLane:
        self.engine.finish()
        assert self.job.state is JobState.CLOSED
        assert self.n_closed == 1
        return self.lane

    @property
    def end(self) -> End:
        last = self.lane.frames[-1]
        assert isinstance(last, End)
        return last


def events(data: bytes) -> list[Any]:
    lines = data.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [orjson.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def content(data: bytes) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in events(data))


def test_a_stream_is_head_role_content_finish_done_and_end() -> None:
    claim = Claim(chat_grant("abcdef", stream=True))
    lane = claim.run()
    assert lane.head == Head(
        status=200,
        headers=(("content-type", "text/event-stream; charset=utf-8"),),
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in events(lane.data)]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "abc"}, {"content": "def"}, {}]
    assert claim.end == End(
        finish_reason=FinishReason.STOP,
        n_prompt=2,
        n_cached=1,
        n_completion=3,
        prefill_ms=1.0,
        decode_ms=2.0,
    )


def test_an_answer_that_is_not_streamed_is_one_json_body_and_the_ingress_says_how_long() -> None:
    lane = Claim(chat_grant(TEXT)).run()
    answer = orjson.loads(lane.data)
    assert answer["choices"][0]["message"]["content"] == TEXT
    # A second content-length breaks the answer on HTTP/2.
    assert lane.head == Head(status=200, headers=(("content-type", "application/json"),))


def test_progress_comes_with_every_step_and_the_json_with_none_of_it() -> None:
    lane = Claim(chat_grant("abcdef")).run()
    bodies = [frame for frame in lane.frames if isinstance(frame, Body)]
    assert all(body.progress for body in bodies)
    assert [bool(body.data) for body in bodies] == [False] * (len(bodies) - 1) + [True]


def test_nothing_is_said_before_the_engine_admits() -> None:
    grant = chat_grant("hello", stream=True)
    engine = FakeEngine(max_inflight=1)
    Claim(chat_grant("other"), engine=engine)
    claim = Claim(grant, engine=engine, begin=False)
    with pytest.raises(EngineBusy):
        claim.job.begin(engine, prepare(grant, engine, 0))
    assert claim.lane.frames == []
    claim.job.release()
    assert claim.lane.frames == [Released()]
    assert claim.n_closed == 1


def test_a_step_without_text_sends_its_tokens_and_no_chunk() -> None:
    lane = Claim(chat_grant("abcdef", stream=True, stop=["abc!"])).run()
    silent = [frame for frame in lane.frames if isinstance(frame, Body) and not frame.data]
    assert silent
    assert all(frame.progress for frame in silent)
    assert "" not in [chunk["choices"][0]["delta"].get("content") for chunk in events(lane.data)[1:]]


@given(st.text(max_size=60), st.lists(st.text(min_size=1, max_size=3), max_size=3))
@settings(deadline=None)
def test_a_stream_says_what_the_whole_answer_says(text: str, stop: list[str]) -> None:
    usage = {"include_usage": True}
    chunks = events(Claim(chat_grant(text, stop=stop, stream=True, stream_options=usage)).run().data)
    whole = orjson.loads(Claim(chat_grant(text, stop=stop)).run().data)
    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    assert streamed == whole["choices"][0]["message"]["content"]
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["usage"] == whole["usage"]


@given(st.data(), st.text(max_size=40), st.booleans())
@settings(deadline=None)
def test_any_split_of_the_tokens_into_events_gives_the_same_text(
    data: st.DataObject, text: str, streams: bool
) -> None:
    tokens = tuple(range(len(text)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    claim = Claim(chat_grant("x", stream=streams))
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        # Text may come without tokens and tokens without text; every token comes once.
        if data.draw(st.booleans()):
            claim.job.on_event(Delta(text[start:stop], tokens[start:stop]))
        else:
            claim.job.on_event(Delta("", tokens[start:stop]))
            claim.job.on_event(Delta(text[start:stop], ()))
    claim.job.on_event(
        Finished(
            reason=StopReason.STOP,
            n_prompt=1,
            n_cached=0,
            n_completion=len(tokens),
            prefill_ms=0,
            decode_ms=0,
        )
    )
    if streams:
        assert content(claim.lane.data) == text
    else:
        assert orjson.loads(claim.lane.data)["choices"][0]["message"]["content"] == text
    assert unpack(claim.lane.progress).choice(0).tokens == list(tokens)


# -- continuation --

N_TOKENS = len(tokenise(TEXT)) + 1


@pytest.mark.parametrize("n_steps", range(N_TOKENS))
@pytest.mark.parametrize("options", [{}, {"stop": ["ore"]}, {"max_tokens": N_TOKENS - 2}], ids=str)
def test_a_stream_continued_after_any_token_is_the_undisturbed_stream(
    n_steps: int, options: dict[str, Any]
) -> None:
    grant = chat_grant(TEXT, stream=True, seed=5, stream_options={"include_usage": True}, **options)
    undisturbed = Claim(grant)
    undisturbed.run()
    lost = Claim(grant)
    lost.engine.step(n_steps)
    heir = Claim(next_claim(grant, lost.lane.progress))
    if heir.job.state is JobState.RUNNING:
        heir.run()
    assert lost.lane.data + heir.lane.data == undisturbed.lane.data
    assert heir.end.n_completion == undisturbed.end.n_completion
    assert heir.end.n_prompt == undisturbed.end.n_prompt


@pytest.mark.parametrize("n_steps", range(N_TOKENS))
def test_a_whole_answer_continued_after_any_token_is_the_undisturbed_answer(n_steps: int) -> None:
    grant = chat_grant(TEXT, seed=5)
    undisturbed = Claim(grant).run()
    lost = Claim(grant)
    lost.engine.step(n_steps)
    heir = Claim(next_claim(grant, lost.lane.progress))
    if heir.job.state is JobState.RUNNING:
        heir.run()
    assert lost.lane.data + heir.lane.data == undisturbed.data


def test_a_continuation_continued_is_still_the_undisturbed_stream() -> None:
    grant = chat_grant(TEXT, stream=True)
    undisturbed = Claim(grant)
    undisturbed.run()
    data, progress = b"", b""
    for _ in range(3):
        claim = Claim(next_claim(grant, progress) if progress else grant)
        claim.engine.step(2)
        data, progress = data + claim.lane.data, progress + claim.lane.progress
    data += Claim(next_claim(grant, progress)).run().data
    assert data == undisturbed.lane.data


def test_an_answer_lost_between_its_last_byte_and_its_end_is_only_ended() -> None:
    grant = chat_grant("abc", stream=True)
    lost = Claim(grant)
    lane = lost.run()
    heir = Claim(next_claim(grant, lane.progress))
    assert heir.lane.data == b""
    assert heir.engine.requests == []
    assert heir.end.finish_reason == lost.end.finish_reason
    assert heir.end.n_completion == lost.end.n_completion
    assert heir.lane.head is not None
    assert heir.n_closed == 1


def test_text_without_tokens_is_never_out_before_its_finish() -> None:
    claim = Claim(chat_grant("x", stream=True))
    claim.job.on_event(Delta("", (1,)))
    claim.job.on_event(Delta("tail", ()))
    assert b"tail" not in claim.lane.data
    claim.job.on_event(
        Finished(reason=StopReason.STOP, n_prompt=1, n_cached=0, n_completion=1, prefill_ms=0, decode_ms=0)
    )
    assert content(claim.lane.data) == "tail"
    assert unpack(claim.lane.progress).choice(0).finish is not None


def test_cached_tokens_of_a_continuation_are_at_most_its_prompt() -> None:
    claim = Claim(chat_grant("abc"))
    claim.job.on_event(
        Finished(reason=StopReason.STOP, n_prompt=1, n_cached=9, n_completion=1, prefill_ms=0, decode_ms=0)
    )
    assert claim.end.n_cached == claim.end.n_prompt == 1


# -- refusals and failures --


@pytest.mark.parametrize("streams", [True, False])
def test_a_refusal_is_a_status_with_its_envelope(streams: bool) -> None:
    claim = Claim(chat_grant("x", stream=streams), begin=False)
    claim.job.reject(PromptTooLong(300, 256))
    head, body, end = claim.lane.frames
    assert isinstance(head, Head)
    assert isinstance(body, Body)
    assert head.status == 400
    assert dict(head.headers) == {"content-type": "application/json"}
    assert orjson.loads(body.data)["error"]["code"] == "context_length_exceeded"
    assert end == End(finish_reason=FinishReason.REFUSED)
    assert claim.n_closed == 1


def test_headers_of_an_api_error_reach_the_client() -> None:
    claim = Claim(chat_grant("x"), begin=False)
    claim.job.reject(ApiError(503, "later", headers=(("retry-after", "3"),)))
    assert claim.lane.head is not None
    assert ("retry-after", "3") in claim.lane.head.headers


def test_progress_that_cannot_be_continued_here_may_be_elsewhere() -> None:
    claim = Claim(chat_grant("x"), begin=False)
    claim.job.reject(ProgressError("of another model"))
    assert claim.lane.frames == [Fail(message="of another model", retryable=True)]


def test_a_failed_step_may_succeed_elsewhere() -> None:
    claim = Claim(chat_grant("abc", stream=True))
    claim.engine.running[0].fail(BackendError("llama_decode returned -3"))
    last = claim.lane.frames[-1]
    assert isinstance(last, Fail)
    assert last.retryable
    assert claim.n_closed == 1


def test_an_unforeseen_exception_in_preparation_fails_that_job_and_says_nothing_of_its_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    claim = Claim(chat_grant("x"), begin=False)
    claim.job.reject(KeyError("secret"))
    last = claim.lane.frames[-1]
    assert isinstance(last, Fail)
    assert not last.retryable
    assert "secret" not in last.message
    assert "lane 1" in caplog.text


def test_an_exception_in_the_ring_ends_that_job_and_cancels_its_generation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine()
    claim, other = Claim(chat_grant("abc"), engine=engine), Claim(chat_grant("abc"), engine=engine)
    claim.ring.broken = RuntimeError
    engine.step()
    assert isinstance(claim.lane.frames[-1], Fail)
    assert claim.n_closed == 1
    assert len(engine.running) == 1
    assert any(record.levelno == logging.ERROR for record in caplog.records)
    other.run()


# -- cancel and pause --


def test_a_cancelled_job_says_nothing_more_and_its_generation_ends() -> None:
    claim = Claim(chat_grant("abcdef", stream=True))
    claim.engine.step()
    n_frames = len(claim.lane.frames)
    claim.job.cancel()
    claim.job.cancel()
    claim.job.on_event(Delta("late", (1,)))
    assert len(claim.lane.frames) == n_frames
    assert claim.engine.running == []
    assert claim.n_closed == 1


def test_a_paused_job_gets_no_tokens_until_it_is_resumed() -> None:
    claim = Claim(chat_grant("abcdef", stream=True))
    claim.job.pause()
    before = claim.lane.data
    claim.engine.step(5)
    assert claim.lane.data == before
    claim.job.resume()
    assert content(claim.run().data) == "abcdef"


def test_a_pause_during_preparation_holds_the_generation_from_its_start() -> None:
    grant = chat_grant("abcdef", stream=True)
    claim = Claim(grant, begin=False)
    claim.job.pause()
    claim.job.begin(claim.engine, prepare(grant, claim.engine, 0))
    assert claim.engine.running[0].is_paused


@pytest.mark.parametrize("word", ["release", "crash", "cancel"])
def test_a_closed_job_says_nothing_more(word: str) -> None:
    claim = Claim(chat_grant("abc"), begin=False)
    claim.job.release()
    if word == "release":
        with pytest.raises(IllegalJobMove):
            claim.job.release()
    else:
        getattr(claim.job, word)()
    assert claim.lane.frames == [Released()]
    assert claim.n_closed == 1


def test_the_place_is_given_back_even_if_the_last_word_cannot_be_said() -> None:
    claim = Claim(chat_grant("x"), begin=False)
    claim.ring.broken = RuntimeError
    with pytest.raises(RuntimeError):
        claim.job.reject(PromptTooLong(2, 1))
    assert claim.n_closed == 1
