"""A lane whose conversation outgrew the context, from its summaries to its end: places, cancel, loss.

The fake engine writes a summary by saying the beginning of its prompt again.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from llm_engine.errors import BackendError
from llm_ingress.wire import End, Fail, FinishReason, Grant
from llm_worker.compaction import OPENING, PIECES_MAX, Policy
from llm_worker.progress import unpack
from llm_worker.worker import Worker, WorkerConfig
from tests.fakes import (
    BYTES_PER_TOKEN,
    FakeEngine,
    Released,
    ScriptedLane,
    ScriptedRing,
    chat_grant,
    next_claim,
)

N_CTX = 1000
SYSTEM = {"role": "system", "content": "Be brief."}
SAID = "Where was I?"


def conversation(n_tokens: int) -> list[dict[str, str]]:
    """A system turn, turns of 60 tokens, and a question."""
    roles = ("user", "assistant")
    numbers = range(n_tokens // 60 // 2 * 2)
    turns = [{"role": roles[i % 2], "content": f"t{i:03} " * (60 * BYTES_PER_TOKEN // 5)} for i in numbers]
    return [SYSTEM, *turns, {"role": "user", "content": SAID}]


def outgrown(*, n_tokens: int = N_CTX + 100, lane_id: int = 1, **fields: Any) -> Grant:
    fields = {"messages": conversation(n_tokens), "truncation": "auto", **fields}
    return chat_grant("", lane_id=lane_id, **fields)


@asynccontextmanager
async def attached(
    engine: FakeEngine, ring: ScriptedRing, policy: Policy = Policy.NONE
) -> AsyncIterator[Worker]:
    worker = Worker(engine, WorkerConfig(heartbeat_interval_s=0.02, compaction=policy), [ring])
    worker.start()
    ring.accept()
    try:
        yield worker
    finally:
        worker.close()


async def summarising(ring: ScriptedRing, engine: FakeEngine, n: int = 1) -> None:
    """Until so many summaries have been begun in all."""
    await ring.until(lambda: len(engine.requests) == n and bool(engine.running))
    assert is_summary(engine, n - 1)


def is_summary(engine: FakeEngine, i: int) -> bool:
    return "Summarise this conversation" in engine.requests[i].messages[-1]["content"]


async def answered(ring: ScriptedRing, engine: FakeEngine, lane: ScriptedLane) -> None:
    """Let the engine do all it is asked until the lane is over."""

    def is_over() -> bool:
        engine.finish()
        return lane.is_over

    await ring.until(is_over)


async def run(engine: FakeEngine, grant: Grant, policy: Policy = Policy.NONE) -> ScriptedLane:
    ring = ScriptedRing()
    async with attached(engine, ring, policy):
        lane = ring.grant(grant)
        await answered(ring, engine, lane)
        assert engine.running == []
    return lane


def usage_of(lane: ScriptedLane, *, streams: bool) -> Any:
    if not streams:
        return orjson.loads(lane.data)["usage"]
    return orjson.loads(lane.data.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]


# -- asked for, and told --


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
async def test_it_is_told_by_header_and_usage(streams: bool) -> None:
    engine = FakeEngine(n_ctx=N_CTX)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
    lane = await run(engine, outgrown(**options))
    usage = usage_of(lane, streams=streams)
    told = usage["compaction"]
    assert list(told) == ["turns_replaced", "tokens_before", "tokens_after", "summaries"]
    assert told["tokens_before"] > N_CTX
    assert told["tokens_after"] == usage["prompt_tokens"] <= N_CTX // 2
    assert told["summaries"] == len(engine.requests) - 1
    assert lane.head is not None
    assert dict(lane.head.headers)["x-compaction"] == ", ".join(f"{key}={n}" for key, n in told.items())
    kept = len(engine.requests[-1].messages) - 2
    assert told["turns_replaced"] == len(conversation(N_CTX + 100)) - 1 - kept


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
async def test_an_answer_to_a_conversation_that_fits_tells_nothing_of_it(streams: bool) -> None:
    engine = FakeEngine(n_ctx=N_CTX)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
    lane = await run(engine, outgrown(n_tokens=300, **options), Policy.SUMMARY)
    assert "compaction" not in usage_of(lane, streams=streams)
    assert lane.head is not None
    assert "x-compaction" not in dict(lane.head.headers)
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("policy", "truncation", "status"),
    [
        (Policy.NONE, None, 400),
        (Policy.NONE, "disabled", 400),
        (Policy.NONE, "auto", 200),
        (Policy.SUMMARY, None, 200),
        (Policy.SUMMARY, "disabled", 400),
        (Policy.SUMMARY, "auto", 200),
    ],
)
async def test_who_asks_decides_and_the_flag_for_those_who_do_not_say(
    policy: Policy, truncation: str | None, status: int
) -> None:
    engine = FakeEngine(n_ctx=N_CTX)
    lane = await run(engine, outgrown(truncation=truncation), policy)
    assert lane.head is not None
    assert lane.head.status == status
    if status == 400:
        assert orjson.loads(lane.data)["error"]["code"] == "context_length_exceeded"
        assert engine.requests == []


async def test_a_last_turn_that_does_not_fit_by_itself_is_a_400_and_asks_for_no_summary() -> None:
    engine = FakeEngine(n_ctx=N_CTX)
    last = {"role": "user", "content": "x" * N_CTX * BYTES_PER_TOKEN}
    lane = await run(engine, outgrown(messages=[*conversation(300), last]))
    assert lane.head is not None
    assert lane.head.status == 400
    assert engine.requests == []


# -- bounds --


async def test_a_history_of_any_length_ends_in_an_answer_after_a_bounded_number_of_summaries() -> None:
    engine = FakeEngine(n_ctx=N_CTX)
    lane = await run(engine, outgrown(n_tokens=60_000))
    assert len(engine.requests) == PIECES_MAX + 1
    assert all(is_summary(engine, i) for i in range(PIECES_MAX))
    assert usage_of(lane, streams=False)["compaction"]["summaries"] == PIECES_MAX
    assert orjson.loads(lane.data)["choices"][0]["message"]["content"] == SAID


async def test_a_second_overflow_extends_the_summary_by_one_more_that_is_counted() -> None:
    engine, ring = FakeEngine(n_ctx=N_CTX), ScriptedRing()
    async with attached(engine, ring) as worker:
        turns, counts = conversation(N_CTX + 100), []
        for lane_id in range(1, 8):
            n_before = worker.snapshot().n_summaries
            lane = ring.grant(outgrown(messages=turns, lane_id=lane_id))
            await answered(ring, engine, lane)
            counts.append(worker.snapshot().n_summaries - n_before)
            assert usage_of(lane, streams=False)["compaction"]["summaries"] == counts[-1]
            more = conversation(240)[1:]
            turns = [*turns, {"role": "assistant", "content": SAID}, *more]
    assert counts[0] == 2
    assert set(counts[1:]) == {0, 1}
    assert counts[1:].count(1) < len(counts[1:])
    summary = engine.requests[-1].messages[1]["content"]
    assert summary.startswith(OPENING)


# -- places --


async def test_a_summary_takes_the_one_place_that_the_answer_will_have() -> None:
    engine, ring = FakeEngine(n_ctx=N_CTX, max_inflight=2), ScriptedRing()
    async with attached(engine, ring) as worker:
        lane = ring.grant(outgrown())
        for n in (1, 2):
            await summarising(ring, engine, n)
            assert len(engine.running) == 1
            assert worker.snapshot().capacity.available_slots == 1
            assert worker.snapshot().n_jobs == 1
            engine.finish()
        await answered(ring, engine, lane)
        assert worker.snapshot().capacity.available_slots == 2
        assert ring.credits[-1] == 2


async def test_a_lane_whose_summary_is_being_written_is_said_to_be_worked_on() -> None:
    engine, ring = FakeEngine(n_ctx=N_CTX), ScriptedRing()
    async with attached(engine, ring):
        lane = ring.grant(outgrown(stream=True))
        await summarising(ring, engine)
        engine.step(3)
        assert lane.frames == []
        n_told = len(ring.worked_on)
        await ring.until(lambda: len(ring.worked_on) > n_told + 1)
        await answered(ring, engine, lane)


async def test_a_cancel_in_mid_summary_frees_everything_at_once() -> None:
    engine, ring = FakeEngine(n_ctx=N_CTX, max_inflight=1), ScriptedRing()
    async with attached(engine, ring) as worker:
        lane = ring.grant(outgrown(stream=True))
        await summarising(ring, engine)
        engine.step(3)
        ring.worker.on_cancel(ring, next(iter(ring.lanes)))
        assert engine.running == []
        assert worker.snapshot().n_jobs == 0
        assert worker.snapshot().capacity.available_slots == 1
        assert lane.frames == []
        other = ring.grant(chat_grant("next", lane_id=2))
        await answered(ring, engine, other)
        assert len(engine.requests) == 2


@pytest.mark.parametrize("n_done", [0, 1])
async def test_an_engine_that_fails_in_a_summary_leaves_the_lane_to_another(n_done: int) -> None:
    engine, ring = FakeEngine(n_ctx=N_CTX), ScriptedRing()
    async with attached(engine, ring) as worker:
        lane = ring.grant(outgrown(stream=True))
        for n in range(n_done):
            await summarising(ring, engine, n + 1)
            engine.finish()
        await summarising(ring, engine, n_done + 1)
        engine.running[0].fail(BackendError("llama_decode returned -3"))
        assert lane.frames == [Fail(message="the engine failed", retryable=True)]
        assert worker.snapshot().n_jobs == 0


async def test_an_engine_that_closes_between_summary_and_answer_gives_the_lane_back() -> None:
    engine, ring = FakeEngine(n_ctx=N_CTX), ScriptedRing()
    async with attached(engine, ring):
        lane = ring.grant(outgrown())
        await summarising(ring, engine)
        engine.is_closed = True
        engine.finish()
        await ring.until(lambda: lane.is_over)
        assert lane.frames == [Released()]


# -- lost and continued --


async def test_a_continuation_has_the_prompt_of_the_one_it_continues_and_writes_no_summary() -> None:
    grant = outgrown(stream=True, stream_options={"include_usage": True})
    undisturbed = await run(FakeEngine(n_ctx=N_CTX), grant)

    engine, ring = FakeEngine(n_ctx=N_CTX), ScriptedRing()
    async with attached(engine, ring):
        lost = ring.grant(grant)
        for n in (1, 2):
            await summarising(ring, engine, n)
            engine.finish()
        await ring.until(lambda: len(engine.requests) == 3)
        engine.step(2)
    heir = FakeEngine(n_ctx=N_CTX)
    continued = await run(heir, next_claim(grant, lost.progress))
    (request,) = heir.requests
    assert request.messages == engine.requests[-1].messages
    assert lost.data + continued.data == undisturbed.data
    assert continued.frames[-1] == undisturbed.frames[-1]


async def test_an_answer_complete_when_its_worker_was_lost_is_only_ended() -> None:
    grant = outgrown(stream=True)
    lane = await run(FakeEngine(n_ctx=N_CTX), grant)
    heir = FakeEngine(n_ctx=N_CTX)
    continued = await run(heir, next_claim(grant, lane.progress))
    assert heir.requests == []
    end = continued.frames[-1]
    assert isinstance(end, End)
    assert end.finish_reason is FinishReason.STOP


async def test_progress_grows_by_the_summary_and_not_by_the_conversation() -> None:
    lane = await run(FakeEngine(n_ctx=N_CTX), outgrown(n_tokens=60_000, stream=True))
    compaction = unpack(lane.progress).start.compaction
    assert compaction is not None
    assert len(lane.progress) < len(compaction.summary.encode()) + 1000
