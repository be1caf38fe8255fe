"""Conversations: the next turn of an unchanged client is known by what it sends, and nothing else is."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from llm_ingress.conversation import BEGINNINGS_MAX, Conversation, conversation_of
from llm_ingress.dialects import DIALECTS

SYSTEM = ("system", "You answer briefly.")
texts = st.text(max_size=20)
turns = st.tuples(st.sampled_from(["user", "assistant"]), texts)
histories = st.lists(turns, min_size=1, max_size=8)


def of(*messages: tuple[str, str]) -> Conversation:
    return Conversation.of_messages(messages)


def continues(later: Conversation, earlier: Conversation) -> bool:
    """Whether the later one is known to go on with the earlier."""
    return earlier.whole is not None and earlier.whole in later.beginnings


def of_body(body: bytes) -> Conversation:
    return DIALECTS["/v1/chat/completions"].read(body).conversation


@given(histories, st.lists(turns, min_size=1, max_size=BEGINNINGS_MAX))
def test_whatever_goes_on_with_messages_of_a_user_is_known_to(
    history: list[tuple[str, str]], more: list[tuple[str, str]]
) -> None:
    has_user = any(role == "user" for role, _ in history)
    assert continues(of(*history, *more), of(*history)) is has_user


@given(histories, histories)
def test_a_conversation_goes_on_with_nothing_but_its_own_beginning(
    one: list[tuple[str, str]], other: list[tuple[str, str]]
) -> None:
    assert continues(of(*one), of(*other)) == (
        len(other) < len(one) and one[: len(other)] == other and any(role == "user" for role, _ in other)
    )


def test_every_turn_has_the_anchor_of_the_first() -> None:
    messages = [SYSTEM, ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")]
    anchors = {of(*messages[:n]).anchor for n in (2, 4, 6)}
    assert len(anchors) == 1
    assert of(SYSTEM, ("user", "another")).anchor not in anchors


def test_a_shared_system_prompt_connects_nothing() -> None:
    alone, first, second = of(SYSTEM), of(SYSTEM, ("user", "a")), of(SYSTEM, ("user", "b"))
    assert alone.whole is None
    assert not first.beginnings
    assert first.anchor != second.anchor


def test_the_same_request_again_is_no_next_turn() -> None:
    assert not continues(of(("user", "a")), of(("user", "a")))


def test_a_long_history_is_looked_up_by_its_longest_beginnings_only() -> None:
    messages = [("user" if n % 2 == 0 else "assistant", f"{n}") for n in range(1001)]
    conversation = of(*messages)
    assert len(conversation.beginnings) == BEGINNINGS_MAX
    assert conversation.beginnings[0] == of(*messages[:-1]).whole
    assert continues(conversation, of(*messages[:-2]))


def test_where_one_message_ends_is_part_of_what_was_said() -> None:
    told = [
        of(("user", "ab"), ("user", "c")),
        of(("user", "a"), ("user", "bc")),
        of(("user", "abc")),
        of(("user", "ab\nuser 1\nc")),
    ]
    assert len({conversation.whole for conversation in told}) == len(told)


def test_keys_match_exactly() -> None:
    keys = ["s-1", "s-12", "S-1", "s-1 ", "s"]
    conversations = [Conversation.of_key(key) for key in keys]
    assert not any(continues(a, b) for a, b in pairwise(conversations))
    assert all(
        continues(made, Conversation.of_key(key)) for made, key in zip(conversations, keys, strict=True)
    )


def test_a_key_comes_before_a_name_and_a_name_before_what_is_said() -> None:
    said = [("user", "a")]
    both = conversation_of(cache_key="k", conversation_id="c", messages=said)
    assert both.anchor == Conversation.of_key("k").anchor
    named = conversation_of(cache_key=None, conversation_id="c", messages=said)
    assert named.anchor == Conversation.of_key("c").anchor
    # Only a name makes a session, whatever the key.
    assert both.session == named.session is not None
    assert conversation_of(cache_key="k", conversation_id=None, messages=said).session is None
    assert conversation_of(cache_key="", conversation_id="", messages=said) == of(*said)


def test_a_request_is_the_conversation_of_its_texts_however_they_are_written() -> None:
    plain = of_body(
        b'{"model": "m", "messages": [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]}'
    )
    parts = of_body(
        b'{"model": "m", "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"},'
        b' {"type": "text", "text": "b"}]}, {"role": "user", "content": "c"}]}'
    )
    assert plain == parts
    keyed = of_body(
        b'{"model": "m", "messages": [{"role": "user", "content": "c"}], "prompt_cache_key": "k"}'
    )
    assert keyed == Conversation.of_key("k")
    named = of_body(b'{"model": "m", "messages": [{"role": "user", "content": "c"}], "conversation_id": "k"}')
    assert named == Conversation.of_key("k", session="k")
