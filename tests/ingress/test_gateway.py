"""The gateway: one request's way between a client and workers that come, leave, refuse and fall silent."""

import pytest

from llm_ingress.errors import ConfigError, ProtocolFault, RefusalReason, Refused, UnknownModel
from llm_ingress.gateway import LANES_PER_TICK, MOST_TICK_PARTS, GatewayConfig, LaneState, OutcomeReason
from llm_ingress.wire import Head, LaneRef
from tests.ingress.scripted_ring import END, OK, REFUSED, Client, ScriptedRing, card


def state(client: Client) -> LaneState:
    return client.lane.state


def outcome(client: Client) -> tuple[LaneState, OutcomeReason]:
    assert client.lane.outcome is not None, client.lane.state
    assert client.lane.outcome.state is client.lane.state
    return client.lane.outcome.state, client.lane.outcome.reason


# A request's way.


def test_a_request_is_granted_at_once_to_a_worker_with_room_and_its_answer_reaches_the_client() -> None:
    ring = ScriptedRing()
    worker = ring.worker(1)
    client = ring.client(body=b'{"model":"m"}')
    grant = worker.grants[0]
    assert (grant.path, grant.body, grant.request_id) == ("/v1/chat/completions", b'{"model":"m"}', "req")
    assert (grant.queued_ms, grant.progress, grant.remaining_s) == (0.0, b"", None)
    worker.head()
    assert client.lane.head is OK
    worker.say(b"one ", b"1")
    worker.say(b"two", b"2")
    assert client.lane.unread == 7
    worker.end()
    assert client.read() == b"one two"
    assert outcome(client) == (LaneState.DONE, OutcomeReason.FINISHED)
    assert client.lane.outcome is not None
    assert client.lane.outcome.end is END
    assert client.n_changes == 4
    assert ring.gateway.is_idle


def test_a_request_waits_until_a_worker_offers_room_for_it() -> None:
    ring = ScriptedRing()
    worker = ring.worker()
    client = ring.client()
    assert state(client) is LaneState.WAITING
    ring.clock.now += 2.5
    worker.offer(1)
    assert worker.grants[0].queued_ms == 2500
    assert state(client) is LaneState.CLAIMED


def test_an_offer_is_used_up_by_grants_and_replaced_by_the_next() -> None:
    ring = ScriptedRing()
    worker = ring.worker(2)
    for _ in range(4):
        ring.client()
    assert len(worker.grants) == 2
    ring.gateway.workers.credit(worker.id, 2, 0)  # an offer that crossed the two grants on the way
    assert len(worker.grants) == 2
    worker.offer(2)
    assert len(worker.grants) == 4


def test_progress_without_bytes_wakes_nobody_and_may_come_before_the_head() -> None:
    ring = ScriptedRing()
    worker = ring.worker(1)
    client = ring.client()
    worker.say(b"", b"token")
    assert client.n_changes == 0
    assert state(client) is LaneState.CLAIMED


def test_the_deadline_travels_with_the_grant_and_ends_the_lane_wherever_it_is() -> None:
    ring = ScriptedRing(GatewayConfig(request_timeout_s=20.0))
    worker = ring.worker()
    running, parked = ring.client(), ring.client()
    ring.wait(5.0, worker)
    worker.offer(1)
    assert worker.grants[0].remaining_s == 15.0
    worker.head()
    ring.wait(15.0, worker)
    for client in (running, parked):
        assert outcome(client) == (LaneState.CANCELLED, OutcomeReason.DEADLINE)
        assert client.lane.outcome is not None
        assert client.lane.outcome.message == "not answered within 20 s"
    assert worker.cancelled == [worker.last]


# Refusals.


def test_beyond_ring_streams_requests_are_refused_and_running_lanes_count() -> None:
    ring = ScriptedRing(GatewayConfig(ring_streams=3))
    worker = ring.worker(1)
    clients = [ring.client() for _ in range(3)]
    for _ in range(3):
        with pytest.raises(Refused) as refused:
            ring.client()
        assert refused.value.reason is RefusalReason.RING_FULL
    worker.head()
    worker.end()
    ring.client()
    assert clients[0].lane.state is LaneState.DONE
    assert ring.gateway.snapshot().accepted == 4


