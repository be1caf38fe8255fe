"""Placement: conversations go back to who holds them, and lanes wait, or are refused, within the budgets."""

from dataclasses import replace
from typing import Any

import pytest

from llm_ingress.conversation import Conversation
from llm_ingress.errors import RefusalReason, Refused
from llm_ingress.gateway import AtCap, Budgets, GatewayConfig, LaneState, OutcomeReason
from llm_ingress.limits import MIB
from llm_ingress.wire import End, FinishReason
from tests.ingress.scripted_ring import Client, ScriptedRing, ScriptedWorker, card

END = End(finish_reason=FinishReason.STOP, n_prompt=900, n_completion=100)
RATE = 1000.0  # prompt tokens a second: what END stands for is worth one second
ROOMY = Budgets()


def config(*, at_cap: AtCap | None = None, **budgets: Any) -> GatewayConfig:
    return GatewayConfig(budgets=replace(ROOMY, **budgets), at_cap=at_cap)


def key(name: str) -> Conversation:
    return Conversation.of_key(name)


def session(name: str) -> Conversation:
    return Conversation.of_key(name, session=name)


def pair(ring: ScriptedRing, n: int = 4) -> tuple[ScriptedWorker, ScriptedWorker]:
    """Two workers that offer `n` lanes each."""
    workers = [ring.worker(name=name, identity=name, instance=f"{name}-1", max_inflight=n) for name in "ab"]
    for worker in workers:
        worker.prompt_tokens_per_second = RATE
        worker.beat()
        worker.offer(n)
    return workers[0], workers[1]


def holder_of(client: Client, *workers: ScriptedWorker) -> ScriptedWorker:
    """The worker that holds a client's lane."""
    (holder,) = (worker for worker in workers if client.lane.ref in worker.held)
    return holder


def waits(client: Client) -> bool:
    """Whether no worker has been granted a client's lane yet."""
    assert client.lane.state in (LaneState.WAITING, LaneState.CLAIMED)
    return client.lane.state is LaneState.WAITING


def answer(worker: ScriptedWorker, client: Client, end: End = END) -> None:
    ref = client.lane.ref
    worker.head(ref=ref)
    worker.end(end, ref=ref)


def converse(
    ring: ScriptedRing, conversation: Conversation, *workers: ScriptedWorker, end: End = END
) -> ScriptedWorker:
    """Have one turn answered; return by whom. It then has room for as many as before."""
    client = ring.client(conversation=conversation)
    holder = holder_of(client, *workers)
    answer(holder, client, end)
    holder.offer(holder.hello.max_inflight - len(holder.held))
    return holder


def other(than: ScriptedWorker, *workers: ScriptedWorker) -> ScriptedWorker:
    (one,) = (worker for worker in workers if worker is not than)
    return one


# -- affinity --


def test_every_turn_goes_to_the_worker_that_has_the_conversation() -> None:
    ring = ScriptedRing()
    workers = pair(ring)
    first = {f"c{n}": converse(ring, key(f"c{n}"), *workers) for n in range(20)}
    assert set(first.values()) == set(workers)
    for _ in range(3):
        assert {name: converse(ring, key(name), *workers) for name in first} == first
    facts = ring.gateway.snapshot().affinity
    assert (facts.known, facts.had_room, facts.returned_at_once, facts.returned) == (60, 60, 60, 60)
    assert facts.entries == 20


def test_a_conversation_stays_where_it_went_though_another_is_its_favourite() -> None:
    ring = ScriptedRing()
    workers = pair(ring)
    favourite = converse(ring, key("k"), *workers)
    ring.gateway.forget("t", key("k"))
    away = other(favourite, *workers)
    favourite.offer(0)
    assert converse(ring, key("k"), *workers) is away
    favourite.offer(4)
    assert converse(ring, key("k"), *workers) is away


def test_it_waits_for_its_holder_as_long_as_computing_it_anew_would_take_then_goes_anywhere() -> None:
    ring = ScriptedRing()
    workers = pair(ring)
    holder = converse(ring, key("k"), *workers)
    away = other(holder, *workers)
    holder.offer(0)
    client = ring.client(conversation=key("k"))
    behind = ring.client()
    assert holder_of(behind, *workers) is away
    ring.wait(0.5, *workers)
    assert waits(client)
    ring.wait(0.5, *workers)
    assert holder_of(client, *workers) is away


def test_it_goes_to_its_holder_the_moment_that_has_room() -> None:
    ring = ScriptedRing()
    workers = pair(ring)
    holder = converse(ring, key("k"), *workers)
    holder.offer(0)
    client = ring.client(conversation=key("k"))
    ring.wait(0.5, *workers)
    holder.offer(1)
    assert holder_of(client, *workers) is holder
    facts = ring.gateway.snapshot().affinity
    assert (facts.known, facts.had_room, facts.returned_at_once, facts.returned) == (1, 0, 0, 1)


