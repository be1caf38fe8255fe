"""What is kept of conversations, for how long, and who loses what when there is too much."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_ingress.errors import ConfigError, ConversationFull, ConversationGone, NoTurn, RefusalReason
from llm_ingress.history import Conversation, ConversationKey, History, HistoryConfig
from llm_ingress.turns import LENGTH_BYTES, Does, TurnRecord

TTL_S = 100.0


def history(**bounds: int) -> History:
    return History(HistoryConfig(ttl_s=TTL_S, **bounds))


def key(name: str, tenant: str = "t") -> ConversationKey:
    return ConversationKey(tenant, name)


def record(content: bytes = b"said", does: Does = Does.FOLLOWS) -> TurnRecord:
    return TurnRecord(does=does, closing=b"", content=content)


def say(made: History, name: str, content: bytes = b"said", *, tenant: str = "t", now: float = 0.0) -> None:
    """A whole turn."""
    turn = made.begin(key(name, tenant), 0, now)
    assert made.keep(turn, record(content))
    made.end(turn, now)


def said(made: History, name: str, *, tenant: str = "t", now: float = 0.0) -> list[bytes]:
    """What a turn would find."""
    turn = made.begin(key(name, tenant), 0, now)
    records = list(turn.records)
    made.end(turn, now)
    return records


def test_turns_follow_each_other() -> None:
    made = history()
    say(made, "a", b"one")
    say(made, "a", b"two")
    assert said(made, "a") == [b"one", b"two"]
    assert made.n_bytes == 2 * (3 + LENGTH_BYTES)


def test_a_replaced_history_takes_the_place_of_all_before_it() -> None:
    made = history()
    say(made, "a", b"one")
    say(made, "a", b"two")
    turn = made.begin(key("a"), 0, 0.0)
    made.keep(turn, record(b"summary", Does.REPLACES))
    made.end(turn, 0.0)
    say(made, "a", b"three")
    assert said(made, "a") == [b"summary", b"three"]
    assert made.n_bytes == 12 + 2 * LENGTH_BYTES


def test_a_turn_that_is_not_kept_has_never_been() -> None:
    made = history()
    say(made, "a", b"one")
    made.end(made.begin(key("a"), 0, 0.0), 0.0)
    assert said(made, "a") == [b"one"]
    made.end(made.begin(key("new"), 0, 0.0), 0.0)
    assert made.n_conversations == 1


def test_a_tenant_does_not_find_what_another_said() -> None:
    made = history()
    say(made, "a", b"mine", tenant="me")
    assert said(made, "a", tenant="you") == []
    assert not made.forget(key("a", "you"))
    assert said(made, "a", tenant="me") == [b"mine"]


def test_ids_match_as_a_whole() -> None:
    made = history()
    say(made, "s-1", b"one")
    assert said(made, "s-12") == []


def test_an_unused_conversation_ends_and_its_client_is_told() -> None:
    made = history()
    say(made, "a", now=0.0)
    say(made, "b", now=50.0)
    made.expire(TTL_S)
    assert made.take_lost() == [key("a")]
    assert made.take_lost() == []
    with pytest.raises(ConversationGone):
        made.begin(key("a"), 0, TTL_S)
    assert said(made, "b", now=TTL_S) == [b"said"]


def test_a_conversation_in_use_does_not_end() -> None:
    made = history(max_conversations=1)
    say(made, "a")
    turn = made.begin(key("a"), 0, 0.0)
    made.expire(10 * TTL_S)
    with pytest.raises(NoTurn) as refused:
        made.begin(key("b"), 0, 0.0)
    assert refused.value.reason is RefusalReason.SYSTEM_SESSIONS_FULL
    assert made.keep(turn, record(b"more"))
    made.end(turn, 10 * TTL_S)
    assert said(made, "a", now=10 * TTL_S) == [b"said", b"more"]


def test_a_deleted_conversation_is_gone_and_its_id_is_free() -> None:
    made = history()
    say(made, "a")
    assert made.forget(key("a"))
    assert not made.forget(key("a"))
    assert said(made, "a") == []
    assert made.n_bytes == 0


def test_what_ended_by_itself_is_free_again_once_it_is_deleted() -> None:
    made = history()
    say(made, "a")
    made.expire(TTL_S)
    assert not made.forget(key("a"))
    assert said(made, "a", now=TTL_S) == []


def test_a_turn_of_a_deleted_conversation_leaves_nothing() -> None:
    made = history()
    say(made, "a")
    turn = made.begin(key("a"), 0, 0.0)
    made.forget(key("a"))
    assert not made.keep(turn, record())
    made.end(turn, 0.0)
    assert made.n_conversations == 0
    assert made.n_bytes == 0
    assert made.take_lost() == []


def test_room_is_made_by_whoever_has_most_and_from_what_was_unused_for_longest() -> None:
    made = history(max_conversations=4)
    say(made, "old", tenant="modest", now=0.0)
    for i, name in enumerate(("a", "b", "c")):
        say(made, name, tenant="greedy", now=float(i))
    said(made, "a", tenant="greedy", now=3.0)
    say(made, "d", tenant="greedy", now=4.0)
    assert made.take_lost() == [key("b", "greedy")]
    assert said(made, "old", tenant="modest", now=5.0) == [b"said"]


def test_a_turn_that_is_not_kept_makes_nobody_lose_a_conversation() -> None:
    made = history(max_conversations=1)
    say(made, "a")
    made.end(made.begin(key("refused"), 0, 1.0), 1.0)
    assert made.take_lost() == []
    assert said(made, "a", now=2.0) == [b"said"]


def test_room_is_made_for_bytes_too() -> None:
    made = history(max_conversation_bytes=100, max_bytes=200)
    for i, name in enumerate(("a", "b", "c")):
        say(made, name, bytes(76), now=float(i))
    assert made.take_lost() == [key("a")]
    assert made.n_bytes == 160


def test_a_conversation_beyond_its_bound_goes_on_and_at_twice_that_it_is_full() -> None:
    made = history(max_conversation_bytes=100)
    say(made, "a", bytes(186))
    with pytest.raises(ConversationFull):
        made.begin(key("a"), 11, 0.0)
    made.end(made.begin(key("a"), 10, 0.0), 0.0)
    assert said(made, "a") == [bytes(186)]


def test_what_an_earlier_process_kept_goes_on_where_it_was() -> None:
    made = history(max_conversations=2)
    earlier = []
    for name, used_at in (("late", -1.0), ("expired", -TTL_S), ("early", -3.0), ("middle", -2.0)):
        conversation = Conversation(key=key(name), used_at=used_at)
        conversation.take(record(name.encode()))
        earlier.append(conversation)
    made.restore(earlier, 0.0)
    assert made.take_lost() == [key("expired"), key("early")]
    assert said(made, "late") == [b"late"]
    assert made.n_bytes == 10 + 2 * LENGTH_BYTES


def test_what_was_used_in_times_to_come_does_not_outlive_the_rest() -> None:
    made = history()
    ahead = Conversation(key=key("ahead"), used_at=1e9)  # the wall clock was set back since
    ahead.take(record())
    made.restore([ahead], 0.0)
    say(made, "a", now=1.0)
    made.expire(1.0 + TTL_S)
    assert made.take_lost() == [key("ahead"), key("a")]


@pytest.mark.parametrize(
    ("bounds", "names"),
    [
        ({"max_conversations": 0}, "max_conversations"),
        ({"max_conversation_bytes": 0}, "max_conversation_bytes"),
        ({"max_bytes": 10, "max_conversation_bytes": 11}, "max_bytes is 10"),
        ({"ttl_s": 0}, "ttl_s"),
    ],
)
def test_a_bound_out_of_its_range_is_named(bounds: dict[str, int], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        HistoryConfig(**bounds)


@given(
    st.lists(
        st.tuples(st.sampled_from("abcde"), st.sampled_from("xy"), st.binary(max_size=40), st.booleans())
    )
)
def test_bounds_hold_and_bytes_add_up_whatever_is_said(turns: list[tuple[str, str, bytes, bool]]) -> None:
    made = history(max_conversations=3, max_conversation_bytes=60, max_bytes=100)
    now = 0.0
    for name, tenant, content, deletes in turns:
        now += 10.0
        made.expire(now)
        if deletes:
            made.forget(key(name, tenant))
        try:
            say(made, name, content, tenant=tenant, now=now)
        except (ConversationGone, ConversationFull):
            continue
        assert made.n_conversations <= 3
        assert made.n_bytes <= 100
    made.expire(now + TTL_S)
    assert made.n_conversations == 0
    assert made.n_bytes == 0