def test_a_tenant_with_fewer_places_gets_one_of_a_tenant_that_has_more() -> None:
    ring = ScriptedRing(GatewayConfig(ring_streams=4))
    worker = ring.worker(1)
    heavy = [ring.client(tenant="heavy") for _ in range(4)]
    light = [ring.client(tenant="light") for _ in range(2)]
    assert [client.lane.is_open for client in heavy] == [True, True, False, False]
    for client in heavy[2:]:
        assert outcome(client) == (LaneState.EXPIRED, OutcomeReason.DISPLACED)
        assert client.n_changes == 1
    for tenant in ("heavy", "light"):
        with pytest.raises(Refused) as refused:
            ring.client(tenant=tenant)
        assert refused.value.reason is RefusalReason.RING_FULL
    for _ in range(4):
        worker.head()
        worker.end()
        worker.offer(1)
    assert [client.lane.state for client in (heavy[0], *light, heavy[1])] == [LaneState.DONE] * 4
    counts = ring.gateway.snapshot()
    assert (counts.accepted, counts.finished, counts.failed, counts.open) == (6, 4, 2, 0)


def test_a_tick_looks_at_so_many_lanes_only_and_at_all_in_several() -> None:
    n_lanes = LANES_PER_TICK + 1
    ring = ScriptedRing(GatewayConfig(ring_streams=n_lanes, queue_timeout_s=10.0))
    ring.worker()
    for _ in range(n_lanes):
        ring.client()
    ring.clock.now += 10.0
    ring.gateway.tick()
    assert ring.gateway.snapshot().open == 1
    ring.gateway.tick()
    assert ring.gateway.is_idle


def test_the_more_lanes_there_are_the_more_ticks_there_are_to_be() -> None:
    ring = ScriptedRing(GatewayConfig(ring_streams=LANES_PER_TICK * MOST_TICK_PARTS * 2))
    ring.worker()
    parts = []
    for _ in range(ring.gateway.config.ring_streams):
        parts.append(ring.gateway.n_tick_parts)
        ring.client()
    assert parts[:LANES_PER_TICK] == [1] * LANES_PER_TICK
    assert parts[LANES_PER_TICK] == 2
    assert parts[-1] == MOST_TICK_PARTS


@pytest.mark.parametrize("reason", RefusalReason)
@pytest.mark.parametrize("chance", [0.0, 0.5, 0.999])
def test_retry_after_is_whole_seconds_between_1_and_30(reason: RefusalReason, chance: float) -> None:
    retry_after_s = ScriptedRing(chance=chance).gateway.retry_after_s(reason)
    assert isinstance(retry_after_s, int)
    assert 1 <= retry_after_s <= 30


def test_retry_after_is_spread() -> None:
    early, late = ScriptedRing(chance=0.0).gateway, ScriptedRing(chance=0.999).gateway
    for reason in RefusalReason:
        assert early.retry_after_s(reason) < late.retry_after_s(reason)


def test_before_the_first_worker_every_model_is_refused_for_want_of_workers() -> None:
    ring = ScriptedRing()
    with pytest.raises(Refused) as refused:
        ring.client()
    assert refused.value.reason is RefusalReason.NO_WORKERS


def test_a_model_nobody_ever_served_is_unknown_even_when_all_lanes_are_taken() -> None:
    ring = ScriptedRing(GatewayConfig(ring_streams=1))
    ring.worker()
    ring.client()
    with pytest.raises(UnknownModel):
        ring.client("another")
    with pytest.raises(Refused):
        ring.client()


def test_an_alias_reaches_the_model_it_stands_for() -> None:
    ring = ScriptedRing()
    worker = ring.worker(1, model=card(aliases=("chat",)))
    ring.client("chat")
    assert len(worker.grants) == 1