def test_it_waits_two_seconds_at_most() -> None:
    ring = ScriptedRing()
    workers = pair(ring)
    long = replace(END, n_prompt=100_000)
    holder = converse(ring, key("k"), *workers, end=long)
    holder.offer(0)
    client = ring.client(conversation=key("k"))
    ring.wait(1.5, *workers)
    assert waits(client)
    ring.wait(0.5, *workers)
    assert holder_of(client, *workers) is other(holder, *workers)


@pytest.mark.parametrize("loss", ["drains", "is stuck", "is silent", "is gone"])
def test_whose_holder_is_not_to_be_counted_on_goes_anywhere_at_once(loss: str) -> None:
    ring = ScriptedRing()
    workers = pair(ring)
    holder = converse(ring, key("k"), *workers)
    away = other(holder, *workers)
    holder.offer(0)
    client = ring.client(conversation=key("k"))
    assert waits(client)
    match loss:
        case "drains":
            holder.drain_itself()
        case "is stuck":
            holder.step_age_s = 1000.0
            holder.beat()
        case "is gone":
            holder.die()
        case "is silent":
            ring.clock.now += 5.5  # the scan before was just now, so this one grants an interval more
            away.beat()
            ring.gateway.tick()
            ring.clock.now += 1.0
            away.beat()
            ring.gateway.tick()
    assert holder_of(client, *workers) is away
    assert converse(ring, key("k"), *workers) is away


def test_a_process_started_again_under_the_same_name_has_nothing_and_is_not_waited_for() -> None:
    ring = ScriptedRing()
    workers = pair(ring)
    holder = converse(ring, key("k"), *workers)
    holder.die()
    again = ring.worker(name=holder.hello.worker, identity=holder.identity, instance="another")
    client = ring.client(conversation=key("k"))
    assert holder_of(client, again, *workers) is other(holder, *workers)


def test_a_refused_request_leaves_no_conversation_behind() -> None:
    ring = ScriptedRing()
    workers = pair(ring)
    refused = End(finish_reason=FinishReason.REFUSED)
    converse(ring, session("s"), *workers, end=refused)
    assert ring.gateway.snapshot().affinity.entries == 0
    assert ring.gateway.snapshot().budgets.sessions == 0
    converse(ring, session("s"), *workers)
    converse(ring, session("s"), *workers, end=refused)
    assert ring.gateway.snapshot().budgets.sessions == 1


def test_a_key_is_another_conversation_for_another_tenant_and_another_model() -> None:
    ring = ScriptedRing()
    workers = pair(ring)
    converse(ring, key("k"), *workers)
    ring.client(conversation=key("k"), tenant="another")
    third = ring.worker(1, name="c", model=card("m2"))
    client = ring.client("m2", conversation=key("k"))
    assert holder_of(client, third) is third
    assert ring.gateway.snapshot().affinity.known == 0


def test_two_ingresses_send_a_conversation_to_the_same_worker() -> None:
    rings = [ScriptedRing(), ScriptedRing()]
    both = [pair(ring) for ring in rings]
    for n in range(30):
        chosen = [
            converse(ring, key(f"c{n}"), *workers).hello.worker
            for ring, workers in zip(rings, both, strict=True)
        ]
        assert chosen[0] == chosen[1]


def test_a_hundred_equal_requests_are_shared_by_equal_workers() -> None:
    ring = ScriptedRing()
    workers = pair(ring)
    said = Conversation.of_messages([("system", "s" * 2000), ("user", "Hello")])
    clients = [ring.client(conversation=said) for _ in range(8)]
    for _ in range(92):
        client = clients.pop(0)
        worker = holder_of(client, *workers)
        answer(worker, client)
        worker.offer(4 - len(worker.held))
        clients.append(ring.client(conversation=said))
    assert sum(len(worker.grants) for worker in workers) == 100
    assert all(40 <= len(worker.grants) <= 60 for worker in workers)


# -- budgets --


def test_over_the_decodes_in_all_lanes_wait_and_go_on_with_whoever_has_room() -> None:
    ring = ScriptedRing(config(max_in_flight_decodes=2))
    workers = pair(ring)
    clients = [ring.client() for _ in range(3)]
    assert [client.lane.state for client in clients] == [*[LaneState.CLAIMED] * 2, LaneState.WAITING]
    assert ring.gateway.snapshot().budgets.in_flight_decodes == 2
    clients[0].leave()
    assert clients[2].lane.state is LaneState.CLAIMED
    for client in clients[1:]:
        answer(holder_of(client, *workers), client)
    assert ring.gateway.snapshot().budgets.in_flight_decodes == 0


def test_a_lane_that_comes_back_is_placed_again_before_others_that_wait_for_a_decode() -> None:
    ring = ScriptedRing(config(max_in_flight_decodes=1))
    workers = pair(ring)
    first, second = ring.client(), ring.client()
    holder = holder_of(first, *workers)
    holder.die()
    assert holder_of(first, *workers) is other(holder, *workers)
    assert waits(second)


