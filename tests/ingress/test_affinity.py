"""Affinity: the table of holders, and where a conversation goes that is not in it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_ingress.affinity import Affinity, Holder, patience_s, weight_of
from llm_ingress.conversation import Conversation

TTL_S = 100.0
HERE, THERE = Holder("i1", 500), Holder("i2", 700)
keys = st.sampled_from("abcdef")


def key(name: str) -> Conversation:
    return Conversation.of_key(name)


def table(*, per_tenant: int = 100, in_all: int = 1000) -> Affinity:
    return Affinity(ttl_s=TTL_S, per_tenant=per_tenant, in_all=in_all)


def favourite(anchor: str, workers: list[str]) -> str:
    return max(workers, key=lambda worker: weight_of(key(anchor).anchor, worker))


def test_the_longest_known_beginning_says_who_holds_a_conversation() -> None:
    made = table()
    said = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")]
    turns = [Conversation.of_messages(said[:n]) for n in (1, 3, 5)]
    assert made.holder_of("t", turns[1], 0.0) is None
    made.note("t", turns[0], HERE, 0.0)
    assert made.holder_of("t", turns[2], 1.0) == HERE
    made.note("t", turns[1], THERE, 2.0)
    assert made.holder_of("t", turns[2], 3.0) == THERE
    # The first answer given once more: what it goes on with is still known.
    assert made.holder_of("t", Conversation.of_messages([*said[:1], ("user", "else")]), 3.0) == HERE


def test_a_key_belongs_to_one_tenant() -> None:
    made = table()
    made.note("t", key("s-1"), HERE, 0.0)
    assert made.holder_of("t", key("s-1"), 0.0) == HERE
    assert made.holder_of("another", key("s-1"), 0.0) is None
    assert made.holder_of("t", key("s-12"), 0.0) is None


def test_what_is_not_used_expires_and_what_is_noted_again_does_not() -> None:
    made = table()
    for name in ("old", "used"):
        made.note("t", key(name), HERE, 0.0)
    made.note("t", key("used"), THERE, TTL_S / 2)
    assert made.holder_of("t", key("old"), TTL_S) is None
    assert made.holder_of("t", key("used"), TTL_S) == THERE
    made.note("another", key("new"), HERE, 2 * TTL_S)
    assert len(made) == 1


def test_a_tenant_forgets_its_own_oldest_first_and_nobody_elses() -> None:
    made = table(per_tenant=2)
    made.note("quiet", key("a"), HERE, 0.0)
    for n in range(10):
        made.note("loud", key(f"{n}"), HERE, 1.0)
    assert made.holder_of("quiet", key("a"), 1.0) == HERE
    assert [n for n in range(10) if made.holder_of("loud", key(f"{n}"), 1.0)] == [8, 9]


def test_what_is_forgotten_is_known_no_more() -> None:
    made = table()
    made.note("t", key("a"), HERE, 0.0)
    made.forget("t", key("b"))
    made.forget("nobody", key("a"))
    assert len(made) == 1
    made.forget("t", key("a"))
    assert made.holder_of("t", key("a"), 0.0) is None
    assert len(made) == 0


@given(st.lists(st.tuples(keys, keys, st.integers(0, 30)), max_size=60))
def test_the_table_is_bounded_and_remembers_the_last_of_what_it_has(
    noted: list[tuple[str, str, int]],
) -> None:
    made, now = table(per_tenant=3, in_all=5), 0.0
    last: dict[tuple[str, str], tuple[float, Holder]] = {}
    for tenant, name, passed_s in noted:
        now += passed_s
        made.note(tenant, key(name), Holder("i", len(last)), now)
        last[tenant, name] = now, Holder("i", len(last))
        assert len(made) <= 5
        assert made.holder_of(tenant, key(name), now) == last[tenant, name][1]
    known = {of: made.holder_of(of[0], key(of[1]), now) for of in last}
    assert sum(holder is not None for holder in known.values()) <= len(made)
    for of, holder in known.items():
        assert holder is None or (holder == last[of][1] and now - last[of][0] < TTL_S)


def test_ingresses_agree_and_a_worker_that_leaves_takes_along_only_its_own() -> None:
    workers = ["gpu-1", "gpu-2", "gpu-3"]
    before = {f"c{n}": favourite(f"c{n}", workers) for n in range(300)}
    assert before == {name: favourite(name, workers[::-1]) for name in before}
    assert all(70 <= n <= 130 for n in Counter(before.values()).values()), Counter(before.values())
    after = {name: favourite(name, workers[:2]) for name in before}
    moved = {before[name] for name in before if before[name] != after[name]}
    assert moved == {"gpu-3"}


@pytest.mark.parametrize(
    ("n_tokens", "rate", "wait_s"),
    [(500, 1000.0, 0.5), (5000, 1000.0, 2.0), (0, 1000.0, 0.0), (500, 0.0, 2.0), (0, 0.0, 0.0)],
)
def test_a_holder_is_waited_for_as_long_as_computing_anew_would_take(
    n_tokens: int, rate: float, wait_s: float
) -> None:
    assert patience_s(n_tokens, rate, 2.0) == wait_s
