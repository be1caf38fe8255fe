"""What becomes of a conversation that outgrew its context: what stays, what is read, and within which bounds.

A token is a word here, and each turn costs three more.
"""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from llm_worker.compaction import (
    OPENING,
    PIECES_MAX,
    Bounds,
    Known,
    Measure,
    Outline,
    Turns,
    beginnings,
    digests_of,
    find_known,
    n_replaced,
    outline,
    shortened,
    summarising,
)
from llm_worker.summaries import Summaries

TURN_TOKENS = 3
NOTHING = Known()
NONE_KEPT = Summaries().recall


def n_tokens(turns: Turns) -> int:
    return sum(len(turn["content"].split()) + TURN_TOKENS for turn in turns)


def measure_of(n_ctx: int) -> Measure:
    def measure(turns: Turns) -> int | None:
        n = n_tokens(turns)
        return n if n < n_ctx else None

    return measure


def said(role: str, n_words: int, word: str = "word") -> dict[str, str]:
    return {"role": role, "content": " ".join(f"{word}{i}" for i in range(n_words))}


def chat(n_turns: int, n_words: int = 20) -> Turns:
    """A system turn, then user and assistant in turn; the last is a user's."""
    roles = ("user", "assistant")
    turns = [said(roles[i % 2], n_words, f"t{i}-") for i in range(n_turns * 2 - 1)]
    return (said("system", 5, "rule"), *turns)


def decide(turns: Turns, n_ctx: int, known: Known = NOTHING, max_tokens: int | None = None) -> Outline | None:
    return outline(turns, Bounds.of(n_ctx, max_tokens), known, measure_of(n_ctx))


TURNS = st.lists(
    st.builds(said, st.sampled_from(["system", "user", "assistant"]), st.integers(0, 60)), max_size=30
).map(tuple)
CONTEXTS = st.integers(64, 600)
# Of such conversations two in five are to be shortened, and of some seeds far fewer among the first fifty.
few_fit = settings(suppress_health_check=[HealthCheck.filter_too_much])


# -- what stays --


@few_fit
@given(TURNS, CONTEXTS, st.integers(1, 200) | st.none())
def test_system_and_last_user_turn_stay_as_they_are_and_in_order(
    turns: Turns, n_ctx: int, max_tokens: int | None
) -> None:
    todo = decide(turns, n_ctx, max_tokens=max_tokens)
    assume(todo is not None)
    assert todo is not None
    kept = shortened(turns, todo.n_older, "a summary")
    last_user = max(i for i, turn in enumerate(turns) if turn["role"] == "user")
    assert todo.n_older <= last_user
    assert turns[todo.n_older]["role"] == "user"
    recent = turns[todo.n_older :]
    assert kept[len(kept) - len(recent) :] == recent
    systems = [turn for turn in turns if turn["role"] == "system"]
    assert [turn for turn in kept if turn["role"] == "system"] == systems
    assert len(kept) == len(turns) - n_replaced(turns, todo.n_older) + 1


@few_fit
@given(TURNS, CONTEXTS, st.integers(1, 200) | st.none())
def test_whatever_the_summary_says_the_prompt_fits_with_the_answers_room(
    turns: Turns, n_ctx: int, max_tokens: int | None
) -> None:
    bounds, todo = Bounds.of(n_ctx, max_tokens), decide(turns, n_ctx, max_tokens=max_tokens)
    assume(todo is not None)
    assert todo is not None
    if todo.n_summary:
        summary = "w" + " w" * (todo.n_summary - 1)
        assert bounds.hold(n_tokens(shortened(turns, todo.n_older, summary)))
        assert todo.n_summary <= bounds.n_summary
    else:
        assert (todo.pieces, todo.summary) == ((), "")
        assert n_tokens(shortened(turns, todo.n_older, "")) < n_ctx


