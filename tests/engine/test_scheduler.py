"""The scheduler's laws, driven synchronously."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_engine.budget import Allowance, Load
from llm_engine.errors import BackendError
from llm_engine.generation import Delta, Failed, Finished, StopReason
from tests.engine.fake_backend import END
from tests.engine.scheduling import compute, empty, scheduler, sequence, step, turn


def test_sequences_beyond_the_slots_wait_and_join_when_one_leaves() -> None:
    made = scheduler(sequence("a", max_tokens=1), sequence("b"), sequence("c"), n_slots=2)
    assert {key for call in step(made, 100) for key, _ in call} == {"a", "b"}
    turn(made, ord("x"))
    made.admit(now=3.0, n_admissible=4)
    assert {key for call in step(made, 100) for key, _ in call} == {"b", "c"}


def test_max_tokens_ends_with_length_in_the_same_step() -> None:
    made = scheduler(sequence("a", max_tokens=1))
    delta, finished = turn(made, ord("x"))
    assert delta == ("a", Delta("x", (ord("x"),)))
    assert isinstance(finished[1], Finished)
    assert finished[1].reason is StopReason.LENGTH
    assert (finished[1].n_prompt, finished[1].n_completion) == (3, 1)


def test_end_of_generation_on_the_first_token_is_a_stop_without_text() -> None:
    made = scheduler(sequence("a"))
    delta, (_, finished) = turn(made, END)
    assert delta == ("a", Delta("", (END,)))
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.n_completion) == (StopReason.STOP, 1)


def test_half_a_character_at_the_limit_is_left_out() -> None:
    made = scheduler(sequence("a", max_tokens=1))
    delta, _ = turn(made, "é".encode()[0])
    assert delta == ("a", Delta("", ("é".encode()[0],)))


def test_held_back_text_leaves_when_the_end_is_not_its_stop_string() -> None:
    made = scheduler(sequence("a", stop=("xy",), max_tokens=2))
    assert turn(made, ord("x")) == [("a", Delta("", (ord("x"),)))]
    delta, _ = turn(made, ord("z"))
    assert delta == ("a", Delta("xz", (ord("z"),)))


def test_a_slot_is_taken_again_once_it_is_free() -> None:
    made = scheduler(sequence("a", max_tokens=1), n_slots=1)
    turn(made, ord("x"))
    made.enqueue(sequence("b"))
    made.admit(now=3.0, n_admissible=4)
    assert made.plan(Allowance(10))[0].slices[0].sequence.seq_id == 0


def test_cancel_works_while_waiting_in_prefill_and_in_decode_and_never_twice() -> None:
    made = scheduler(sequence("decode"), sequence("prefill", n_prompt=50), sequence("waiting"), n_slots=2)
    turn(made, ord("x"), n_prompt_tokens=10)
    for key in ("decode", "prefill", "waiting"):
        ((_, finished),) = made.cancel(key, now=3.0)
        assert isinstance(finished, Finished)
        assert finished.reason is StopReason.CANCELLED
        assert made.cancel(key, now=3.0) == []
    assert not made.all_sequences()
    assert made.kv_promised_tokens == 0


def test_a_paused_sequence_is_left_out_and_keeps_its_slot() -> None:
    made = scheduler(sequence("a"), sequence("b"))
    turn(made, ord("x"))
    made.set_paused("a", True)
    assert step(made, 10) == [[("b", 1)]]
    assert made.load() == Load(n_decoding=1, n_prompts=0)
    made.set_paused("a", False)
    assert step(made, 10) == [[("a", 1), ("b", 1)]]


def test_one_failed_draw_fails_that_sequence_only() -> None:
    made = scheduler(sequence("a"), sequence("b"))
    error = BackendError("no")
    (plan,) = made.plan(Allowance(100))
    events = made.commit(plan, [error, ord("x")], now=2.0)
    assert events == [("a", Failed(error)), ("b", Delta("x", (ord("x"),)))]


def test_a_continuation_computes_its_progress_and_sends_only_what_follows() -> None:
    made = scheduler(sequence("a", resumed=b"he", max_tokens=4, stop=("lo",)))
    assert step(made, 100) == [[("a", 5)]]
    assert turn(made, ord("l")) == [("a", Delta("", (ord("l"),)))]
    delta, (_, finished) = turn(made, ord("l"))
    assert delta == ("a", Delta("ll", (ord("l"),)))
    assert isinstance(finished, Finished)
    assert (finished.n_prompt, finished.n_completion) == (3, 4)


def test_a_continuation_that_was_complete_ends_at_once() -> None:
    made = empty(1)
    made.enqueue(sequence("a", resumed=b"hello", max_tokens=5))
    ((_, finished),) = made.admit(now=1.0, n_admissible=4)
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.n_completion) == (StopReason.LENGTH, 5)
    assert not made.all_sequences()


def test_a_continuation_that_goes_on_behind_its_end_fails_alone() -> None:
    made = empty(2)
    made.enqueue(sequence("neighbour"))
    made.enqueue(sequence("a", resumed=b"hello world", max_tokens=20, stop=("lo",)))
    ((key, failed),) = made.admit(now=1.0, n_admissible=2)
    assert (key, type(failed)) == ("a", Failed)
    assert turn(made, ord("x")) == [("neighbour", Delta("x", (ord("x"),)))]
    assert made.kv_promised_tokens == 3 + 8


def test_a_token_that_cannot_be_taken_ends_its_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_piece: bytes) -> str:
        raise ZeroDivisionError

    first = sequence("a")
    made = scheduler(first, sequence("b"))
    monkeypatch.setattr(first, "text", SimpleNamespace(feed=broken))
    (_, failed), delta = turn(made, ord("x"))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error.__cause__, ZeroDivisionError)
    assert delta == ("b", Delta("x", (ord("x"),)))


def test_no_more_run_than_are_admissible_and_the_rest_wait_for_their_turn() -> None:
    made = empty(4)
    for key in ("a", "b", "c"):
        made.enqueue(sequence(key, max_tokens=1))
    made.admit(now=1.0, n_admissible=2)
    assert made.n_running == 2
    turn(made, ord("x"))
    made.admit(now=3.0, n_admissible=2)
    assert step(made, 100) == [[("c", 3)]]


@given(
    actions=st.lists(st.tuples(st.sampled_from(["ask", "cancel", "pause", "resume"]), st.integers(0, 5))),
    turns=st.lists(st.integers(0, 4)),
    n_admissible=st.integers(1, 4),
)
def test_a_plan_that_still_holds_is_what_planning_anew_would_give(
    actions: list[tuple[str, int]], turns: list[int], n_admissible: int
) -> None:
    made = empty(3)
    for n, (action, which) in enumerate(actions):
        if action == "ask":
            made.enqueue(sequence(f"{n}", n_prompt=2, max_tokens=3))
        for each in made.all_sequences()[which : which + 1]:
            if action == "cancel":
                made.cancel(each.key, now=1.0)
            elif action != "ask":
                made.set_paused(each.key, action == "pause")
        for _ in range(turns[n] if n < len(turns) else 1):
            steady = made.steady
            made.admit(now=1.0, n_admissible=n_admissible)
            load, anew = made.load(), made.plan(Allowance(1))
            assert steady is None or [steady] == anew
            assert load.n_decoding == sum(plan.n_decoding for plan in anew)
            compute(made, anew, ord("x"), now=2.0)
            running = [each for each in made.all_sequences() if each.seq_id is not None]
            assert made.kv_promised_tokens == sum(each.kv_promised_tokens for each in running)


def test_a_step_of_nothing_but_decoding_is_planned_once() -> None:
    made = scheduler(sequence("a"), sequence("b"))
    turn(made, ord("x"))
    with_prompts, (decoding,) = made.steady, made.plan(Allowance(100))
    made.commit(decoding, [ord("x")] * 2, now=3.0)
    assert (with_prompts, made.steady) == (None, decoding)
    made.enqueue(sequence("c"))
    assert made.steady is None


def test_kv_is_promised_for_prompt_and_answer_of_whoever_holds_a_slot() -> None:
    made = scheduler(
        sequence("a", n_prompt=10, max_tokens=5),
        sequence("b", n_prompt=3, resumed=b"xy", max_tokens=40),
        sequence("waiting", n_prompt=100, max_tokens=100),
        n_slots=2,
    )
    assert made.kv_promised_tokens == (10 + 5) + (3 + 40)
    made.cancel("b", now=3.0)
    assert made.kv_promised_tokens == 10 + 5
