"""Lanes: the table of states, the two buffers, and the pool's places."""

import pytest

from llm_ingress.errors import IllegalMove
from llm_ingress.lanes import (
    NEXT,
    TERMINAL,
    Lane,
    LanePool,
    LaneRequest,
    LaneState,
    Outcome,
    OutcomeReason,
)
from llm_ingress.records import RecordKind, Tally, pack_record

START = pack_record(RecordKind.START, 0, b'{"n_prompt":5}')
REQUEST = LaneRequest(path="/p", body=b"{}", model="m", request_id="r", tenant="t")
LEFT = Outcome(state=LaneState.CANCELLED, reason=OutcomeReason.CLIENT_LEFT)
EXPIRED = Outcome(state=LaneState.EXPIRED, reason=OutcomeReason.QUEUE_TIMEOUT)


def open_lane(pool: LanePool | None = None) -> Lane:
    return (pool or LanePool(8)).open(REQUEST, model="m", on_change=lambda: None, now=100.0)


def token(number: int) -> bytes:
    """The progress of one token."""
    return pack_record(RecordKind.TOKENS, 0, number.to_bytes(4, "little"))


@pytest.mark.parametrize("state", LaneState)
@pytest.mark.parametrize("target", LaneState)
def test_a_move_follows_the_table_or_raises_and_changes_nothing(state: LaneState, target: LaneState) -> None:
    lane = open_lane()
    lane.state = state
    if target in NEXT[state]:
        lane.move(target)
        assert lane.state is target
    else:
        with pytest.raises(IllegalMove, match=f"is {state} and cannot become {target}"):
            lane.move(target)
        assert lane.state is state


def test_the_four_terminal_states_lead_nowhere_and_every_other_state_can_be_cancelled_or_fail() -> None:
    assert set(TERMINAL) == {LaneState.DONE, LaneState.CANCELLED, LaneState.EXPIRED, LaneState.FAILED}
    for state in set(LaneState) - TERMINAL:
        assert {LaneState.CANCELLED, LaneState.FAILED} <= NEXT[state]


def test_a_lane_gives_its_place_back_exactly_once() -> None:
    pool = LanePool(1)
    lane = open_lane(pool)
    assert pool.is_full
    pool.end(lane, LEFT)
    assert pool.n_open == 0
    open_lane(pool)
    for again in (LEFT, EXPIRED):
        with pytest.raises(IllegalMove):
            pool.end(lane, again)
    assert pool.is_full
    assert lane.outcome is LEFT
    assert pool.n_by_state()[LaneState.CANCELLED] == 1


def test_a_pool_knows_how_many_places_each_tenant_has() -> None:
    pool = LanePool(8)
    lanes = [open_lane(pool) for _ in range(3)]
    assert pool.shares.of("t") == 3
    pool.end(lanes[1], LEFT)
    assert pool.shares.of("t") == 2


def test_every_open_lane_is_visited_once_a_round_and_none_that_has_ended() -> None:
    pool = LanePool(8)
    lanes = [open_lane(pool) for _ in range(5)]
    assert pool.visit(2) == lanes[:2]
    pool.end(lanes[2], LEFT)
    late = open_lane(pool)
    assert pool.visit(2) == [lanes[3]]
    assert pool.visit(2) == [lanes[4]]
    assert pool.visit(8) == [lanes[0], lanes[1], lanes[3], lanes[4], late]
    assert pool.visit(5) == [lanes[0], lanes[1], lanes[3], lanes[4], late]


def test_an_empty_pool_has_nobody_to_visit() -> None:
    assert LanePool(1).visit(8) == []


def test_an_end_the_state_does_not_allow_changes_nothing() -> None:
    pool = LanePool(2)
    lane = open_lane(pool)
    lane.claim_for("f", 100.0)
    lane.append(b"", b"progress", 100.0)
    with pytest.raises(IllegalMove):
        pool.end(lane, EXPIRED)
    assert (lane.state, lane.outcome, pool.n_open) == (LaneState.CLAIMED, None, 1)
    assert bytes(lane.progress) == b"progress"


def test_an_ended_lane_keeps_what_the_client_may_still_read_and_no_progress() -> None:
    pool = LanePool(1)
    lane = open_lane(pool)
    lane.append(b"text", b"progress", 100.0)
    pool.end(lane, LEFT)
    assert not lane.progress
    assert lane.take() == b"text"


