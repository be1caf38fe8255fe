"""How a step is cut into calls, driven synchronously."""

from hypothesis import given
from hypothesis import strategies as st

from llm_engine.budget import Allowance, PromptCost
from llm_engine.plan import Plan, Slice
from llm_engine.scheduler import Scheduler
from llm_engine.sequence import Sequence
from tests.engine.scheduling import compute, scheduler, sequence, shape, step, turn


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


# --- no token of a long prompt is computed alone ------------------------------------------------------------


def computed_together(plan: Plan) -> list[list[Sequence]]:
    """Who is in each of llama.cpp's calls for a plan: a sequence for every token.

    Source: llama_batch_allocr::split_equal, as it is called with a stream for each sequence.
    """
    left = {part.sequence: part.n_tokens for part in plan.slices}
    calls = []
    while left:
        together: list[Sequence] = []
        for each in left:
            if not together or each.slot == together[-1].slot + 1:
                together.append(each)
        n_tokens = min(left[each] for each in together)
        calls.append(together * n_tokens)
        left = {s: n - n_tokens * (s in together) for s, n in left.items()}
        left = {s: n for s, n in left.items() if n}
    return calls


def alone(plan: Plan) -> list[object]:
    """The prompts of which one token is computed by itself, where that rounds differently."""
    ends = {part.sequence: part.sequence.n_computed + part.n_tokens for part in plan.slices}
    calls = computed_together(plan)
    return [
        call[0].key for call in calls if len(call) == 1 and not call[0].is_decoding and ends[call[0]] > 256
    ]


def deep(made: Scheduler, *, n_computed: int = 300) -> None:
    """Have every prompt computed as far as that."""
    for each in made.all_sequences():
        made.commit(Plan.of([], [Slice.of(each, n_computed)]), [], now=2.0)


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


def test_a_prompt_never_has_one_token_left_nor_two() -> None:
    for n_left, n_tokens in ((63, 63), (64, 61), (65, 62), (66, 63)):
        made = scheduler(sequence("a", n_prompt=300 + n_left), prompt_slice=63)
        deep(made)
        assert step(made, 100) == [[("a", n_tokens)]]


def test_of_two_prompts_side_by_side_neither_has_a_token_more_than_the_other() -> None:
    made = scheduler(sequence("a", n_prompt=319), sequence("b", n_prompt=320), prompt_slice=63)
    deep(made)
    assert step(made, 100) == [[("a", 19), ("b", 17)]]
    assert step(made, 38) == [[("a", 19), ("b", 17)]]
    assert step(made, 35) == [[("a", 19), ("b", 16)]]


def test_a_single_token_is_computed_with_those_that_decode_and_more_by_themselves() -> None:
    made = beside_streams(n_prompt=320, n_computed=300)
    assert step(made, 1) == [[("0", 1), ("a", 1)]]
    assert step(made, 2) == [[("0", 1)], [("a", 2)]]
    assert step(made, 4) == [[("0", 1)], [("a", 4)]]


def test_a_single_token_of_a_long_prompt_without_a_neighbour_gets_another_if_there_is_room() -> None:
    made = beside_streams(n_prompt=320, n_computed=300, slots=(0, 3))
    made.cancel("0", now=2.0)
    assert step(made, Allowance(100, 0, 1.0, PromptCost(1.0, 0.0))) == [[("3", 1)], [("a", 2)]]
    assert step(made, 1) == [[("3", 1)], [("a", 1)]]


def test_a_prompt_in_a_hole_between_those_that_decode_fills_it_with_a_token() -> None:
    assert step(beside_streams(n_prompt=320, n_computed=300, slots=(0, 2, 3)), 9) == [
        [("0", 1), ("a", 1), ("2", 1), ("3", 1)],
        [("a", 8)],
    ]
    allowance = Allowance(100, 0, 2.0, PromptCost(1.0, 0.0))
    assert step(beside_streams(n_prompt=320, n_computed=300, slots=(0, 2, 3)), allowance) == [
        [("0", 1), ("a", 1), ("2", 1), ("3", 1)],
        [("a", 2)],
    ]