def test_a_draining_gateway_refuses_new_lanes_first_of_all_and_finishes_those_it_has() -> None:
    ring = ScriptedRing(GatewayConfig(ring_streams=2))
    worker = ring.worker(1)
    running, parked = ring.client(), ring.client()
    ring.gateway.drain()
    with pytest.raises(Refused) as refused:
        ring.client("another")
    assert refused.value.reason is RefusalReason.DRAINING
    worker.head()
    worker.end()
    worker.offer(1)
    worker.head()
    worker.end()
    assert outcome(running) == outcome(parked) == (LaneState.DONE, OutcomeReason.FINISHED)
    assert ring.gateway.is_idle


def test_past_the_drain_limit_every_open_lane_fails_and_its_worker_is_told() -> None:
    ring = ScriptedRing()
    worker = ring.worker(2)
    claimed, streaming, parked = ring.client(), ring.client(), ring.client()
    worker.head()
    ring.gateway.fail_open_lanes("the server is shutting down")
    for client in (claimed, streaming, parked):
        assert outcome(client) == (LaneState.FAILED, OutcomeReason.DRAIN_ENDED)
        assert client.n_changes >= 1
    assert len(worker.cancelled) == 2
    assert ring.gateway.is_idle


# Waiting in vain.


def test_a_lane_nobody_has_room_for_expires_after_the_queue_timeout() -> None:
    ring = ScriptedRing()
    worker = ring.worker()
    client = ring.client()
    ring.wait(59.5, worker)
    assert state(client) is LaneState.WAITING
    ring.wait(0.5, worker)
    assert outcome(client) == (LaneState.EXPIRED, OutcomeReason.QUEUE_TIMEOUT)
    assert client.n_changes == 1
    worker.offer(1)
    assert not worker.grants


def test_a_lane_whose_workers_are_all_away_expires_after_the_no_worker_timeout() -> None:
    ring = ScriptedRing()
    worker = ring.worker()
    early = ring.client()
    ring.wait(3.0, worker)
    worker.die()
    late = ring.client()
    ring.wait(9.5)
    assert {early.lane.state, late.lane.state} == {LaneState.WAITING}
    ring.wait(0.5)
    assert outcome(early) == outcome(late) == (LaneState.EXPIRED, OutcomeReason.NO_WORKERS)


def test_a_worker_that_comes_back_in_time_ends_the_wait_for_workers() -> None:
    ring = ScriptedRing()
    ring.worker().die()
    client = ring.client()
    ring.wait(9.5)
    worker = ring.worker()
    ring.wait(20.0, worker)
    assert state(client) is LaneState.WAITING
    worker.die()
    ring.wait(9.5)
    assert state(client) is LaneState.WAITING


def test_workers_it_cannot_use_do_not_prolong_a_lanes_wait_for_one() -> None:
    ring = ScriptedRing()
    ring.worker().die()
    client = ring.client()
    for _ in range(5):
        other = ring.worker(1, model=card("m2"))
        ring.wait(2.0, other)
        other.die()
    assert outcome(client) == (LaneState.EXPIRED, OutcomeReason.NO_WORKERS)


def test_a_draining_worker_gets_nothing_more_finishes_what_it_holds_and_is_no_company_for_the_rest() -> None:
    ring = ScriptedRing()
    worker = ring.worker(2)
    held = ring.client()
    worker.offer(0)
    parked_before = ring.client()
    worker.drain_itself()
    parked_after = ring.client()
    worker.offer(2)
    assert len(worker.grants) == 1
    ring.wait(10.0, worker)
    for parked in (parked_before, parked_after):
        assert outcome(parked) == (LaneState.EXPIRED, OutcomeReason.NO_WORKERS)
    worker.head()
    worker.end()
    assert outcome(held) == (LaneState.DONE, OutcomeReason.FINISHED)