def test_over_the_decodes_of_a_worker_another_is_chosen() -> None:
    ring = ScriptedRing(config(max_in_flight_decodes_per_worker=1))
    workers = pair(ring)
    for _ in range(3):
        ring.client()
    assert [len(worker.held) for worker in workers] == [1, 1]


def test_kv_over_its_budget_is_waited_for() -> None:
    ring = ScriptedRing(config(max_kv_mib=100, max_kv_mib_per_worker=60))
    first, second = pair(ring)
    first.kv_promised_bytes = 60 * MIB
    first.beat()
    assert holder_of(ring.client(), first, second) is second
    second.kv_promised_bytes = 40 * MIB
    second.beat()
    client = ring.client()
    assert waits(client)
    first.kv_promised_bytes = 0
    first.beat()
    assert not waits(client)
    assert ring.gateway.snapshot().budgets.kv_promised_bytes == 40 * MIB


def test_a_new_session_waits_until_another_expires_and_what_is_none_goes_on() -> None:
    ring = ScriptedRing(config(max_sessions=1, session_ttl_s=20.0))
    workers = pair(ring)
    converse(ring, session("a"), *workers)
    new = ring.client(conversation=session("b"))
    assert waits(new)
    for conversation in (session("a"), key("b"), None):
        assert not waits(ring.client(conversation=conversation))
    ring.wait(19.5, *workers)
    assert waits(new)
    ring.wait(0.5, *workers)
    assert not waits(new)


def test_a_session_that_is_forgotten_makes_room_for_another() -> None:
    ring = ScriptedRing(config(max_sessions=1, at_cap=AtCap.REFUSE))
    workers = pair(ring)
    converse(ring, session("a"), *workers)
    ring.gateway.forget("t", session("a"))
    assert not waits(ring.client(conversation=session("b")))


def test_what_waited_too_long_for_a_budget_is_refused_as_any_other() -> None:
    ring = ScriptedRing(config(max_in_flight_decodes=1))
    workers = pair(ring)
    ring.client()
    client = ring.client()
    ring.wait(60, *workers)
    assert client.lane.outcome is not None
    assert client.lane.outcome.reason is OutcomeReason.QUEUE_TIMEOUT


def refused(ring: ScriptedRing, conversation: Conversation | None = None) -> RefusalReason:
    with pytest.raises(Refused) as refusal:
        ring.client(conversation=conversation, at_cap=AtCap.REFUSE)
    assert refusal.value.retry_after_s >= 2
    assert refusal.value.message
    return refusal.value.reason


def test_who_does_not_wait_is_refused_at_once_with_the_budget_that_is_spent() -> None:
    ring = ScriptedRing(config(max_in_flight_decodes=8, max_sessions=2, max_kv_mib=100))
    workers = pair(ring)
    for name in "ab":
        converse(ring, session(name), *workers)
    assert refused(ring, session("c")) is RefusalReason.SYSTEM_SESSIONS_FULL
    workers[0].kv_promised_bytes = 100 * MIB
    workers[0].beat()
    assert refused(ring, session("a")) is RefusalReason.SYSTEM_KV_CACHE_FULL
    workers[0].kv_promised_bytes = 0
    workers[0].beat()
    for _ in range(8):
        ring.client(at_cap=AtCap.REFUSE)
    assert refused(ring, session("a")) is RefusalReason.SYSTEM_IN_FLIGHT_DECODE_FULL
    assert ring.gateway.snapshot().open == 8


def test_who_does_not_wait_is_refused_where_every_worker_is_busy_or_at_capacity_or_gone() -> None:
    ring = ScriptedRing(config(max_sessions_per_worker=1, session_ttl_s=10_000.0))
    workers = pair(ring, 1)
    name = next(n for n in map(str, range(100)) if converse(ring, session(n), *workers) is not workers[0])
    while ring.gateway.snapshot().budgets.sessions < 2:
        name = f"{name}x"
        converse(ring, session(name), *workers)
    assert refused(ring, session("new")) is RefusalReason.ALL_WORKERS_AT_CAPACITY
    for _ in workers:
        ring.client()
    assert refused(ring, session(name)) is RefusalReason.WORKER_IN_FLIGHT_DECODE_FULL
    assert refused(ring) is RefusalReason.ALL_WORKERS_DECODE_BUSY
    for worker in workers:
        worker.drain_itself()
    assert refused(ring) is RefusalReason.NO_WORKERS


@pytest.mark.parametrize("at_cap", AtCap)
def test_the_operator_may_say_what_becomes_of_all(at_cap: AtCap) -> None:
    ring = ScriptedRing(config(max_in_flight_decodes=1, at_cap=at_cap))
    pair(ring)
    ring.client()
    for asked in AtCap:
        if at_cap is AtCap.PARK:
            assert waits(ring.client(at_cap=asked))
        else:
            with pytest.raises(Refused):
                ring.client(at_cap=asked)