def test_the_pool_counts_each_lane_in_one_state() -> None:
    pool = LanePool(8)
    lanes = [open_lane(pool) for _ in range(4)]
    lanes[0].claim_for("f", 100.0)
    pool.end(lanes[1], LEFT)
    pool.end(lanes[2], EXPIRED)
    counts = {state: n for state, n in pool.n_by_state().items() if n}
    assert counts == {
        LaneState.WAITING: 1,
        LaneState.CLAIMED: 1,
        LaneState.CANCELLED: 1,
        LaneState.EXPIRED: 1,
    }
    assert sum(counts.values()) == pool.n_accepted


def test_taking_returns_every_byte_once_in_order() -> None:
    lane = open_lane()
    lane.append(b"one ", b"", 100.0)
    assert lane.take() == b"one "
    lane.append(b"two ", b"", 100.0)
    lane.append(b"three", b"", 100.0)
    assert lane.unread == len(b"two three")
    assert lane.take() == b"two three"
    assert (lane.take(), lane.unread) == (b"", 0)


def test_a_lane_can_continue_unless_the_client_has_bytes_nobody_could_go_on_from() -> None:
    lane = open_lane()
    assert lane.can_continue
    lane.append(b"", b"p", 100.0)
    assert lane.can_continue
    lane.append(b"text", b"q", 100.0)
    assert lane.can_continue
    lane.give_up_progress()
    assert not lane.can_continue


def test_progress_given_up_keeps_no_tail_until_the_next_claim_starts_anew() -> None:
    lane = open_lane()
    lane.claim_for("f", 100.0)
    lane.append(b"", b"beginning", 100.0)
    lane.give_up_progress()
    lane.append(b"", b"tail", 100.0)
    assert not lane.progress
    lane.wait_again(101.0)
    lane.claim_for("f", 101.0)
    lane.append(b"", b"anew", 100.0)
    assert bytes(lane.progress) == b"anew"


def test_waiting_time_adds_up_over_claims_and_leaves_out_the_time_held() -> None:
    lane = open_lane()
    lane.claim_for("f", 103.0)
    assert lane.waited_s(150.0) == 3.0
    lane.wait_again(150.0)
    assert lane.waited_s(152.0) == 5.0


def test_the_stall_clock_adds_up_over_pauses() -> None:
    lane = open_lane()
    lane.pause(100.0)
    lane.resume(102.0)
    assert lane.paused_s(110.0) == 2.0
    lane.pause(110.0)
    assert lane.paused_s(111.5) == 3.5


def test_every_claim_has_a_higher_fencing_number() -> None:
    lane = open_lane()
    first = lane.claim_for("f", 100.0)
    lane.wait_again(101.0)
    second = lane.claim_for("f", 102.0)
    assert first.lane_id == second.lane_id
    assert second.claim == first.claim + 1


def test_what_was_generated_is_counted_when_a_lane_ends_without_an_end() -> None:
    pool = LanePool(1)
    lane = open_lane(pool)
    lane.append(b"", START, 100.0)
    lane.append(b"a", token(1), 101.0)
    lane.append(b"b", token(2), 102.0)
    pool.end(lane, LEFT)
    assert (lane.tally, lane.first_token_at) == (Tally(5, 2), 101.0)


def test_progress_given_up_is_counted_all_the_same() -> None:
    pool = LanePool(1)
    lane = open_lane(pool)
    lane.append(b"", START + token(1), 100.0)
    lane.give_up_progress()
    lane.append(b"", token(2), 101.0)
    pool.end(lane, LEFT)
    assert lane.tally == Tally(5, 2)


def test_what_is_done_anew_is_counted_once() -> None:
    pool = LanePool(1)
    lane = open_lane(pool)
    lane.claim_for("f", 100.0)
    lane.append(b"", START + token(1), 100.0)
    lane.give_up_progress()
    lane.wait_again(101.0)
    lane.claim_for("f", 101.0)
    lane.append(b"", START + token(1), 102.0)
    pool.end(lane, LEFT)
    assert lane.tally == Tally(5, 1)


def test_a_lane_without_a_token_has_none() -> None:
    pool = LanePool(1)
    lane = open_lane(pool)
    lane.append(b"", START, 100.0)
    pool.end(lane, LEFT)
    assert (lane.tally, lane.first_token_at) == (Tally(5, 0), None)
