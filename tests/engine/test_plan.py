"""How a step is cut into calls, driven synchronously."""

from hypothesis import given
from hypothesis import strategies as st

from llm_engine.budget import Allowance, PromptCost
from llm_engine.plan import Plan, Slice
from llm_engine.scheduler import Scheduler
from tests.engine.scheduling import scheduler, sequence, step, turn


def test_plan_serves_every_running_sequence_before_any_prefill() -> None:
    made = scheduler(sequence("a"), sequence("b"))
    turn(made, ord("x"))
    made.enqueue(sequence("long", n_prompt=50))
    made.admit(now=3.0, n_admissible=4)
    assert step(made, 10) == [[("a", 1), ("b", 1)], [("long", 10)]]
    assert step(made, 0) == [[("a", 1), ("b", 1)]]
    assert step(made, 1) == [[("a", 1), ("b", 1), ("long", 1)]]


def test_a_short_prompt_behind_a_long_one_gets_a_part_of_every_step() -> None:
    made = scheduler(sequence("long", n_prompt=1000), sequence("short", n_prompt=30))
    assert step(made, 40) == [[("long", 30), ("short", 10)]]


def test_of_two_tokens_the_short_prompt_has_one() -> None:
    made = scheduler(sequence("long", n_prompt=1000), sequence("short", n_prompt=30))
    assert step(made, 2) == [[("long", 1), ("short", 1)]]
    assert step(made, 1) == [[("long", 1)]]


def test_prompts_of_equal_length_are_served_oldest_first() -> None:
    made = scheduler(sequence("first", n_prompt=20), sequence("second", n_prompt=20))
    turn(made, ord("x"), n_prompt_tokens=16)
    assert step(made, 16) == [[("first", 4), ("second", 12)]]


def test_no_prompt_has_more_than_a_slice_in_a_step_and_others_get_what_it_leaves() -> None:
    made = scheduler(sequence("a", n_prompt=100), sequence("b", n_prompt=100), prompt_slice=63)
    assert step(made, 200) == [[("a", 63), ("b", 63)]]
    assert step(made, 80) == [[("a", 63), ("b", 17)]]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 50))
def test_prompt_slices_use_the_whole_allowance_and_no_more(lengths: list[int], allowance: int) -> None:
    made = scheduler(*(sequence(str(i), n_prompt=n) for i, n in enumerate(lengths)), n_slots=6)
    (plan,) = made.plan(Allowance(allowance))
    assert plan.n_prompt_tokens == min(allowance, sum(lengths))
    assert all(part.n_tokens <= part.sequence.n_pending for part in plan.slices)


def test_slices_come_in_the_order_of_their_slots_and_holes_are_filled_first() -> None:
    made = scheduler(*(sequence(str(i), max_tokens=1 if i in (0, 2) else 9) for i in range(4)))
    turn(made, ord("x"))
    for key in ("new", "newer"):
        made.enqueue(sequence(key))
    made.admit(now=3.0, n_admissible=4)
    with_those_that_decode, _ = made.plan(Allowance(100))
    assert [part.sequence.slot for part in with_those_that_decode.slices] == [1, 2, 3]
    assert step(made, 100) == [[("1", 1), ("new", 1), ("3", 1)], [("newer", 3), ("new", 2)]]


def beside_streams(*, n_prompt: int, n_computed: int, slots: tuple[int, ...] = (0,)) -> Scheduler:
    """A prompt of which so much is computed, beside sequences that decode in these slots of four."""
    made = scheduler(*(sequence(str(slot), n_prompt=3) for slot in range(4)), prompt_slice=63)
    turn(made, ord("x"))
    for slot in {0, 1, 2, 3} - {*slots}:
        made.cancel(str(slot), now=2.0)
    made.enqueue(sequence("a", n_prompt=n_prompt))
    made.admit(now=2.0, n_admissible=4)
    made.commit(Plan.of([], [Slice.of(made.all_sequences()[-1], n_computed)]), [], now=2.0)
    return made


def test_a_single_token_is_computed_with_those_that_decode_and_more_by_themselves() -> None:
    made = beside_streams(n_prompt=320, n_computed=300)
    assert step(made, 1) == [[("0", 1), ("a", 1)]]
    assert step(made, 2) == [[("0", 1)], [("a", 2)]]
    assert step(made, 4) == [[("0", 1)], [("a", 4)]]


def test_a_prompt_in_a_hole_between_those_that_decode_fills_it_with_a_token() -> None:
    assert step(beside_streams(n_prompt=320, n_computed=300, slots=(0, 2, 3)), 9) == [
        [("0", 1), ("a", 1), ("2", 1), ("3", 1)],
        [("a", 8)],
    ]
    assert step(beside_streams(n_prompt=302, n_computed=300, slots=(0, 2, 3)), 9) == [
        [("0", 1), ("a", 1), ("2", 1), ("3", 1)],
        [("a", 1)],
    ]


def test_the_oldest_moves_on_however_deep_it_is() -> None:
    made = scheduler(sequence("deep", n_prompt=7000), *(sequence(key, n_prompt=30) for key in "abc"))
    made.commit(Plan.of([], [Slice.of(made.all_sequences()[0], 6500)]), [], now=2.0)
    cost = PromptCost(0.0033, 0.0033e-3)  # 25 ms for a token of the deep one, of which there are 28
    assert step(made, Allowance(512, 2, 0.028, cost))[0][0] == ("deep", 1)