@few_fit
@given(TURNS, CONTEXTS)
def test_the_prompt_shrinks_to_half_the_context_unless_the_last_users_turn_is_longer(
    turns: Turns, n_ctx: int
) -> None:
    bounds, todo = Bounds.of(n_ctx, None), decide(turns, n_ctx)
    assume(todo is not None)
    assert todo is not None
    summary = "w" + " w" * (bounds.n_summary - 1)
    if n_tokens(shortened(turns, todo.n_older, summary)) > bounds.n_target:
        assert todo.n_older == beginnings(turns)[-1]


@few_fit
@given(TURNS, CONTEXTS)
def test_no_more_is_replaced_than_has_to_be(turns: Turns, n_ctx: int) -> None:
    bounds, todo = Bounds.of(n_ctx, None), decide(turns, n_ctx)
    assume(todo is not None)
    assert todo is not None
    summary = "w" + " w" * (bounds.n_summary - 1)
    for n_older in beginnings(turns):
        if n_older < todo.n_older:
            assert n_tokens(shortened(turns, n_older, summary)) >= bounds.n_target


@given(TURNS, CONTEXTS)
def test_nothing_helps_only_where_the_last_users_turn_does_not_fit_or_is_the_first(
    turns: Turns, n_ctx: int
) -> None:
    places = beginnings(turns)
    is_hopeless = not places or n_tokens(shortened(turns, places[-1], "")) >= n_ctx
    assert (decide(turns, n_ctx) is None) is is_hopeless


def test_a_single_turn_that_does_not_fit_is_not_cut() -> None:
    assert decide((said("system", 5), said("user", 200)), 100) is None


def test_a_summary_for_which_there_is_no_room_is_left_out_with_the_turns() -> None:
    turns = (said("user", 50), said("assistant", 5), said("user", 85))
    assert decide(turns, 100) == Outline(n_older=2)


# -- what is read --


@few_fit
@given(TURNS, CONTEXTS)
def test_the_pieces_are_what_was_replaced_and_if_too_much_its_end(turns: Turns, n_ctx: int) -> None:
    todo = decide(turns, n_ctx)
    assume(todo is not None and todo.pieces)
    assert todo is not None
    replaced = [turn for turn in turns[: todo.n_older] if turn["role"] != "system"]
    names = {"user": "User", "assistant": "Assistant"}
    text = "\n\n".join(f"{names[turn['role']]}: {turn['content']}" for turn in replaced)
    read = "".join(todo.pieces)
    assert len(todo.pieces) <= PIECES_MAX
    assert text.endswith(read)
    if len(todo.pieces) < PIECES_MAX:
        assert read == text


@few_fit
@given(TURNS, CONTEXTS)
def test_each_piece_can_be_read_with_a_summary_before_it_and_one_to_come(turns: Turns, n_ctx: int) -> None:
    todo = decide(turns, n_ctx)
    assume(todo is not None)
    assert todo is not None
    earlier = ""
    for piece in todo.pieces:
        assert n_tokens(summarising(piece, earlier)) + todo.n_summary <= n_ctx
        earlier = "w" + " w" * (todo.n_summary - 1)


def test_a_history_of_any_length_takes_a_bounded_number_of_summaries() -> None:
    todo = decide(chat(5_000), 512)
    assert todo is not None
    assert len(todo.pieces) == PIECES_MAX


def test_what_is_measured_is_never_much_longer_than_the_context() -> None:
    measured: list[int] = []

    def measure(turns: Turns) -> int | None:
        measured.append(n_tokens(turns))
        return measure_of(512)(turns)

    outline(chat(5_000), Bounds.of(512, None), NOTHING, measure)
    assert len(measured) < 300
    assert sorted(measured)[-2] < 4 * 512, "all at once is tried but once"


def test_a_piece_holds_nothing_of_the_system() -> None:
    todo = decide(chat(20), 256)
    assert todo is not None
    assert todo.pieces
    assert "rule" not in "".join(todo.pieces)