def test_time_spent_claimed_does_not_count_to_the_queue_timeout() -> None:
    ring = ScriptedRing()
    worker = ring.worker(1)
    client = ring.client()
    ring.wait(50.0, worker)
    worker.release()
    ring.wait(59.5, worker)
    assert state(client) is LaneState.WAITING
    ring.wait(0.5, worker)
    assert outcome(client) == (LaneState.EXPIRED, OutcomeReason.QUEUE_TIMEOUT)


# The client leaves.


def test_a_client_that_leaves_the_queue_is_never_granted_and_touches_nobody_else() -> None:
    ring = ScriptedRing()
    worker = ring.worker(1)
    running, leaving, staying = ring.client(), ring.client(), ring.client()
    leaving.leave()
    assert outcome(leaving) == (LaneState.CANCELLED, OutcomeReason.CLIENT_LEFT)
    assert worker.cancelled == []
    worker.head()
    worker.end()
    worker.offer(2)
    assert state(staying) is LaneState.CLAIMED
    assert len(worker.grants) == 2
    assert outcome(running) == (LaneState.DONE, OutcomeReason.FINISHED)


@pytest.mark.parametrize("has_head", [False, True])
def test_a_client_that_leaves_a_claimed_lane_cancels_it_at_once(has_head: bool) -> None:
    ring = ScriptedRing()
    worker = ring.worker(1)
    client = ring.client()
    if has_head:
        worker.head()
        worker.say(b"text", b"1")
    client.leave()
    client.leave()
    assert worker.cancelled == [worker.last]
    assert (client.lane.unread, ring.gateway.is_idle) == (0, True)
    assert ring.gateway.snapshot().cancelled == 1


def test_a_cancel_that_races_with_the_natural_end_frees_once() -> None:
    ring = ScriptedRing()
    worker = ring.worker(2)
    left_first, ended_first = ring.client(), ring.client()
    for grant in worker.grants:
        worker.head(ref=grant.ref)
    left_first.leave()
    worker.end(ref=worker.grants[0].ref)
    worker.end(ref=worker.grants[1].ref)
    ended_first.leave()
    facts = ring.gateway.snapshot()
    assert (facts.accepted, facts.finished, facts.cancelled, facts.failed, facts.open) == (2, 1, 1, 0, 0)
    assert facts.dropped_frames == 1
    assert len(worker.cancelled) == 1


# Workers lost, claims fenced.


def test_a_dead_workers_lane_goes_on_elsewhere_from_its_progress_and_the_client_sees_one_answer() -> None:
    ring = ScriptedRing()
    first = ring.worker(1)
    client = ring.client()
    first.head()
    first.say(b"one ", b"1,")
    assert client.read() == b"one "
    first.say(b"two ", b"2,")
    second = ring.worker(1)
    first.die()
    grant = second.grants[0]
    assert grant.progress == b"1,2,"
    assert grant.ref == LaneRef(client.lane.id, 2)
    second.head(Head(status=200, headers=()))
    second.say(b"three", b"3,")
    second.end()
    assert client.lane.head is OK
    assert client.read() == b"two three"
    assert client.lane.attempts == 1


def test_a_lost_lane_goes_before_those_that_wait() -> None:
    ring = ScriptedRing()
    first = ring.worker(1)
    lost = ring.client(tenant="a")
    parked = ring.client(tenant="b")
    first.die()
    second = ring.worker(1)
    assert state(lost) is LaneState.CLAIMED
    assert state(parked) is LaneState.WAITING
    assert len(second.grants) == 1


def test_lanes_lost_together_come_back_in_the_order_they_were_admitted() -> None:
    ring = ScriptedRing()
    first = ring.worker(3)
    clients = [ring.client() for _ in range(3)]
    first.die()
    second = ring.worker(3)
    assert [grant.ref.lane_id for grant in second.grants] == [client.lane.id for client in clients]


