"""The worker: what it offers, what it takes, and that one request's trouble is no other's."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest

from llm_engine.errors import BackendError
from llm_ingress.gateway import Gateway, GatewayConfig, Lane, LaneRequest, LaneState
from llm_ingress.wire import Fail, FinishReason, LaneRef, ModelCard
from llm_worker.errors import WorkerConfigError
from llm_worker.local import LocalRing
from llm_worker.worker import STANDSTILL_S, Worker, WorkerConfig
from tests.fakes import FakeEngine, Released, ScriptedLane, ScriptedRing, chat_grant, prepare
from tests.worker.ring_contract import until

WAIT_S = 10


@asynccontextmanager
async def attached(
    engine: FakeEngine, *rings: ScriptedRing, config: WorkerConfig | None = None
) -> AsyncIterator[Worker]:
    """A started worker whose rings have accepted it."""
    worker = Worker(engine, config or WorkerConfig(), rings)
    worker.start()
    for ring in rings:
        ring.accept()
    try:
        yield worker
    finally:
        worker.close()


class Gate:
    """What every preparation stops at until it is opened."""

    def __init__(self) -> None:
        self._arrived, self._opened = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self._arrived.set()
        assert self._opened.wait(WAIT_S), "the test never opened the gate"

    def await_arrival(self) -> None:
        assert self._arrived.wait(WAIT_S), "nothing was prepared"

    def open(self) -> None:
        self._opened.set()


@contextmanager
def held_preparation(engine: FakeEngine) -> Iterator[Gate]:
    """Nothing gets prepared before the end of this block."""
    gate = Gate()
    engine.before_prepare = gate.pass_through
    try:
        yield gate
    finally:
        gate.open()


def explode() -> None:
    raise ZeroDivisionError


async def running(ring: ScriptedRing, engine: FakeEngine, n: int) -> None:
    await ring.until(lambda: len(engine.running) == n)


def only(lane: ScriptedLane) -> object:
    (frame,) = lane.frames
    return frame


# -- the engine's end --


async def test_an_engine_that_has_failed_is_told_once_and_offered_no_more() -> None:
    ring, engine, faults = ScriptedRing(), FakeEngine(), asyncio.Queue[str]()
    config = WorkerConfig(heartbeat_interval_s=0.01)
    worker = Worker(engine, config, [ring], on_fault=lambda: faults.put_nowait("fault"))
    worker.start()
    ring.accept()
    assert not worker.snapshot().has_failed
    engine.fault, engine.is_closed = ZeroDivisionError(), True
    async with asyncio.timeout(WAIT_S):
        await faults.get()
    assert worker.snapshot().has_failed
    assert ring.credits[-1] == 0
    n_beats = len(ring.heartbeats)
    await ring.until(lambda: len(ring.heartbeats) > n_beats + 2)
    assert faults.empty()
    worker.close()


# -- credit --


async def test_an_attached_ring_is_offered_every_free_place() -> None:
    ring = ScriptedRing()
    async with attached(FakeEngine(max_inflight=3), ring):
        assert ring.credits == [3]
        assert ring.hello is not None
        assert ring.hello.max_inflight == 3


async def test_free_places_are_shared_out_among_rings_and_a_grant_takes_nothing_from_the_others() -> None:
    first, second = ScriptedRing(), ScriptedRing()
    async with attached(FakeEngine(max_inflight=4), first, second):
        assert (first.credits, second.credits) == ([4, 2], [2])
        first.grant(chat_grant("a", lane_id=1))
        assert (first.credits, second.credits) == ([4, 2], [2]), "the grant itself used up what was offered"


async def test_a_ring_that_has_used_its_places_is_offered_those_another_leaves() -> None:
    first, second = ScriptedRing(), ScriptedRing()
    async with attached(FakeEngine(max_inflight=2), first, second):
        first.grant(chat_grant("a", lane_id=1))
        assert first.credits == [2, 1]
        await first.until(lambda: first.credits == [2, 1, 1])


async def test_the_last_place_is_offered_to_all_and_withdrawn_from_the_others_once_it_is_taken() -> None:
    first, second = ScriptedRing(), ScriptedRing()
    async with attached(FakeEngine(max_inflight=1), first, second):
        first.grant(chat_grant("a", lane_id=1))
        assert (first.credits, second.credits) == ([1], [1, 0])


async def test_a_place_is_offered_to_one_only_of_two_rings_that_have_requests_waiting() -> None:
    first, second = ScriptedRing(), ScriptedRing()
    engine = FakeEngine(max_inflight=1)
    async with attached(engine, first, second):
        waited = [replace(chat_grant("a", lane_id=n), queued_ms=5.0) for n in (1, 2)]
        first.grant(waited[0])
        second.grant(waited[1])
        await running(first, engine, 1)
        first.credits.clear()
        second.credits.clear()
        engine.finish()
        assert (first.credits, second.credits) == ([1], []), "the turn of the first was longer ago"
        await second.until(lambda: second.credits == [1])  # the first has left it unused


async def test_a_place_given_back_is_offered_to_all_at_once() -> None:
    first, second = ScriptedRing(), ScriptedRing()
    engine = FakeEngine(max_inflight=1)
    async with attached(engine, first, second):
        first.grant(chat_grant("a"))
        await running(first, engine, 1)
        engine.finish()
        assert first.credits == [1, 1]
        assert second.credits == [1, 0, 1]


async def test_a_grant_that_crosses_a_withdrawal_is_released() -> None:
    first, second = ScriptedRing(), ScriptedRing()
    async with attached(FakeEngine(max_inflight=1), first, second):
        first.grant(chat_grant("a", lane_id=1))
        crossing = second.grant(chat_grant("b", lane_id=2))
        assert only(crossing) == Released()


async def test_a_job_in_preparation_takes_a_place() -> None:
    engine, ring = FakeEngine(max_inflight=2), ScriptedRing()
    async with attached(engine, ring) as worker:
        with held_preparation(engine):
            ring.grant(chat_grant("a", lane_id=1))
            assert worker.n_free == 1
            ring.grant(chat_grant("b", lane_id=2))
            assert worker.n_free == 0
            assert only(ring.grant(chat_grant("c", lane_id=3))) == Released()


async def test_no_more_is_offered_than_the_engine_admits_and_preparations_count_to_it() -> None:
    engine, ring = FakeEngine(max_inflight=4), ScriptedRing()
    engine.n_withheld = 2
    async with attached(engine, ring) as worker:
        assert ring.credits == [2]
        with held_preparation(engine):
            ring.grant(chat_grant("abcdef", lane_id=1))
            assert worker.n_free == 1
        await running(ring, engine, 1)
        assert worker.n_free == 1
        engine.withhold(3)
        assert worker.n_free == 0
        assert ring.credits[-1] == 0
        assert only(ring.grant(chat_grant("b", lane_id=2))) == Released()


async def test_a_cancelled_lanes_place_is_free_before_the_engine_has_let_it_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, ring = FakeEngine(max_inflight=1), ScriptedRing()
    engine.n_waiting_max = 1
    async with attached(engine, ring):
        ring.grant(chat_grant("abcdef"))
        await running(ring, engine, 1)
        monkeypatch.setattr(engine, "end", lambda _generation: None)  # until its next step
        ring.worker.on_cancel(ring, LaneRef(1, 1))
        assert ring.credits[-1] == 1
        ring.grant(chat_grant("b", lane_id=2))
        await running(ring, engine, 2)


async def test_where_step_times_allow_fewer_a_cancelled_lane_leaves_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, ring = FakeEngine(max_inflight=4), ScriptedRing()
    async with attached(engine, ring) as worker:
        for lane_id in (1, 2, 3):
            ring.grant(chat_grant("abcdef", lane_id=lane_id))
        await running(ring, engine, 3)
        engine.withhold(2)
        monkeypatch.setattr(engine, "end", lambda _generation: None)  # until its next step
        ring.worker.on_cancel(ring, LaneRef(1, 1))
        assert worker.n_free == 0
        ring.worker.on_cancel(ring, LaneRef(2, 1))
        assert worker.n_free == 1


async def test_an_engine_that_refuses_is_offered_nothing_until_the_next_beat() -> None:
    engine, ring = FakeEngine(max_inflight=1), ScriptedRing()
    async with attached(engine, ring, config=WorkerConfig(heartbeat_interval_s=0.05)):
        # Somebody else in this process fills the engine, and the worker cannot know.
        others = chat_grant("a library's own")
        engine.submit(prepare(others, engine, 0).prepared, lambda _event: None)
        lane = ring.grant(chat_grant("a"))
        await ring.until(lambda: lane.is_over)
        assert only(lane) == Released()
        assert ring.credits == [1]
        await ring.until(lambda: ring.credits == [1, 1])


async def test_a_ring_that_drains_is_offered_nothing_and_keeps_what_it_gave() -> None:
    leaving, staying = ScriptedRing(), ScriptedRing()
    engine = FakeEngine(max_inflight=4)
    async with attached(engine, leaving, staying):
        lane = leaving.grant(chat_grant("a"))
        leaving.worker.on_drain(leaving)
        assert leaving.credits[-1] == 0
        assert staying.credits[-1] == 3
        await running(leaving, engine, 1)
        engine.finish()
        assert lane.is_over
        assert leaving.credits[-1] == 0


# -- one lane's trouble --


async def test_a_lane_is_answered_from_grant_to_end() -> None:
    engine, ring = FakeEngine(), ScriptedRing()
    async with attached(engine, ring):
        lane = ring.grant(chat_grant("hello"))
        await running(ring, engine, 1)
        engine.finish()
        assert orjson.loads(lane.data)["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"messages": [{"role": "assistant", "content": "me first"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
    ],
    ids=["malformed", "template", "too long"],
)
async def test_what_can_never_be_honoured_is_a_400_and_its_place_is_free_again(
    fields: dict[str, Any], param: str
) -> None:
    engine, ring = FakeEngine(max_inflight=1), ScriptedRing()
    async with attached(engine, ring) as worker:
        lane = ring.grant(chat_grant("x", **{"stream": True, **fields}))
        await ring.until(lambda: lane.is_over)
        assert lane.head is not None
        assert lane.head.status == 400
        assert orjson.loads(lane.data)["error"]["param"] == param
        assert worker.n_free == 1


async def test_an_exception_in_one_preparation_fails_that_lane_alone() -> None:
    engine, ring = FakeEngine(), ScriptedRing()
    async with attached(engine, ring):
        engine.before_prepare = explode
        broken = ring.grant(chat_grant("a", lane_id=1))
        await ring.until(lambda: broken.is_over)
        engine.before_prepare = lambda: None
        fine = ring.grant(chat_grant("b", lane_id=2))
        await running(ring, engine, 1)
        engine.finish()
        assert isinstance(only(broken), Fail)
        assert fine.is_over
        assert fine.head is not None


async def test_an_exception_when_a_job_begins_fails_that_lane_alone() -> None:
    engine, ring = FakeEngine(max_inflight=1), ScriptedRing()
    async with attached(engine, ring) as worker:
        ring.broken = RuntimeError
        lane = ring.grant(chat_grant("a", stream=True))
        await ring.until(lambda: lane.is_over)
        assert isinstance(lane.frames[-1], Fail)
        assert engine.running == []
        assert worker.n_free == 1


async def test_a_failed_generation_gives_its_place_back() -> None:
    engine, ring = FakeEngine(max_inflight=1), ScriptedRing()
    async with attached(engine, ring) as worker:
        lane = ring.grant(chat_grant("a"))
        await running(ring, engine, 1)
        engine.running[0].fail(BackendError("no"))
        assert isinstance(lane.frames[-1], Fail)
        assert worker.n_free == 1


async def test_preparation_leaves_the_event_loop_free() -> None:
    engine, ring = FakeEngine(), ScriptedRing()
    loop_thread = threading.get_ident()
    seen: list[int] = []
    engine.before_prepare = lambda: seen.append(threading.get_ident())
    async with attached(engine, ring):
        for lane_id in (1, 2):
            ring.grant(chat_grant("a", lane_id=lane_id))
        await running(ring, engine, 2)
    assert len(set(seen)) == 1
    assert loop_thread not in seen


async def test_a_preparation_that_takes_too_long_fails_alone_and_holds_nobody_up() -> None:
    engine, ring = FakeEngine(max_inflight=2), ScriptedRing()
    config = WorkerConfig(heartbeat_interval_s=0.01, preparation_timeout_s=0.05)
    async with attached(engine, ring, config=config) as worker:
        with held_preparation(engine):
            stuck = ring.grant(chat_grant("a", lane_id=1))
            await ring.until(lambda: stuck.is_over)
            assert stuck.head is not None
            assert stuck.head.status == 504
            assert worker.n_free == 1, "its thread still runs, so its place stays taken"
            engine.before_prepare = lambda: None
            ring.grant(chat_grant("b", lane_id=2))
            await running(ring, engine, 1)
        await ring.until(lambda: worker.n_free == 1 and ring.credits[-1] == 1)
        engine.finish()
        await ring.until(lambda: ring.credits[-1] == 2)


# -- lanes of which there is nothing to send yet --


async def test_a_lane_is_said_to_be_worked_on_until_its_first_token() -> None:
    engine, ring = FakeEngine(), ScriptedRing()
    async with attached(engine, ring, config=WorkerConfig(heartbeat_interval_s=0.01)):
        with held_preparation(engine) as gate:
            ring.grant(chat_grant("abcdef"))
            gate.await_arrival()
            await ring.until(lambda: len(ring.worked_on) >= 2)
        await running(ring, engine, 1)
        n_said = len(ring.worked_on)
        await ring.until(lambda: len(ring.worked_on) >= n_said + 2)
        engine.step()
        n_said, n_beats = len(ring.worked_on), len(ring.heartbeats)
        await ring.until(lambda: len(ring.heartbeats) >= n_beats + 3)
        assert len(ring.worked_on) == n_said
        assert set(ring.worked_on) == {LaneRef(1, 1)}


async def test_an_engine_that_stands_still_gets_nothing_and_its_lanes_are_not_said_to_move(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, ring = FakeEngine(), ScriptedRing()
    async with attached(engine, ring, config=WorkerConfig(heartbeat_interval_s=0.01)) as worker:
        ring.grant(chat_grant("abc"))
        await running(ring, engine, 1)
        engine.step_age_s = STANDSTILL_S + 0.1
        await ring.until(lambda: ring.credits[-1] == 0)
        n_said, n_beats = len(ring.worked_on), len(ring.heartbeats)
        await ring.until(lambda: len(ring.heartbeats) >= n_beats + 3)
        assert len(ring.worked_on) == n_said
        ring.worker.on_cancel(ring, LaneRef(1, 1))
        assert worker.n_free == 0, "what is cancelled does not leave it"
        engine.step_age_s = 0.0
        await ring.until(lambda: ring.credits[-1] == engine.info.max_inflight)
    assert [record.message for record in caplog.records if "engine" in record.message] == [
        f"the engine stands still: no step has ended for {STANDSTILL_S:g} s"
    ]


# -- cancel --


async def test_a_cancel_during_preparation_drops_the_job_for_good() -> None:
    engine, ring = FakeEngine(max_inflight=2), ScriptedRing()
    async with attached(engine, ring) as worker:
        with held_preparation(engine) as gate:
            first = ring.grant(chat_grant("a", lane_id=1))
            gate.await_arrival()
            second = ring.grant(chat_grant("b", lane_id=2))
            ring.worker.on_cancel(ring, LaneRef(1, 1))
            ring.worker.on_cancel(ring, LaneRef(2, 1))
            assert worker.n_free == 2
            third = ring.grant(chat_grant("c", lane_id=3))
        await running(ring, engine, 1)
        assert engine.n_prepared == 2, "the second was never begun"
        assert (first.frames, second.frames) == ([], [])
        engine.finish()
        assert third.is_over


async def test_a_cancel_of_an_older_claim_does_not_touch_the_newer() -> None:
    engine, ring = FakeEngine(), ScriptedRing()
    async with attached(engine, ring):
        ring.grant(chat_grant("abcdef"))
        await running(ring, engine, 1)
        ring.worker.on_cancel(ring, LaneRef(1, 0))
        ring.worker.on_pause(ring, LaneRef(1, 0))
        assert len(engine.running) == 1
        assert not engine.running[0].is_paused


async def test_pause_and_resume_reach_the_generation() -> None:
    engine, ring = FakeEngine(), ScriptedRing()
    async with attached(engine, ring):
        ring.grant(chat_grant("abcdef"))
        await running(ring, engine, 1)
        ring.worker.on_pause(ring, LaneRef(1, 1))
        assert engine.running[0].is_paused
        ring.worker.on_resume(ring, LaneRef(1, 1))
        assert not engine.running[0].is_paused


async def test_a_lost_ring_takes_its_lanes_with_it_and_no_others() -> None:
    lost, kept = ScriptedRing(), ScriptedRing()
    engine = FakeEngine(max_inflight=2)
    async with attached(engine, lost, kept) as worker:
        gone = lost.grant(chat_grant("a", lane_id=1))
        lane = kept.grant(chat_grant("b", lane_id=1))
        await running(kept, engine, 2)
        lost.worker.on_detached(lost)
        assert len(engine.running) == 1
        engine.finish()
        assert lane.is_over
        assert not gone.is_over
        assert worker.n_free == 2
        lost.accept()
        assert (lost.credits[-1], kept.credits[-1]) == (1, 1)


# -- heartbeat, drain, close --


async def test_changes_of_one_turn_are_one_heartbeat_that_tells_the_last() -> None:
    engine, ring = FakeEngine(max_inflight=4), ScriptedRing()
    async with attached(engine, ring):
        await ring.until(lambda: len(ring.heartbeats) == 1)
        with held_preparation(engine):
            for lane_id in (1, 2, 3):
                ring.grant(chat_grant("a", lane_id=lane_id))
            await ring.until(lambda: len(ring.heartbeats) == 2)
            assert ring.heartbeats[-1].inflight == 3
            assert ring.heartbeats[-1].available_slots == 1


async def test_the_heart_beats_when_nothing_happens() -> None:
    ring = ScriptedRing()
    async with attached(FakeEngine(), ring, config=WorkerConfig(heartbeat_interval_s=0.01)):
        await ring.until(lambda: len(ring.heartbeats) >= 3)


async def test_a_draining_worker_takes_nothing_more_and_returns_when_its_lanes_have_ended() -> None:
    engine, ring = FakeEngine(), ScriptedRing()
    async with attached(engine, ring) as worker:
        lane = ring.grant(chat_grant("abcdef"))
        drained = asyncio.ensure_future(worker.drain())
        await ring.until(lambda: ring.is_draining)
        assert ring.credits[-1] == 0
        assert only(ring.grant(chat_grant("b", lane_id=2))) == Released()
        await running(ring, engine, 1)
        assert not drained.done()
        engine.finish()
        await drained
        assert lane.is_over
        assert ring.credits[-1] == 0


async def test_draining_an_idle_worker_returns_at_once() -> None:
    async with attached(FakeEngine(), ScriptedRing()) as worker:
        await asyncio.wait_for(worker.drain(), WAIT_S)


async def test_a_ring_that_comes_back_during_a_drain_is_told_of_it_and_offered_nothing() -> None:
    engine, ring = FakeEngine(), ScriptedRing()
    async with attached(engine, ring) as worker:
        await worker.drain()
        worker.on_detached(ring)
        ring.is_draining = False
        ring.credits.clear()
        ring.accept()
        assert ring.is_draining
        assert ring.credits == []


# -- rings that come and go --


async def test_a_ring_can_be_added_later_and_is_offered_what_is_free() -> None:
    first, second = ScriptedRing(), ScriptedRing()
    async with attached(FakeEngine(max_inflight=3), first) as worker:
        first.grant(chat_grant("abc"))
        worker.add_ring(second)
        assert second.hello == first.hello
        second.accept()
        assert (first.credits[-1], second.credits) == (1, [1])


async def test_a_removed_ring_gets_what_it_is_owed_nothing_more_and_is_left_then() -> None:
    engine, ring, other = FakeEngine(max_inflight=4), ScriptedRing(), ScriptedRing()
    async with attached(engine, ring, other) as worker:
        lane = ring.grant(chat_grant("abc"))
        await running(ring, engine, 1)
        worker.remove_ring(ring)
        assert ring.is_draining
        assert ring.credits[-1] == 0
        assert len(worker.snapshot().rings) == 2
        engine.finish()
        assert lane.is_over
        assert not ring.is_attached
        assert other.credits[-1] == 4
        assert [facts.is_attached for facts in worker.snapshot().rings] == [True]


async def test_a_removed_ring_that_holds_nothing_is_left_at_once_attached_or_not() -> None:
    ring, dialling = ScriptedRing(), ScriptedRing()
    async with attached(FakeEngine(), ring) as worker:
        worker.add_ring(dialling)
        dialling.is_attached = True
        worker.remove_ring(ring)
        worker.remove_ring(dialling)
        assert not ring.is_attached
        assert not dialling.is_attached
        assert worker.snapshot().rings == ()


async def test_a_removed_ring_that_is_lost_before_the_end_is_not_waited_for() -> None:
    engine, ring = FakeEngine(), ScriptedRing()
    async with attached(engine, ring) as worker:
        ring.grant(chat_grant("abc"))
        await running(ring, engine, 1)
        worker.remove_ring(ring)
        worker.on_detached(ring)
        assert engine.running == []
        assert worker.snapshot().rings == ()


async def test_a_snapshot_tells_lanes_rings_and_capacity() -> None:
    engine, ring = FakeEngine(max_inflight=2), ScriptedRing()
    async with attached(engine, ring) as worker:
        ring.grant(chat_grant("abc"))
        worker.on_drain(ring)
        snapshot = worker.snapshot()
        assert (snapshot.n_jobs, snapshot.capacity.max_inflight, snapshot.is_draining) == (1, 2, False)
        assert (snapshot.rings[0].is_attached, snapshot.rings[0].is_draining) == (True, True)
        assert snapshot.n_attached == 0


async def test_an_alias_is_one_more_name_of_the_model() -> None:
    ring = ScriptedRing()
    config = WorkerConfig(aliases=("tiny", "parrot"), takeover=True)
    async with attached(FakeEngine(), ring, config=config):
        assert ring.hello is not None
        assert ring.hello.model.aliases == ("parrot", "tiny")
        assert ring.hello.takeover


async def test_closing_leaves_rings_that_are_still_dialled() -> None:
    ring = ScriptedRing()
    worker = Worker(FakeEngine(), WorkerConfig(), [ring])
    worker.start()
    ring.is_attached = True
    worker.close()
    assert not ring.is_attached


async def test_closing_leaves_every_ring_and_cancels_what_runs() -> None:
    engine, ring = FakeEngine(), ScriptedRing()
    async with attached(engine, ring) as worker:
        ring.grant(chat_grant("abcdef"))
        await running(ring, engine, 1)
        worker.close()
        worker.close()
        assert not ring.is_attached
        assert engine.running == []


async def test_the_model_card_names_no_directory() -> None:
    engine, ring = FakeEngine(), ScriptedRing()
    async with attached(engine, ring):
        assert ring.hello is not None
        card = ring.hello.model
        assert card == ModelCard(
            name="echo",
            aliases=("parrot",),
            file="echo.gguf",
            n_params=1000,
            n_ctx=1000,
            fingerprint="f" * 64,
            created=card.created,
        )


@pytest.mark.parametrize("field", ["heartbeat_interval_s", "preparation_timeout_s"])
def test_an_option_out_of_range_is_named(field: str) -> None:
    with pytest.raises(WorkerConfigError, match=field):
        WorkerConfig(**{field: 0.0})  # type: ignore[arg-type]
    with pytest.raises(WorkerConfigError, match="name"):
        WorkerConfig(name="")


# -- over a real gateway --


@asynccontextmanager
async def served(engine: FakeEngine, config: GatewayConfig | None = None) -> AsyncIterator[Gateway]:
    gateway = Gateway(config or GatewayConfig())
    worker = Worker(engine, WorkerConfig(), [LocalRing(gateway)])
    worker.start()
    await until(lambda: bool(gateway.snapshot().workers) and gateway.snapshot().workers[0].credit > 0)
    try:
        yield gateway
    finally:
        worker.close()


def open_lane(gateway: Gateway, text: str, **fields: Any) -> Lane:
    body = chat_grant(text, **fields).body
    request = LaneRequest(path="/v1/chat/completions", body=body, model="parrot", request_id="r", tenant="t")
    return gateway.open_lane(request, lambda: None)


async def test_more_lanes_than_places_are_all_served_and_nothing_is_left() -> None:
    engine = FakeEngine(max_inflight=2)
    async with served(engine) as gateway:
        lanes = [open_lane(gateway, f"text {i}") for i in range(7)]

        def step() -> bool:
            engine.step()
            return gateway.is_idle

        await until(step)
        for i, lane in enumerate(lanes):
            answer = orjson.loads(gateway.take(lane))
            assert answer["choices"][0]["message"]["content"] == f"text {i}"
        snapshot = gateway.snapshot()
        assert snapshot.accepted == snapshot.finished == 7
        assert snapshot.dropped_frames == 0
        assert engine.running == []


async def test_a_refusal_is_a_finished_lane_with_a_status() -> None:
    async with served(FakeEngine()) as gateway:
        lane = open_lane(gateway, "x" * 3000, stream=True)
        await until(lambda: lane.state is LaneState.DONE)
        assert lane.head is not None
        assert lane.head.status == 400
        assert lane.outcome is not None
        assert lane.outcome.end is not None
        assert lane.outcome.end.finish_reason is FinishReason.REFUSED


async def test_a_client_that_leaves_frees_its_place_wherever_its_lane_is() -> None:
    engine = FakeEngine(max_inflight=1)
    async with served(engine) as gateway:
        preparing, parked = open_lane(gateway, "abc"), open_lane(gateway, "def")
        gateway.leave(preparing)
        gateway.leave(parked)
        decoding = open_lane(gateway, "ghi", stream=True)
        await until(lambda: len(engine.running) == 1)
        engine.step()
        gateway.leave(decoding)
        await until(lambda: not engine.running)
        last = open_lane(gateway, "jkl")
        await until(lambda: len(engine.running) == 1)
        engine.finish()
        assert last.state is LaneState.DONE
        snapshot = gateway.snapshot()
        assert snapshot.accepted == snapshot.finished + snapshot.cancelled == 4


async def test_a_generation_that_failed_once_goes_on_where_it_was() -> None:
    engine = FakeEngine()
    async with served(engine) as gateway:
        lane = open_lane(gateway, "abcdefghi", stream=True)
        await until(lambda: len(engine.running) == 1)
        engine.step(2)
        engine.running[0].fail(BackendError("once"))
        await until(lambda: len(engine.running) == 1)
        engine.finish()
        events = gateway.take(lane).decode().split("\n\n")
        chunks = [orjson.loads(event[6:]) for event in events if event.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0]["role"] == "assistant"
        assert [delta.get("content") for delta in deltas[1:]] == ["abc", "def", "ghi", None]
        assert len({chunk["id"] for chunk in chunks}) == 1
