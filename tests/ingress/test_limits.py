"""Budgets: the sums are those of what there is, and each reason is given for what it names."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_ingress.errors import ConfigError, RefusalReason
from llm_ingress.lanes import Lane, LaneRequest
from llm_ingress.leases import WorkerView
from llm_ingress.limits import MIB, Budgets, Limits, Session
from llm_ingress.wire import Hello
from tests.ingress.scripted_ring import NoLink, card
from tests.ring_network import HEARTBEAT

ROOMY = Budgets()
NEW = Session("t", b"new")


@dataclass(eq=False)
class World:
    """Workers whose state the test sets, and the limits that are told."""

    budgets: Budgets
    workers: list[WorkerView] = field(default_factory=list)
    limits: Limits = field(init=False)

    def __post_init__(self) -> None:
        self.limits = Limits(self.budgets)

    def worker(self, *, held: int = 0, kv_mib: int = 0, slots: int = 4, model: str = "m") -> WorkerView:
        number = len(self.workers) + 1
        hello = Hello(worker=f"w{number}", instance_id=f"i{number}", model=card(model), max_inflight=slots)
        view = WorkerView(id=number, hello=hello, link=NoLink(), heard_at=0.0)
        self.workers.append(view)
        self.set(view, held=held, kv_mib=kv_mib)
        return view

    def set(self, worker: WorkerView, *, held: int, kv_mib: int) -> None:
        worker.heartbeat = replace(HEARTBEAT, kv_promised_bytes=kv_mib * MIB)
        worker.held.clear()
        worker.held.update({n: lane(n) for n in range(held)})
        self.limits.observe(worker)

    def use(self, name: bytes, worker: WorkerView, now: float = 0.0) -> None:
        self.limits.sessions.use(Session("t", name), worker.name, now)
        self.limits.observe(worker)

    def spent(self, session: Session | None = None, *, is_known: bool = False) -> RefusalReason | None:
        return self.limits.spent("m", session, is_known=is_known)


def lane(number: int) -> Lane:
    request = LaneRequest(path="/p", body=b"{}", model="m", request_id="r", tenant="t")
    return Lane(id=number, request=request, model="m", on_change=lambda: None, opened_at=0.0)


def test_a_worker_with_room_is_enough() -> None:
    world = World(ROOMY)
    world.worker(held=4)
    world.worker(held=3)
    assert world.spent() is world.spent(NEW) is None


@pytest.mark.parametrize("is_known", [True, False])
def test_with_every_slot_taken_it_is_the_workers_that_are_busy(is_known: bool) -> None:
    world = World(ROOMY)
    world.worker(held=4)
    world.worker(held=2, slots=2)
    reason = RefusalReason.WORKER_IN_FLIGHT_DECODE_FULL if is_known else RefusalReason.ALL_WORKERS_DECODE_BUSY
    assert world.spent(is_known=is_known) is reason


def test_a_worker_may_be_given_fewer_than_it_has_slots() -> None:
    world = World(replace(ROOMY, max_in_flight_decodes_per_worker=2))
    worker = world.worker(held=2)
    assert world.spent() is RefusalReason.ALL_WORKERS_DECODE_BUSY
    assert not world.limits.has_room(worker)
    world.set(worker, held=1, kv_mib=0)
    assert world.limits.has_room(worker)


def test_decodes_in_all_end_before_the_slots_do() -> None:
    world = World(replace(ROOMY, max_in_flight_decodes=3))
    first, second = world.worker(held=2), world.worker(held=1)
    assert world.spent() is RefusalReason.SYSTEM_IN_FLIGHT_DECODE_FULL
    assert not any(world.limits.has_room(worker) for worker in (first, second))
    world.limits.forget(second)
    assert world.spent() is None
    assert world.limits.has_room(first)


def test_kv_of_one_worker_and_in_all() -> None:
    world = World(replace(ROOMY, max_kv_mib=30, max_kv_mib_per_worker=20))
    full, roomy = world.worker(kv_mib=20), world.worker(kv_mib=9)
    assert (world.limits.has_room(full), world.limits.has_room(roomy)) == (False, True)
    assert world.spent() is None
    world.set(roomy, held=0, kv_mib=10)
    assert world.spent() is RefusalReason.SYSTEM_KV_CACHE_FULL
    assert not world.limits.has_room(roomy)
    world.limits.forget(roomy)
    assert world.spent() is RefusalReason.ALL_WORKERS_AT_CAPACITY


def test_a_silent_worker_takes_nothing_and_one_that_is_unable_counts_for_nobody() -> None:
    world = World(replace(ROOMY, max_kv_mib=10))
    worker = world.worker(kv_mib=10)
    assert world.spent() is RefusalReason.SYSTEM_KV_CACHE_FULL
    worker.is_live = False
    world.limits.observe(worker)
    assert world.spent() is RefusalReason.NO_WORKERS
    assert world.limits.facts.kv_promised_bytes == 0
    assert World(ROOMY).spent() is RefusalReason.NO_WORKERS


def test_sessions_are_counted_of_one_worker_and_in_all_and_old_ones_stay_welcome() -> None:
    world = World(replace(ROOMY, max_sessions=3, max_sessions_per_worker=2))
    first, second = world.worker(), world.worker()
    world.use(b"a", first)
    world.use(b"b", first)
    assert not world.limits.admits(first, NEW)
    assert world.limits.admits(first, None)
    assert world.limits.admits(first, Session("t", b"a"))
    assert world.limits.admits(second, NEW)
    assert world.spent(NEW) is None
    world.use(b"c", second)
    assert world.spent(NEW) is RefusalReason.SYSTEM_SESSIONS_FULL
    assert world.spent(Session("t", b"a")) is world.spent() is None
    # The same name of another tenant is another session.
    assert world.spent(Session("another", b"a")) is RefusalReason.SYSTEM_SESSIONS_FULL


def test_with_the_sessions_of_every_worker_spent_there_is_room_for_what_is_none() -> None:
    world = World(replace(ROOMY, max_sessions_per_worker=1))
    world.use(b"a", world.worker())
    assert world.spent(NEW) is RefusalReason.ALL_WORKERS_AT_CAPACITY
    assert world.spent() is None


def test_a_session_expires_moves_and_is_ended() -> None:
    world = World(replace(ROOMY, max_sessions_per_worker=1, session_ttl_s=100.0))
    first, second = world.worker(), world.worker()
    sessions = world.limits.sessions
    world.use(b"a", first)
    world.use(b"a", second, now=50.0)
    assert (sessions.of_worker("w1"), sessions.of_worker("w2"), len(sessions)) == (0, 1, 1)
    sessions.expire(149.0)
    assert len(sessions) == 1
    sessions.expire(150.0)
    assert (sessions.of_worker("w2"), len(sessions)) == (0, 0)
    world.use(b"b", first)
    sessions.end(Session("t", b"b"))
    sessions.end(Session("t", b"b"))
    assert (sessions.of_worker("w1"), len(sessions)) == (0, 0)


def test_another_models_room_is_of_no_use() -> None:
    world = World(ROOMY)
    world.worker(held=4)
    world.worker(model="another")
    assert world.spent() is RefusalReason.ALL_WORKERS_DECODE_BUSY


changes = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["set", "forget", "drain", "live"]),
    st.integers(0, 6),
    st.integers(0, 30),
)


@given(st.lists(changes, max_size=40))
def test_whatever_happens_the_sums_are_those_of_the_workers_there_are(
    happened: list[tuple[int, str, int, int]],
) -> None:
    budgets = replace(ROOMY, max_in_flight_decodes=10, max_kv_mib=60, max_kv_mib_per_worker=20)
    world = World(budgets)
    for _ in range(4):
        world.worker()
    counted = set(world.workers)
    for n, what, held, kv_mib in happened:
        worker = world.workers[n]
        if what == "forget":
            world.limits.forget(worker)
            counted.discard(worker)
            continue
        worker.is_draining ^= what == "drain"
        worker.is_live ^= what == "live"
        world.set(worker, held=held, kv_mib=kv_mib)
        counted.add(worker)
    facts = world.limits.facts
    assert facts.in_flight_decodes == sum(len(worker.held) for worker in counted)
    live = [w.heartbeat.kv_promised_bytes for w in counted if w.heartbeat and w.is_live]
    assert facts.kv_promised_bytes == sum(live)
    room = [world.limits.has_room(worker) for worker in counted]
    assert any(room) is (world.spent() is None)
    is_spent = facts.in_flight_decodes >= 10 or facts.kv_promised_bytes >= 60 * MIB
    assert room == [
        not is_spent
        and w.is_able
        and len(w.held) < 4
        and w.heartbeat is not None
        and w.heartbeat.kv_promised_bytes < 20 * MIB
        for w in counted
    ]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_sessions", 0, "max_sessions is 0, must be at least 1"),
        ("max_in_flight_decodes_per_worker", 0, "max_in_flight_decodes_per_worker is 0, must be at least 1"),
        ("max_kv_mib", -1, "max_kv_mib is -1, must be at least 1"),
        ("session_ttl_s", 0.0, "session_ttl_s is 0.0, must be more than 0"),
    ],
)
def test_a_budget_out_of_its_range_is_named(name: str, value: float, message: str) -> None:
    budgets: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=message):
        Budgets(**budgets)