def test_the_last_two_tokens_of_a_prompt_stay_together() -> None:
    made = beside_streams(n_prompt=302, n_computed=300, slots=(0, 2, 3))
    assert step(made, 9) == [[("0", 1), ("2", 1), ("3", 1)], [("a", 2)]]


def test_where_answers_may_depend_on_others_no_slice_is_shortened() -> None:
    made = scheduler(sequence("a", n_prompt=364), sequence("b", n_prompt=365))
    deep(made)
    assert step(made, 200) == [[("a", 64), ("b", 65)]]


def test_short_prompts_are_computed_as_they_come() -> None:
    made = scheduler(sequence("a", n_prompt=39), sequence("b", n_prompt=40))
    assert step(made, 100) == [[("a", 39), ("b", 40)]]


@given(
    asked=st.lists(st.tuples(st.integers(1, 700), st.integers(1, 40)), min_size=1, max_size=8),
    pauses=st.lists(st.integers(0, 7), max_size=4),
    allowances=st.lists(st.integers(1, 200), min_size=1, max_size=20),
)
def test_only_of_a_few_tokens_one_is_ever_computed_alone(
    asked: list[tuple[int, int]], pauses: list[int], allowances: list[int]
) -> None:
    """Of five tokens or more there is always a number that fits."""
    prompts = [sequence(str(i), n_prompt=n, max_tokens=n_out) for i, (n, n_out) in enumerate(asked)]
    made = scheduler(*prompts, n_slots=5, prompt_slice=63)
    n_turns = 0
    while made.all_sequences():
        if n_turns < len(pauses):  # leaves a hole
            made.set_paused(str(pauses[n_turns]), n_turns % 2 == 0)
        for each in made.all_sequences() if n_turns == len(pauses) else ():
            made.set_paused(each.key, False)
        made.admit(now=1.0, n_admissible=5)
        plans = made.plan(Allowance(allowances[n_turns % len(allowances)]))
        for plan in plans:
            taken = dict(shape(plan))
            assert all(taken[key] <= 4 for key in alone(plan))
        compute(made, plans, ord("x"), now=2.0)
        n_turns += 1


@given(
    n_prompt=st.integers(258, 700), seconds=st.lists(st.integers(0, 80), min_size=1), decodes=st.booleans()
)
def test_of_a_prompt_beside_no_other_no_token_is_ever_computed_alone(
    n_prompt: int, seconds: list[int], decodes: bool
) -> None:
    """Where time bounds its slices, and not `--prefill-chunk`."""
    made = beside_streams(n_prompt=n_prompt, n_computed=0, slots=(2,) if decodes else ())
    for n in range(700):
        allowance = Allowance(64, 1, float(seconds[n % len(seconds)]), PromptCost(1.0, 0.0))
        plans = made.plan(allowance)
        assert not [key for plan in plans for key in alone(plan)]
        assert all(plan.n_prompt_tokens <= 64 for plan in plans)
        compute(made, plans, ord("x"), now=2.0)


@given(lengths=st.lists(st.integers(1, 700), min_size=1, max_size=6), n_tokens=st.integers(1, 130))
def test_a_call_never_holds_more_than_the_batch(lengths: list[int], n_tokens: int) -> None:
    made = scheduler(
        *(sequence(str(i), n_prompt=n) for i, n in enumerate(lengths)), n_slots=6, prompt_slice=63
    )
    while any(each.n_pending > 1 for each in made.all_sequences()):
        plans = made.plan(Allowance(n_tokens))
        assert all(plan.n_prompt_tokens <= n_tokens for plan in plans)
        compute(made, plans, ord("x"), now=2.0)


def test_the_oldest_moves_on_however_deep_it_is() -> None:
    made = scheduler(sequence("deep", n_prompt=7000), *(sequence(key, n_prompt=30) for key in "abc"))
    made.commit(Plan.of([], [Slice.of(made.all_sequences()[0], 6500)]), [], now=2.0)
    cost = PromptCost(0.0033, 0.0033e-3)  # 25 ms for a token of the deep one, of which there are 28
    assert step(made, Allowance(512, 2, 0.028, cost))[0][0] == ("deep", 1)
