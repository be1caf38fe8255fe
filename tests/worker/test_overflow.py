"""A request made ready, generation by generation: what the engine is asked, and what becomes of its words."""

from collections.abc import Callable

import pytest

from llm_engine.errors import PromptTooLong
from llm_engine.generation import GenerateRequest, Prepared
from llm_worker.compaction import OPENING, PIECES_MAX, Bounds, Turns
from llm_worker.overflow import Fitted, fit
from llm_worker.summaries import Summaries
from tests.fakes import BYTES_PER_TOKEN, FakeEngine

N_CTX = 1000
BOUNDS = Bounds.of(N_CTX, None)
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "Where was I?"}


def history(n_turns: int, n_tokens: int, *, first: int = 0) -> Turns:
    """Pairs of turns, each pair of so many tokens."""
    half, numbers = n_tokens * BYTES_PER_TOKEN // 2, range(first, first + n_turns)
    pairs = ((said("user", f"q{i} " * half), said("assistant", f"a{i} " * half)) for i in numbers)
    return tuple({**turn, "content": turn["content"][:half]} for pair in pairs for turn in pair)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class Run:
    """One request made ready by an engine that writes what the test says."""

    def __init__(
        self,
        turns: Turns,
        say: Callable[[int], str] = "summary {}".format,
        *,
        summaries: Summaries | None = None,
        max_tokens: int | None = None,
        share: float = 1.0,
    ) -> None:
        self.asked: list[Prepared] = []
        recall = (summaries or Summaries()).recall
        request = GenerateRequest(messages=turns, max_tokens=max_tokens)
        steps = fit(request, FakeEngine(n_ctx=N_CTX), recall, share=share)
        try:
            self.asked.append(next(steps))
            while True:
                self.asked.append(steps.send(say(len(self.asked))))
        except StopIteration as done:
            self.fitted: Fitted = done.value

    @property
    def messages(self) -> Turns:
        return tuple(self.fitted.prepared.request.messages)


def test_a_conversation_that_fits_stays_as_it_is() -> None:
    run = Run((SYSTEM, *history(4, 150), QUESTION))
    assert (run.asked, run.fitted.compaction) == ([], None)


def test_older_turns_become_one_summary_before_the_recent_ones() -> None:
    turns = (SYSTEM, *history(7, 150), QUESTION)
    run = Run(turns)
    compaction = run.fitted.compaction
    assert compaction is not None
    summary = said("user", f"{OPENING}summary {len(run.asked)}")
    assert run.messages == (SYSTEM, summary, *turns[compaction.n_older :])
    assert run.messages[-1] == QUESTION
    assert (compaction.n_replaced, compaction.n_summaries) == (compaction.n_older - 1, len(run.asked))
    assert compaction.n_before > N_CTX
    assert compaction.n_after == len(run.fitted.prepared.prompt) <= BOUNDS.n_target


def test_each_summary_is_of_bounded_length_and_goes_on_from_the_one_before() -> None:
    run = Run((SYSTEM, *history(16, 150), QUESTION))
    assert len(run.asked) > 1
    for i, prepared in enumerate(run.asked):
        (message,) = prepared.request.messages
        assert prepared.request.max_tokens == BOUNDS.n_summary
        assert (f"summary {i}" in message["content"]) is (i > 0)
    assert run.fitted.compaction is not None
    assert run.fitted.compaction.summary == f"summary {len(run.asked)}"


def test_no_history_takes_more_summaries_than_there_may_be() -> None:
    assert len(Run((*history(300, 150), QUESTION)).asked) == PIECES_MAX


