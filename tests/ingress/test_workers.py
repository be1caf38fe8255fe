"""The gateway and its workers: one connection an identity, and none for those that only cost."""

from collections.abc import Callable

import pytest

from llm_ingress.errors import ProtocolFault, WorkerRefused
from llm_ingress.gateway import GatewayConfig, LaneState, OutcomeReason
from llm_ingress.leases import IDLE_FRAMES_PER_S
from llm_ingress.wire import LaneRef, RefusedFor
from tests.ingress.scripted_ring import ScriptedRing, ScriptedWorker


def why_closed(worker: ScriptedWorker) -> str | None:
    """Why the gateway ended its connection; None if it stands."""
    return worker.closed_for


def repeat(say: Callable[[], None], n: int) -> None:
    for _ in range(n):
        say()


# One connection an identity.


def test_the_same_instance_takes_its_own_place_at_once_and_its_lanes_go_back() -> None:
    ring = ScriptedRing()
    old = ring.worker(1, identity="gpu-1")
    client = ring.client()
    old.head()
    old.say(b"one", b"1")
    new = ring.worker(identity="gpu-1")
    assert why_closed(old) == "a newer connection of the same worker takes its place"
    assert client.lane.state is LaneState.WAITING
    new.offer(1)
    assert new.grants[0].progress == b"1"
    assert [worker.instance_id for worker in ring.gateway.snapshot().workers] == ["i"]


def test_another_instance_is_refused_while_the_lease_of_the_first_lives() -> None:
    ring = ScriptedRing()
    first = ring.worker(1, identity="gpu-1", instance="a")
    client = ring.client()
    with pytest.raises(WorkerRefused, match="another instance of gpu-1 is attached") as refused:
        ring.worker(identity="gpu-1", instance="b")
    assert refused.value.reason is RefusedFor.DUPLICATE
    assert why_closed(first) is None
    assert client.lane.state is LaneState.CLAIMED


def test_another_instance_may_attach_once_the_lease_of_the_first_has_ended() -> None:
    ring = ScriptedRing()
    first = ring.worker(identity="gpu-1", instance="a")
    ring.wait(6.0)
    assert why_closed(first) == "nothing heard from it for 5 s"
    ring.worker(identity="gpu-1", instance="b")
    assert [worker.instance_id for worker in ring.gateway.snapshot().workers] == ["b"]


def test_another_instance_takes_over_if_it_says_so() -> None:
    ring = ScriptedRing()
    first = ring.worker(1, identity="gpu-1", instance="a")
    client = ring.client()
    second = ring.worker(1, identity="gpu-1", instance="b", takeover=True)
    assert why_closed(first) is not None
    assert second.last == client.lane.ref


def test_other_identities_are_no_duplicates() -> None:
    ring = ScriptedRing()
    first, second = ring.worker(identity="gpu-1"), ring.worker(identity="gpu-2", instance="b")
    assert (why_closed(first), why_closed(second)) == (None, None)


def test_a_replaced_connection_speaks_for_nobody() -> None:
    ring = ScriptedRing()
    old = ring.worker(1, identity="gpu-1")
    client = ring.client()
    ref = old.last
    new = ring.worker(1, identity="gpu-1")
    assert new.last == LaneRef(client.lane.id, 2)
    old.head(ref=ref)
    assert client.lane.head is None
    assert ring.gateway.snapshot().dropped_frames == 1


# Those that only cost.


def test_a_worker_that_claims_and_says_nothing_loses_its_connection_and_the_lane_goes_back() -> None:
    ring = ScriptedRing(GatewayConfig(claim_timeout_s=20.0))
    worker = ring.worker(1)
    client = ring.client()
    ring.wait(20.0, worker)
    assert why_closed(worker) is None
    ring.wait(0.5, worker)
    assert why_closed(worker) == "it holds lane 1 and has said nothing of it for 20 s"
    assert client.lane.state is LaneState.WAITING
    assert client.lane.attempts == 1


def test_a_worker_that_gets_stuck_in_mid_answer_loses_its_connection_and_another_goes_on() -> None:
    ring = ScriptedRing(GatewayConfig(claim_timeout_s=20.0))
    worker = ring.worker(1)
    client = ring.client()
    ring.wait(19.0, worker)
    worker.head()
    worker.say(b"one", b"1")
    ring.wait(20.0, worker)
    assert why_closed(worker) is None
    ring.wait(0.5, worker)
    assert why_closed(worker) is not None
    other = ring.worker(1)
    assert other.grants[-1].progress == b"1"
    assert client.read() == b"one"


@pytest.mark.parametrize("word", ["head", "progress", "working"])
def test_each_word_about_a_lane_gives_it_time_for_the_next(word: str) -> None:
    ring = ScriptedRing(GatewayConfig(claim_timeout_s=20.0))
    worker = ring.worker(1)
    ring.client()
    ring.wait(15.0, worker)
    match word:
        case "head":
            worker.head()
        case "progress":
            worker.say(b"", b"start")
        case _:
            worker.work()
    ring.wait(20.0, worker)
    assert why_closed(worker) is None
    ring.wait(0.5, worker)
    assert why_closed(worker) is not None