def test_a_lane_with_progress_waits_for_an_equal_model_however_long_the_queue_timeout_is() -> None:
    ring = ScriptedRing(GatewayConfig(queue_timeout_s=5.0, no_worker_timeout_s=10.0))
    first = ring.worker(1)
    client = ring.client()
    first.head()
    first.say(b"one ", b"1,")
    first.die()
    other = ring.worker(5, model=card(fingerprint="other"))
    ring.wait(9.5, other)
    assert state(client) is LaneState.WAITING
    assert not other.grants
    equal = ring.worker()
    ring.wait(50.0, equal)
    assert state(client) is LaneState.WAITING  # its equal is there, and busy
    equal.offer(1)
    assert equal.grants[0].progress == b"1,"


def test_a_lane_with_progress_fails_when_no_equal_worker_comes_in_time() -> None:
    ring = ScriptedRing()
    first, other = ring.worker(1), ring.worker(model=card(fingerprint="other"))
    client = ring.client()
    first.head()
    first.say(b"one ", b"1,")
    first.die()
    other.offer(1)
    ring.wait(10.0, other)
    assert outcome(client) == (LaneState.FAILED, OutcomeReason.NO_WORKERS)
    assert client.read() == b"one "
    assert client.n_changes == 3


def test_a_lane_without_progress_may_start_anew_on_any_worker_of_its_model() -> None:
    ring = ScriptedRing()
    first = ring.worker(1)
    client = ring.client()
    first.head()
    first.die()
    other = ring.worker(1, model=card(fingerprint="other"))
    other.head()
    other.say(b"all", b"1")
    other.end()
    assert client.read() == b"all"


def test_an_answer_begun_without_progress_fails_rather_than_repeat_itself() -> None:
    ring = ScriptedRing()
    first, second = ring.worker(1), ring.worker()
    client = ring.client()
    first.head()
    first.say(b"text")
    first.die()
    second.offer(1)
    assert outcome(client) == (LaneState.FAILED, OutcomeReason.WORKER_LOST)
    assert client.n_changes == 3
    assert not second.grants


def test_a_second_claim_that_answers_with_another_status_fails_the_lane() -> None:
    ring = ScriptedRing()
    first = ring.worker(1)
    client = ring.client()
    first.head()
    first.die()
    second = ring.worker(1)
    second.head(REFUSED)
    assert client.lane.head is OK
    assert outcome(client) == (LaneState.FAILED, OutcomeReason.WORKER_FAILED)
    assert second.cancelled == [second.last]


def test_a_lane_is_given_up_after_max_attempts() -> None:
    ring = ScriptedRing(GatewayConfig(max_attempts=3))
    ring.worker()
    doomed = ring.client()
    for n_lost in range(3):
        assert doomed.lane.attempts == n_lost
        assert doomed.lane.is_open
        worker = ring.worker(1)
        assert len(worker.grants) == 1
        worker.die()
    assert outcome(doomed) == (LaneState.FAILED, OutcomeReason.ATTEMPTS_SPENT)
    assert doomed.lane.outcome is not None
    assert doomed.lane.outcome.message == "given up after 3 attempts; the last: the connection was lost"


def test_a_failure_worth_another_try_counts_as_an_attempt_and_another_worker_goes_on() -> None:
    ring = ScriptedRing()
    first, second = ring.worker(1), ring.worker()
    client = ring.client()
    first.head()
    first.say(b"one ", b"1,")
    first.offer(1)
    first.fail(retryable=True)
    assert state(client) is LaneState.WAITING  # not to the worker that just failed it
    second.offer(1)
    assert second.grants[0].progress == b"1,"
    assert client.lane.attempts == 1


def test_a_failure_that_would_only_repeat_itself_ends_the_lane() -> None:
    ring = ScriptedRing()
    worker = ring.worker(1)
    client = ring.client()
    worker.fail("the grammar does not compile", retryable=False)
    assert outcome(client) == (LaneState.FAILED, OutcomeReason.WORKER_FAILED)
    assert client.lane.outcome is not None
    assert client.lane.outcome.message == "the grammar does not compile"
    assert client.n_changes == 1
    assert worker.cancelled == []