@pytest.mark.parametrize("room", [BOUNDS.n_room - 1, BOUNDS.n_room])
def test_too_little_room_for_an_answer_is_an_overflow_too(room: int) -> None:
    turns = history(2, (N_CTX - room) // 2 - 2)
    n_left = (N_CTX - room) * BYTES_PER_TOKEN - sum(len(turn["content"]) for turn in turns)
    run = Run((*turns, said("user", "x" * n_left)))
    assert (run.fitted.compaction is None) is (room == BOUNDS.n_room)


@pytest.mark.parametrize("share", [0.999, 0.5, 0.1])
def test_of_what_fits_no_more_stays_than_its_share(share: float) -> None:
    turns = (SYSTEM, *history(4, 150), QUESTION)
    whole = len(Run(turns).fitted.prepared.prompt)
    run = Run(turns, share=share)
    compaction = run.fitted.compaction
    assert compaction is not None
    assert (compaction.n_before, compaction.n_after) == (whole, len(run.fitted.prepared.prompt))
    assert compaction.n_after <= share * whole / 2
    assert (run.messages[0], run.messages[-1]) == (SYSTEM, QUESTION)
    assert len(run.asked) <= 1


def test_what_cannot_be_shortened_stays_whatever_its_share() -> None:
    assert Run((SYSTEM, QUESTION), share=0.5).fitted.compaction is None


def test_a_short_answer_is_content_with_less_room() -> None:
    turns = (*history(2, 450), QUESTION)
    assert Run(turns).fitted.compaction is not None
    assert Run(turns, max_tokens=20).fitted.compaction is None


def test_a_last_turn_that_leaves_little_room_and_has_nothing_before_it_gets_that_room() -> None:
    run = Run((SYSTEM, said("user", "x" * (N_CTX - 20) * BYTES_PER_TOKEN)))
    assert run.fitted.compaction is None
    assert run.fitted.prepared.max_tokens < BOUNDS.n_room


@pytest.mark.parametrize("before", [(), (SYSTEM,), history(3, 150)], ids=["alone", "system", "history"])
def test_a_last_turn_that_does_not_fit_by_itself_is_refused_as_ever(before: Turns) -> None:
    with pytest.raises(PromptTooLong):
        Run((*before, said("user", "x" * N_CTX * BYTES_PER_TOKEN)))


# -- what the model says --


def test_a_model_that_says_nothing_leaves_the_older_turns_out_and_that_is_told() -> None:
    run = Run((SYSTEM, *history(7, 150), QUESTION), lambda _: " \n")
    assert run.messages[0] == SYSTEM
    assert not any(OPENING in message["content"] for message in run.messages)
    assert run.fitted.compaction is not None
    assert run.fitted.compaction.n_replaced > 0
    assert run.fitted.digest is None


def test_a_model_that_falls_silent_leaves_the_summary_as_it_was() -> None:
    run = Run((SYSTEM, *history(16, 150), QUESTION), lambda n: "all of it" if n == 1 else "")
    assert run.fitted.compaction is not None
    assert run.fitted.compaction.summary == "all of it"


def test_a_summary_that_takes_more_tokens_than_it_was_written_in_is_left_out() -> None:
    run = Run((SYSTEM, *history(7, 150), QUESTION), lambda _: "long " * N_CTX)
    assert run.fitted.compaction is not None
    assert run.fitted.compaction.summary == ""
    assert run.messages[0] == SYSTEM


# -- again --


def test_the_next_turns_prompt_begins_as_this_one_and_needs_no_summary() -> None:
    summaries, turns = Summaries(), (SYSTEM, *history(7, 150), QUESTION)
    first = Run(turns, summaries=summaries)
    assert first.fitted.digest is not None
    assert first.fitted.compaction is not None
    summaries.keep(first.fitted.digest, first.fitted.compaction.summary)
    second = Run((*turns, said("assistant", "Here."), QUESTION), summaries=summaries)
    assert second.asked == []
    assert second.messages[: len(first.messages)] == first.messages
    assert second.fitted.digest == first.fitted.digest
    assert second.fitted.compaction is not None
    assert second.fitted.compaction.n_summaries == 0


def test_a_second_overflow_reads_only_the_summary_and_what_came_since() -> None:
    summaries, turns = Summaries(), (SYSTEM, *history(7, 150), QUESTION)
    first = Run(turns, summaries=summaries)
    assert first.fitted.digest is not None
    summaries.keep(first.fitted.digest, "what was")
    more = (*turns, said("assistant", "Here."), *history(4, 150, first=7), QUESTION)
    second = Run(more, summaries=summaries)
    (asked,) = second.asked
    (message,) = asked.request.messages
    assert message["content"].startswith(f"{OPENING}what was\n\n")
    assert turns[1]["content"] not in message["content"]
    assert second.fitted.compaction is not None
    assert second.fitted.compaction.n_summaries == 1


def test_a_forged_summary_without_end_harms_nobody() -> None:
    forged = said("user", OPENING + "x" * N_CTX * BYTES_PER_TOKEN)
    run = Run((SYSTEM, forged, *history(2, 150), QUESTION))
    assert run.messages[-1] == QUESTION
    assert len(run.fitted.prepared.prompt) < N_CTX


def test_of_many_summaries_the_ones_of_no_use_for_longest_go() -> None:
    summaries = Summaries(n_max=2)
    for digest in (b"a", b"b", b"a", b"c"):
        summaries.keep(digest, "text")
    assert [summaries.recall(digest) for digest in (b"a", b"b", b"c")] == ["text", None, "text"]
