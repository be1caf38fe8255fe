"""Leases: credit against grants, fencing, and the end of a silent worker's lease."""

import pytest

from llm_ingress.errors import ProtocolFault
from llm_ingress.lanes import Lane, LaneRequest
from llm_ingress.leases import Leases, WorkerView
from llm_ingress.wire import Hello
from tests.ingress.scripted_ring import NoLink, card

REQUEST = LaneRequest(path="/p", body=b"{}", model="m", request_id="r", tenant="t")


def attach(leases: Leases, now: float = 0.0) -> WorkerView:
    hello = Hello(worker="w", instance_id="i", model=card(), max_inflight=4)
    return leases.attach(hello, NoLink(), now)


def new_leases() -> Leases:
    return Leases(timeout_s=5.0, interval_s=1.0)


def lane(lane_id: int) -> Lane:
    return Lane(id=lane_id, request=REQUEST, model="m", on_change=lambda: None, opened_at=0.0)


def test_credit_is_what_was_offered_less_the_grants_not_yet_seen() -> None:
    leases = new_leases()
    worker = attach(leases)
    worker.offer(3, seen=0)
    leases.claim(worker, lane(1), 0.0)
    leases.claim(worker, lane(2), 0.0)
    assert worker.credit == 1
    worker.offer(3, seen=1)  # written when only the first grant had arrived
    assert worker.credit == 2
    worker.offer(3, seen=2)
    assert worker.credit == 3


def test_credit_is_never_negative() -> None:
    leases = new_leases()
    worker = attach(leases)
    worker.offer(2, seen=0)
    leases.claim(worker, lane(1), 0.0)
    leases.claim(worker, lane(2), 0.0)
    worker.offer(0, seen=0)
    assert worker.credit == 0


@pytest.mark.parametrize(("n", "seen"), [(-1, 0), (1, 1)])
def test_an_offer_below_zero_or_beyond_what_was_granted_is_the_workers_fault(n: int, seen: int) -> None:
    worker = attach(new_leases())
    with pytest.raises(ProtocolFault):
        worker.offer(n, seen)


def test_a_worker_holds_a_lane_under_its_newest_claim_only() -> None:
    leases = new_leases()
    worker = attach(leases)
    worker.offer(2, seen=0)
    held = lane(7)
    old = leases.claim(worker, held, 0.0)
    assert worker.holds(old) is held
    held.wait_again(1.0)
    leases.release(held)
    assert worker.holds(old) is None
    assert leases.holder_of(held) is None
    new = leases.claim(worker, held, 1.0)
    assert worker.holds(old) is None
    assert worker.holds(new) is held


def test_releasing_a_lane_nobody_holds_is_a_bug_and_raises() -> None:
    with pytest.raises(KeyError):
        new_leases().release(lane(1))


def test_a_lease_ends_after_the_timeout_and_not_before() -> None:
    leases = new_leases()
    worker = attach(leases, now=0.0)
    for now in (0.5, 1.5, 2.5, 3.5, 4.5, 5.0):
        assert leases.expire(now) == []
    assert leases.expire(5.1) == [worker]
    assert not worker.is_live
    assert leases.expire(5.2) == []


def test_a_scan_that_ran_late_grants_one_interval_more() -> None:
    leases = new_leases()
    worker = attach(leases, now=0.0)
    assert leases.expire(0.5) == []
    assert leases.expire(20.0) == []  # this process was starved itself: the frames may lie unread
    assert leases.expire(20.9) == []
    assert leases.expire(21.0) == [worker]


def test_a_worker_heard_in_the_grace_of_a_late_scan_keeps_its_lease() -> None:
    leases = new_leases()
    worker = attach(leases, now=0.0)
    leases.expire(0.5)
    leases.expire(20.0)
    worker.heard_at = 20.1
    assert leases.expire(21.0) == []
    assert worker.is_live