def test_a_released_lane_goes_to_another_worker_and_costs_no_attempt() -> None:
    ring = ScriptedRing()
    first, second = ring.worker(2), ring.worker(1)
    client = ring.client()
    first.release()
    assert len(second.grants) == 1
    assert client.lane.attempts == 0


def test_a_released_lane_returns_to_its_worker_only_after_the_next_credit_and_then_first() -> None:
    ring = ScriptedRing()
    worker = ring.worker(2)
    released = ring.client()
    worker.release()
    assert state(released) is LaneState.WAITING
    younger = ring.client()
    assert state(younger) is LaneState.CLAIMED
    ring.client()
    worker.offer(1)
    assert worker.last == LaneRef(released.lane.id, 2)


def test_frames_of_an_old_claim_or_an_unknown_lane_or_worker_are_dropped_and_counted() -> None:
    ring = ScriptedRing()
    worker = ring.worker(1)
    client = ring.client()
    old = worker.last
    worker.release()
    worker.offer(1)
    worker.head(ref=old)
    worker.say(b"late", b"late", ref=old)
    worker.end(ref=old)
    worker.fail(retryable=False, ref=old)
    worker.release(ref=LaneRef(999, 1))
    ring.gateway.workers.head(999, worker.last, OK)
    ring.gateway.workers.credit(999, 4, 0)
    assert state(client) is LaneState.CLAIMED
    assert (client.lane.unread, client.lane.head, bytes(client.lane.progress)) == (0, None, b"")
    assert ring.gateway.snapshot().dropped_frames == 7


def test_a_worker_cannot_speak_for_a_lane_another_one_holds() -> None:
    ring = ScriptedRing()
    holder, stranger = ring.worker(1), ring.worker()
    client = ring.client()
    stranger.head(ref=holder.last)
    assert client.lane.head is None
    assert ring.gateway.snapshot().dropped_frames == 1


def test_a_worker_that_breaks_the_order_of_frames_is_at_fault_and_changes_nothing() -> None:
    ring = ScriptedRing()
    worker = ring.worker(1)
    client = ring.client()
    ref = worker.last
    with pytest.raises(ProtocolFault, match="before the head"):
        worker.say(b"text", b"1")
    with pytest.raises(ProtocolFault, match="before its head"):
        ring.gateway.workers.end(worker.id, ref, END)
    assert (client.lane.state, client.lane.unread, bytes(client.lane.progress)) == (
        LaneState.CLAIMED,
        0,
        b"",
    )
    worker.head()
    with pytest.raises(ProtocolFault, match="second head"):
        worker.head()


def test_detaching_twice_is_harmless() -> None:
    ring = ScriptedRing()
    worker = ring.worker(1)
    client = ring.client()
    worker.die()
    worker.die()
    assert client.lane.attempts == 1


# Silence.


def test_an_expired_lease_returns_the_lane_to_the_head_with_its_progress() -> None:
    ring = ScriptedRing()
    frozen = ring.worker(1)
    client = ring.client()
    parked = ring.client()
    frozen.head()
    frozen.say(b"one ", b"1,")
    other = ring.worker()
    ring.wait(5.0, other)
    assert state(client) is LaneState.STREAMING
    ring.wait(0.5, other)
    assert state(client) is LaneState.WAITING
    other.offer(1)
    assert (other.last.lane_id, other.grants[0].progress) == (client.lane.id, b"1,")
    assert state(parked) is LaneState.WAITING
    assert frozen.closed_for == "nothing heard from it for 5 s"


def test_workers_silent_together_are_not_given_each_others_lanes() -> None:
    ring = ScriptedRing()
    first, second = ring.worker(1), ring.worker()
    client = ring.client()
    second.offer(1)
    ring.wait(6.0)
    assert (first.closed_for, second.closed_for) == ("nothing heard from it for 5 s",) * 2
    assert (client.lane.attempts, state(client)) == (1, LaneState.WAITING)