def test_a_worker_that_says_that_it_works_on_a_lane_has_all_the_time_a_prompt_takes() -> None:
    ring = ScriptedRing(GatewayConfig(claim_timeout_s=20.0))
    worker = ring.worker(1)
    client = ring.client()
    for _ in range(30):
        ring.wait(15.0, worker)
        worker.work()
    assert why_closed(worker) is None
    assert client.lane.state is LaneState.CLAIMED


def test_a_paused_lane_is_rightly_silent_and_has_its_time_anew_when_it_may_go_on() -> None:
    ring = ScriptedRing(GatewayConfig(claim_timeout_s=20.0, response_buffer_bytes=3, stall_timeout_s=100.0))
    worker = ring.worker(1)
    client = ring.client()
    worker.head()
    worker.say(b"more than that", b"1")
    ring.wait(60.0, worker)
    assert worker.paused
    client.read()
    assert worker.resumed
    ring.wait(20.0, worker)
    assert why_closed(worker) is None
    ring.wait(0.5, worker)
    assert why_closed(worker) is not None


def test_the_time_for_a_word_begins_anew_with_each_claim() -> None:
    ring = ScriptedRing(GatewayConfig(claim_timeout_s=20.0))
    worker = ring.worker(1)
    ring.client()
    ring.wait(15.0, worker)
    worker.die()
    other = ring.worker(1)
    ring.wait(20.0, other)
    assert why_closed(other) is None
    ring.wait(0.5, other)
    assert why_closed(other) is not None


def test_a_worker_whose_engine_stands_still_is_nobody_to_hope_for() -> None:
    ring = ScriptedRing(GatewayConfig(claim_timeout_s=20.0, no_worker_timeout_s=10.0))
    worker = ring.worker(2)
    client = ring.client()
    worker.head()
    worker.say(b"one", b"1")
    worker.release()
    worker.step_age_s = 20.5
    ring.wait(9.5, worker)
    assert client.lane.is_open
    ring.wait(1.0, worker)
    outcome = client.lane.outcome
    assert outcome is not None
    assert (outcome.state, outcome.reason) == (LaneState.FAILED, OutcomeReason.NO_WORKERS)


def test_a_worker_whose_engine_goes_on_gets_what_it_had_offered_to_take() -> None:
    ring = ScriptedRing(GatewayConfig(claim_timeout_s=20.0, no_worker_timeout_s=10.0))
    worker = ring.worker(1)
    worker.step_age_s = 20.5
    worker.beat()
    client = ring.client()
    worker.offer(1)
    assert not worker.grants
    ring.wait(9.0, worker)
    worker.step_age_s = 0.0
    worker.beat()
    assert client.lane.state is LaneState.CLAIMED
    assert client.lane.alone_since is None


def test_a_starved_ingress_lets_go_of_nobody_whose_words_lie_unread() -> None:
    ring = ScriptedRing(GatewayConfig(claim_timeout_s=20.0, heartbeat_timeout_s=60.0))
    worker = ring.worker(1)
    ring.client()
    worker.head()
    ring.wait(1.0, worker)
    ring.clock.now += 30.0
    ring.gateway.tick()
    assert why_closed(worker) is None
    worker.say(b"one", b"1")
    ring.wait(19.0, worker)
    assert why_closed(worker) is None


@pytest.mark.parametrize("frame", ["credit", "heartbeat", "no lane", "empty", "working"])
def test_a_worker_that_floods_is_at_fault(frame: str) -> None:
    ring = ScriptedRing()
    worker = ring.worker(1)
    ring.client()
    worker.head()
    frames: dict[str, Callable[[], None]] = {
        "credit": lambda: worker.offer(0),
        "heartbeat": worker.beat,
        "no lane": lambda: worker.say(b"x", ref=LaneRef(9, 9)),
        "empty": lambda: worker.say(b""),
        "working": worker.work,
    }
    with pytest.raises(ProtocolFault, match="that move nothing"):
        repeat(frames[frame], IDLE_FRAMES_PER_S + 1)


def test_frames_that_move_nothing_are_forgiven_with_time() -> None:
    ring = ScriptedRing()
    worker = ring.worker()
    ring.gateway.tick()
    for _ in range(3):
        repeat(worker.beat, IDLE_FRAMES_PER_S - 10)
        ring.wait(1.0)


def test_tokens_are_no_flood() -> None:
    ring = ScriptedRing()
    worker = ring.worker(1)
    client = ring.client()
    worker.head()
    for _ in range(IDLE_FRAMES_PER_S + 1):
        worker.say(b"x", b"1")
        client.read()


def test_a_worker_that_ignores_a_pause_is_at_fault() -> None:
    ring = ScriptedRing(GatewayConfig(response_buffer_bytes=10))
    worker = ring.worker(1)
    ring.client()
    worker.head()
    worker.say(b"x" * 11)
    assert worker.paused == [worker.last]
    megabyte = b"x" * 1024 * 1024
    with pytest.raises(ProtocolFault, match="which is paused"):
        repeat(lambda: worker.say(megabyte), 17)
