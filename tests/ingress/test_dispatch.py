"""Dispatch: whose turn it is, and which worker gets it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_ingress.conversation import Conversation
from llm_ingress.dispatch import WAITS_MAX, Dispatch
from llm_ingress.lanes import Lane, LaneRequest, Preference
from llm_ingress.leases import WorkerView
from llm_ingress.limits import MIB, Budgets, Limits
from llm_ingress.shares import Shares
from llm_ingress.wire import Heartbeat, Hello, ModelCard
from tests.ingress.scripted_ring import NoLink, card

_ids = count(1)


def waiting(tenant: str = "t", model: str = "m") -> Lane:
    request = LaneRequest(path="/p", body=b"{}", model=model, request_id="r", tenant=tenant)
    return Lane(id=next(_ids), request=request, model=model, on_change=lambda: None, opened_at=0.0)


def with_progress(fingerprint: str) -> Lane:
    lane = waiting()
    lane.append(b"", b"tokens", 0.0)
    lane.fingerprint = fingerprint
    return lane


def worker(credit: int = 100, model: ModelCard | None = None, n_granted: int = 0) -> WorkerView:
    hello = Hello(worker="w", instance_id="i", model=model or card(), max_inflight=4)
    view = WorkerView(id=next(_ids), hello=hello, link=NoLink(), heard_at=0.0)
    view.credit, view.n_granted = credit, n_granted
    return view


def dispatch(*cards: ModelCard) -> Dispatch:
    made = Dispatch()
    for each in cards or (card(),):
        made.learn(each)
    return made


def limits(*workers: WorkerView) -> Limits:
    """No budget that is spent, for these workers."""
    made = Limits(Budgets())
    for each in workers:
        made.observe(each)
    return made


def pop_for(made: Dispatch, taker: WorkerView, now: float = 0.0) -> Lane | None:
    return made.pop_for(taker, limits(taker), now)


def choose(lane: Lane, workers: Sequence[WorkerView], now: float = 0.0) -> WorkerView | None:
    return dispatch(card()).choose(lane, workers, limits(*workers), now)


def drain(made: Dispatch, taker: WorkerView) -> list[Lane]:
    taken = []
    while (lane := pop_for(made, taker)) is not None:
        taken.append(lane)
    return taken


def test_the_catalogue_has_each_model_once_with_the_aliases_of_all_its_workers() -> None:
    cards = (
        replace(card(), name="m", aliases=("tiny", "m")),
        replace(card(), name="m", aliases=("small", "tiny")),
        replace(card(), name="n", aliases=("m", "small")),
    )
    catalogue = dispatch(*cards).catalogue(cards)
    # Of two models that share an alias, the one that came last has it; a model's own name is its own.
    assert [(each.name, each.aliases) for each in catalogue] == [("m", ("tiny",)), ("n", ("small",))]


def test_within_a_tenant_first_come_is_first_served() -> None:
    made = dispatch()
    lanes = [waiting() for _ in range(5)]
    for lane in lanes:
        made.park(lane)
    assert drain(made, worker()) == lanes


def test_tenants_take_turns_however_much_one_of_them_offers() -> None:
    made = dispatch()
    heavy = [waiting("heavy") for _ in range(10)]
    light = [waiting("light") for _ in range(2)]
    for lane in heavy + light:
        made.park(lane)
    assert drain(made, worker()) == [heavy[0], light[0], heavy[1], light[1], *heavy[2:]]


@given(st.lists(st.sampled_from("abcd"), max_size=40))
def test_a_lane_waits_at_most_one_turn_of_each_other_tenant_per_lane_ahead_of_it(tenants: list[str]) -> None:
    made = dispatch()
    lanes = [waiting(tenant) for tenant in tenants]
    for lane in lanes:
        made.park(lane)
    served = drain(made, worker())
    assert sorted(lane.id for lane in served) == [lane.id for lane in lanes]
    for position, lane in enumerate(served):
        own = [other for other in served[:position] if other.request.tenant == lane.request.tenant]
        assert own == [o for o in lanes if o.request.tenant == lane.request.tenant and o.id < lane.id]
        for tenant in set(tenants) - {lane.request.tenant}:
            ahead = sum(other.request.tenant == tenant for other in served[:position])
            assert ahead <= len(own) + 1


def shares(**n_places: int) -> Shares:
    made = Shares()
    for tenant, n in n_places.items():
        for _ in range(n):
            made.take(tenant)
    return made


def test_the_newest_lane_of_the_tenant_with_most_places_gives_way() -> None:
    made = dispatch(card("m1"), card("m2"))
    lanes = [waiting("heavy", "m1"), waiting("heavy", "m2"), waiting("medium", "m1"), waiting("heavy", "m1")]
    for lane in lanes:
        made.park(lane)
    assert made.gives_way("light", shares(heavy=3, medium=2, light=1)) is lanes[3]
    made.withdraw(lanes[3])
    assert made.gives_way("light", shares(heavy=3, medium=2, light=1)) is lanes[1]


@pytest.mark.parametrize(("n_own", "gives_way"), [(0, True), (2, True), (3, False), (4, False), (9, False)])
def test_a_lane_gives_way_only_to_a_tenant_that_has_no_more_then(n_own: int, gives_way: bool) -> None:
    made = dispatch()
    made.park(waiting("other"))
    assert (made.gives_way("own", shares(other=4, own=n_own)) is not None) is gives_way


def test_lanes_that_run_or_came_back_give_way_to_nobody_and_the_next_tenant_is_asked() -> None:
    made = dispatch()
    made.put_back(waiting("heavy"))
    assert made.gives_way("light", shares(heavy=9)) is None
    spare = waiting("medium")
    made.park(spare)
    assert made.gives_way("light", shares(heavy=9, medium=2)) is spare


def test_returned_lanes_go_before_all_fresh_ones_oldest_first() -> None:
    made = dispatch()
    older, newer = waiting(), waiting()
    fresh = waiting("another")
    made.park(fresh)
    made.put_back(newer)
    made.put_back(older)
    assert drain(made, worker()) == [older, newer, fresh]


def test_a_withdrawn_lane_is_never_granted_and_the_order_of_the_others_stays() -> None:
    made = dispatch()
    lanes = [waiting("a"), waiting("a"), waiting("b"), waiting("a")]
    back = waiting()
    for lane in lanes:
        made.park(lane)
    made.put_back(back)
    made.withdraw(lanes[0])
    made.withdraw(lanes[2])
    made.withdraw(back)
    assert drain(made, worker()) == [lanes[1], lanes[3]]
    assert not made.contended()


def test_a_lane_with_progress_goes_only_to_an_equal_fingerprint_and_blocks_nobody_else() -> None:
    made = dispatch()
    bound, fresh = with_progress("f2"), waiting()
    made.put_back(bound)
    made.park(fresh)
    assert drain(made, worker(model=card(fingerprint="f1"))) == [fresh]
    assert drain(made, worker(model=card(fingerprint="f2"))) == [bound]


def test_a_declined_lane_is_not_offered_again_before_the_next_credit() -> None:
    made = dispatch()
    lane = waiting()
    made.put_back(lane)
    decliner = worker()
    decliner.declined.add(lane.id)
    assert pop_for(made, decliner) is None
    decliner.offer(1, seen=0)
    assert pop_for(made, decliner) is lane


@pytest.mark.parametrize(("attribute", "value"), [("credit", 0), ("is_draining", True), ("is_live", False)])
def test_a_worker_without_credit_or_draining_or_silent_gets_nothing(attribute: str, value: int) -> None:
    made = dispatch()
    lane = waiting()
    made.park(lane)
    taker = worker()
    setattr(taker, attribute, value)
    assert pop_for(made, taker) is None
    assert choose(lane, [taker]) is None


def test_lanes_wait_per_model() -> None:
    made = dispatch(card("m1"), card("m2"))
    first, second = waiting(model="m1"), waiting(model="m2")
    made.park(first)
    made.park(second)
    assert drain(made, worker(model=card("m2"))) == [second]
    assert made.contended() == {"m1"}


def test_the_worker_with_most_room_is_chosen_and_of_equals_the_least_used() -> None:
    lane = waiting()
    roomy, tight = worker(credit=3), worker(credit=1)
    assert choose(lane, [tight, roomy]) is roomy
    used, unused = worker(credit=2, n_granted=5), worker(credit=2, n_granted=4)
    assert choose(lane, [used, unused]) is unused


def test_equal_workers_get_equal_shares() -> None:
    workers = [worker(credit=4), worker(credit=4)]
    for _ in range(100):
        chosen = choose(waiting(), workers)
        assert chosen is not None
        chosen.n_granted += 1  # the answer is quick: its credit is back at once
    assert [each.n_granted for each in workers] == [50, 50]


def test_a_model_is_known_by_its_name_and_aliases_for_ever() -> None:
    made = dispatch(card("m1", aliases=("chat",)))
    assert (made.name_of("m1"), made.name_of("chat"), made.name_of("m2")) == ("m1", "m1", None)


def test_a_shared_alias_follows_the_newest_model_but_a_name_is_never_anothers_alias() -> None:
    made = dispatch(card("old", aliases=("chat",)), card("new", aliases=("chat", "old")))
    assert made.name_of("chat") == "new"
    assert made.name_of("old") == "old"


# Conversations.


def of_conversation(key: str, holder: WorkerView | None = None, wait_s: float = 1.0) -> Lane:
    lane = waiting()
    lane.request = replace(lane.request, conversation=Conversation.of_key(key))
    if holder is not None:
        lane.preference = Preference(holder.id, wait_s)
    return lane


def named(name: str, *, held: int = 0, sessions: int = 0, kv_mib: int = 0, slots: int = 4) -> WorkerView:
    """A worker that holds so many lanes and keeps so much."""
    view = worker(credit=slots - held)
    view.hello = replace(view.hello, worker=name, max_inflight=slots)
    view.held.update({n: waiting() for n in range(held)})
    view.heartbeat = Heartbeat(
        inflight=held,
        decoding=held,
        max_inflight=slots,
        available_slots=slots - held,
        step_ms=1.0,
        step_age_s=0.0,
        kv_promised_tokens=0,
        tokens_per_second=0.0,
        sessions=sessions,
        kv_bytes=kv_mib * MIB,
    )
    return view


def test_a_lane_goes_to_its_holder_whoever_has_more_room() -> None:
    holder, idle = named("a", held=3, sessions=90), named("b")
    assert choose(of_conversation("k", holder), [idle, holder]) is holder


def test_a_lane_waits_for_its_holder_from_when_another_could_have_had_it_and_no_longer() -> None:
    holder, other = named("a", held=4), named("b")
    made, lane = dispatch(), of_conversation("k", holder, wait_s=1.0)
    made.park(lane)
    assert pop_for(made, holder, now=50.0) is None  # no credit: nothing is passed on
    assert pop_for(made, other, now=100.0) is None
    assert pop_for(made, other, now=100.9) is None
    assert pop_for(made, other, now=101.0) is lane
    made.park(lane)
    assert pop_for(made, other, now=200.0) is None
    holder.credit = 1
    holder.held.popitem()
    assert pop_for(made, holder, now=200.5) is lane


def test_a_lane_that_waits_for_its_holder_holds_up_nobody_behind_it() -> None:
    holder, other = named("a", held=4), named("b")
    made, lane = dispatch(), of_conversation("k", holder)
    behind = [waiting(), waiting("another"), waiting()]
    for each in (lane, *behind):
        made.park(each)
    assert drain(made, other) == [behind[0], behind[1], behind[2]]
    assert list(made.waiting()) == [lane]


def test_one_whose_wait_is_not_worth_it_or_whose_holder_is_gone_goes_anywhere_at_once() -> None:
    holder, other = named("a", held=4), named("b")
    assert choose(of_conversation("k", holder, wait_s=0.0), [holder, other]) is other
    made, lane = dispatch(), of_conversation("k", holder)
    made.park(lane)
    assert pop_for(made, other) is None
    made.let_go(lane)
    assert pop_for(made, other) is lane


def test_no_more_lanes_are_passed_over_than_may_wait_at_once() -> None:
    holder, other = named("a", held=4), worker(credit=1000)
    made = dispatch()
    lanes = [of_conversation(f"{n}", holder) for n in range(WAITS_MAX + 2)]
    for lane in lanes:
        made.park(lane)
    assert drain(made, other) == lanes[WAITS_MAX:]


def test_an_unknown_conversation_goes_to_the_same_worker_by_whatever_ingress_it_comes() -> None:
    chosen = set()
    for credit in (1, 4):
        workers = [named("a"), named("b"), named("c")]
        for each in workers:
            each.credit = credit
        for n in range(30):
            one, other = (
                choose(of_conversation(f"{n}"), workers),
                choose(of_conversation(f"{n}"), workers[::-1]),
            )
            assert one is not None
            assert one is other
            chosen.add(one.name)
    assert chosen == {"a", "b", "c"}


def test_equal_requests_do_not_all_go_to_their_favourite() -> None:
    workers = [named("a", slots=16), named("b", slots=16)]
    for _ in range(16):
        chosen = choose(of_conversation("k"), workers)
        assert chosen is not None
        chosen.held[next(_ids)] = waiting()
        chosen.credit -= 1
        n_held = sorted(len(each.held) for each in workers)
        assert n_held[1] - n_held[0] <= 2
    assert n_held in ([7, 9], [8, 8])


def test_a_worker_fuller_than_another_by_more_than_a_lane_of_its_own_is_not_the_favourite() -> None:
    small, large = named("a", held=1, slots=2), named("b", held=1, slots=16)
    lanes = [of_conversation(f"{n}") for n in range(20)]
    assert {choose(lane, [small, large]) for lane in lanes} == {small, large}
    large.held.update({next(_ids): waiting() for _ in range(9)})  # 10 of 16 beside 1 of 2
    assert {choose(lane, [small, large]) for lane in lanes} == {small}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"sessions": 10}, {"sessions": 11}),
        ({"kv_mib": 100}, {"kv_mib": 200}),
        # 0.6 x 10 % beside 0.4 x 12.5 %, and beside 0.4 x 25 %.
        ({"kv_mib": 1024}, {"sessions": 10}),
        ({"sessions": 10}, {"kv_mib": 2048}),
    ],
)
def test_ties_go_to_who_keeps_less_sessions_counting_more_than_kv(
    one: dict[str, int], other: dict[str, int]
) -> None:
    lighter, heavier = named("a", **one), named("b", **other)
    assert choose(waiting(), [heavier, lighter]) is choose(waiting(), [lighter, heavier]) is lighter