def test_any_frame_renews_the_lease() -> None:
    ring = ScriptedRing()
    worker = ring.worker(1)
    client = ring.client()
    worker.head()
    for _ in range(5):
        ring.wait(4.0)
        worker.say(b"x", b"x")
    assert state(client) is LaneState.STREAMING


def test_a_starved_ingress_evicts_nobody_whose_frames_lie_unread() -> None:
    ring = ScriptedRing()
    worker = ring.worker(1)
    client = ring.client()
    ring.wait(0.5, worker)
    ring.clock.now += 30.0
    ring.gateway.tick()
    worker.beat()
    ring.wait(1.5)
    assert state(client) is LaneState.CLAIMED


def test_frames_that_come_after_their_lease_has_ended_bring_no_lane_into_a_connection_that_may_be_dead() -> (
    None
):
    ring = ScriptedRing()
    cut = ring.worker(2)
    lost = ring.client()
    old = cut.last
    ring.wait(6.0)
    assert ring.gateway.models() == ()
    cut.beat()
    cut.offer(2)
    ring.gateway.workers.head(cut.id, old, OK)
    assert ring.gateway.snapshot().dropped_frames == 3
    assert (state(lost), lost.lane.head, lost.lane.attempts) == (LaneState.WAITING, None, 1)
    back = ring.worker(1)
    assert back.last == LaneRef(lost.lane.id, 2)


# Slow readers.

BUFFER = GatewayConfig(response_buffer_bytes=100)


def test_a_lane_is_paused_past_its_buffer_and_goes_on_when_the_client_has_read() -> None:
    ring = ScriptedRing(BUFFER)
    worker = ring.worker(1)
    client = ring.client()
    worker.head()
    worker.say(b"x" * 100)
    assert worker.paused == []
    worker.say(b"x")
    worker.say(b"x")  # was on its way when the pause was sent
    assert worker.paused == [worker.last]
    assert len(client.read()) == 102
    assert worker.resumed == [worker.last]
    client.read()
    assert len(worker.resumed) == 1


def test_a_client_that_reads_too_slowly_for_too_long_is_dropped() -> None:
    ring = ScriptedRing(BUFFER)
    worker = ring.worker(1)
    client = ring.client()
    worker.head()
    worker.say(b"x" * 101)
    ring.wait(9.5, worker)
    assert client.lane.is_open
    ring.wait(0.5, worker)
    assert outcome(client) == (LaneState.CANCELLED, OutcomeReason.STALLED)
    assert worker.cancelled == [worker.last]


def test_a_trickle_reader_does_not_reset_the_stall_clock() -> None:
    ring = ScriptedRing(BUFFER)
    worker = ring.worker(1)
    client = ring.client()
    worker.head()
    for _ in range(4):
        worker.say(b"x" * 101)
        ring.wait(2.0, worker)
        client.read()
        ring.wait(3.0, worker)
    worker.say(b"x" * 101)
    ring.wait(1.5, worker)
    assert client.lane.is_open
    ring.wait(0.5, worker)
    assert outcome(client) == (LaneState.CANCELLED, OutcomeReason.STALLED)


def test_while_others_wait_for_the_same_model_a_slow_reader_has_less_patience() -> None:
    ring = ScriptedRing(BUFFER)
    worker = ring.worker(1)
    elsewhere = ring.worker(model=card("m2"))
    slow = ring.client()
    worker.head()
    worker.say(b"x" * 101)
    ring.client("m2")
    ring.wait(2.0, worker, elsewhere)
    assert slow.lane.is_open
    ring.client()
    ring.wait(0.5, worker, elsewhere)
    assert outcome(slow) == (LaneState.CANCELLED, OutcomeReason.STALLED)


def test_a_client_that_reads_again_is_not_dropped_for_what_it_did_while_nobody_waited() -> None:
    ring = ScriptedRing(BUFFER)
    worker = ring.worker(1)
    client = ring.client()
    worker.head()
    worker.say(b"x" * 101)
    ring.wait(5.0, worker)
    client.read()
    ring.client()
    ring.wait(5.0, worker)
    assert client.lane.is_open