# -- again --


def test_a_known_summary_that_still_does_needs_no_other() -> None:
    turns = chat(20)
    assert decide(turns, 256, Known(33, "so far")) == Outline(n_older=33, summary="so far")


@given(st.integers(1, 12), st.integers(1, 24))
@example(1, 24)
def test_a_second_overflow_extends_the_summary_with_one_more(n_more: int, n_words: int) -> None:
    n_ctx = 512
    first = decide(chat(30), n_ctx)
    assert first is not None
    known = Known(first.n_older, "w" + " w" * (first.n_summary - 1))
    turns = (*chat(30), said("assistant", 20))
    while True:
        turns = (*turns, said("user", n_words, "new"), said("assistant", n_words, "new"))
        second = decide((*turns, said("user", 5)), n_ctx, known)
        assert second is not None
        if second.n_older > first.n_older:
            break
    assert len(second.pieces) == 1
    assert second.summary == known.summary
    assert not second.pieces[0].startswith("User: t0-")


def test_a_summary_is_found_by_the_turns_it_stands_for_and_by_no_others() -> None:
    turns = chat(10)
    written = {digests_of(turns)[7]: "the first", digests_of(turns)[11]: "the second"}
    assert find_known(turns, written.get) == Known(11, "the second")
    assert find_known(turns[:12], written.get) == Known(11, "the second")
    assert find_known(turns[:11], written.get) == Known(7, "the first")
    other = (turns[0], said("user", 20, "else"), *turns[2:])
    assert find_known(other, written.get) == NOTHING


@few_fit
@given(TURNS, st.integers(0, 29), st.text(max_size=3), st.sampled_from(["user", "assistant", "system"]))
def test_turns_that_differ_anywhere_have_another_digest(turns: Turns, i: int, text: str, role: str) -> None:
    assume(i < len(turns) and turns[i] != {"role": role, "content": text})
    other = (*turns[:i], {"role": role, "content": text}, *turns[i + 1 :])
    mine, theirs = digests_of(turns), digests_of(other)
    assert mine[: i + 1] == theirs[: i + 1]
    assert not set(mine[i + 1 :]) & set(theirs[i + 1 :])


def test_a_summary_that_stands_in_the_history_is_known_as_one() -> None:
    turns = shortened(chat(10), 13, "what was said")
    assert turns[1]["content"] == f"{OPENING}what was said"
    assert find_known(turns, NONE_KEPT) == Known(2, "what was said")
    longer = (*turns, said("assistant", 20), *chat(10)[1:])
    todo = decide(longer, 256, find_known(longer, NONE_KEPT))
    assert todo is not None
    assert todo.summary == "what was said"
    assert "what was said" not in "".join(todo.pieces)


@given(TURNS)
def test_a_history_without_a_summary_has_none(turns: Turns) -> None:
    assert find_known(turns, NONE_KEPT) == NOTHING


# -- bounds --


@pytest.mark.parametrize(("n_ctx", "share"), [(4, 1), (512, 64), (4096, 512), (131_072, 512)])
def test_a_summary_at_most_and_an_answer_at_least_are_an_eighth_and_bounded(n_ctx: int, share: int) -> None:
    bounds = Bounds.of(n_ctx, None)
    assert (bounds.n_room, bounds.n_summary) == (share, share)


def test_an_answer_of_few_tokens_needs_no_more_room() -> None:
    bounds = Bounds.of(512, 10)
    assert bounds.n_room == 10
    assert [bounds.hold(n) for n in (502, 503)] == [True, False]


@given(st.lists(st.integers(1, 600), min_size=2, max_size=2, unique=True).map(sorted))
def test_who_asks_for_more_needs_no_less_room(asked: list[int]) -> None:
    rooms = [Bounds.of(512, n).n_room for n in asked]
    assert all(a <= b for a, b in pairwise(rooms))