def test_a_paused_lane_that_loses_its_worker_stops_its_stall_clock_and_is_paused_again_by_the_next() -> None:
    ring = ScriptedRing(BUFFER)
    first = ring.worker(1)
    client = ring.client()
    first.head()
    first.say(b"x" * 99, b"12")
    assert client.lane.is_paused
    ring.wait(4.0, first)
    first.die()
    ring.wait(8.0)
    second = ring.worker(1)
    second.head()
    second.say(b"x", b"3")
    assert second.paused == [second.last]
    ring.wait(5.5, second)
    assert client.lane.is_open
    ring.wait(0.5, second)
    assert outcome(client) == (LaneState.CANCELLED, OutcomeReason.STALLED)


def test_progress_counts_to_the_buffer_and_past_it_is_given_up() -> None:
    ring = ScriptedRing(BUFFER)
    worker = ring.worker(1)
    client = ring.client()
    worker.head()
    worker.say(b"x", b"p" * 100)
    assert worker.paused == [worker.last]
    client.read()
    worker.say(b"x", b"p")
    assert (len(client.lane.progress), len(worker.paused)) == (0, 1)
    worker.die()
    assert outcome(client) == (LaneState.FAILED, OutcomeReason.WORKER_LOST)


# Facts.


def test_the_snapshot_tells_workers_lanes_and_counts() -> None:
    ring = ScriptedRing(GatewayConfig(ring_streams=9))
    worker = ring.worker(1, name="gpu-1")
    assert ring.gateway.snapshot().workers[0].heartbeat is None
    ring.client()
    ring.client()
    worker.beat()
    ring.clock.now += 0.25
    facts = ring.gateway.snapshot()
    (seen,) = facts.workers
    assert (seen.name, seen.card, seen.heard_ago_s, seen.n_held, seen.credit) == ("gpu-1", card(), 0.25, 1, 0)
    assert (seen.is_live, seen.is_draining) == (True, False)
    assert seen.heartbeat is not None
    assert seen.heartbeat.inflight == 1
    assert {state: n for state, n in facts.lanes.items() if n} == {LaneState.WAITING: 1, LaneState.CLAIMED: 1}
    assert (facts.ring_streams, facts.draining, facts.open) == (9, False, 2)


def test_an_expired_lane_counts_as_failed_and_stays_visible_by_its_state() -> None:
    ring = ScriptedRing()
    ring.worker().die()
    ring.client()
    ring.wait(10.0)
    facts = ring.gateway.snapshot()
    assert (facts.failed, facts.lanes[LaneState.EXPIRED], facts.lanes[LaneState.FAILED]) == (1, 1, 0)


def test_models_are_those_of_live_workers_one_card_a_name() -> None:
    ring = ScriptedRing()
    ring.worker(model=card("m1"))
    ring.worker(model=card("m1"))
    ring.worker(model=card("m2")).die()
    assert [model.name for model in ring.gateway.models()] == ["m1"]
    assert ring.client("m2").lane.state is LaneState.WAITING


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("ring_streams", 0, "ring_streams is 0, must be at least 1"),
        ("max_attempts", -1, "max_attempts is -1, must be at least 1"),
        ("response_buffer_bytes", 0, "response_buffer_bytes is 0, must be at least 1"),
        ("queue_timeout_s", 0.0, "queue_timeout_s is 0.0, must be more than 0"),
        ("request_timeout_s", -5.0, "request_timeout_s is -5.0, must be more than 0"),
        ("stall_timeout_s", float("nan"), "stall_timeout_s is nan, must be more than 0"),
        (
            "heartbeat_timeout_s",
            1.0,
            "heartbeat_timeout_s is 1.0, must be more than heartbeat_interval_s, 1.0",
        ),
    ],
)
def test_an_option_out_of_range_is_refused_by_name_value_and_range(
    option: str, value: float, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}$"):
        GatewayConfig(**{option: value})  # type: ignore[arg-type]
