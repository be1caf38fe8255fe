"""The scheduler's laws, driven synchronously."""

from hypothesis import given
from hypothesis import strategies as st

from llm_engine.budget import Allowance, Load, PromptCost
from llm_engine.diskcache import DiskCache
from llm_engine.errors import BackendError
from llm_engine.generation import Delta, Failed, Finished, StopReason
from llm_engine.sampling import Sampler, SamplingParams
from llm_engine.scheduler import Addressed, Plan, Scheduler, Slice
from llm_engine.sequence import Sequence
from llm_engine.slots import Slots
from llm_engine.store import Store
from llm_engine.text import TextAssembler
from tests.engine.fake_backend import END, ByteVocabulary, FakeBackend


def sequence(
    key: str, *, n_prompt: int = 3, resumed: bytes = b"", max_tokens: int = 8, stop: tuple[str, ...] = ()
) -> Sequence:
    return Sequence(
        key=key,
        tokens=[*range(n_prompt), *resumed],
        n_prompt=n_prompt,
        max_tokens=max_tokens,
        sampler=Sampler(SamplingParams(temperature=0), seed=0, choice=0, prompt=range(n_prompt)),
        text=TextAssembler(stop),
    )


def empty(n_slots: int, prompt_slice: int | None = None) -> Scheduler:
    """A scheduler whose sequences share nothing."""
    vocabulary = ByteVocabulary()
    backend, is_end = FakeBackend(n_slots=n_slots), vocabulary.is_end_of_generation
    slots = Slots(n_slots, backend, Store(0, DiskCache()), is_end_of_turn=is_end, reuses=False)
    return Scheduler(slots, vocabulary, prompt_slice=prompt_slice)


def scheduler(*sequences: Sequence, n_slots: int = 4, prompt_slice: int | None = None) -> Scheduler:
    made = empty(n_slots, prompt_slice)
    for each in sequences:
        made.enqueue(each)
    made.admit(now=1.0, n_admissible=n_slots)
    return made


def turn(made: Scheduler, token: int, *, n_prompt_tokens: int = 100, now: float = 2.0) -> list[Addressed]:
    """One step in which every sampling sequence draws `token`."""
    return compute(made, made.plan(Allowance(n_prompt_tokens)), token, now)


def compute(made: Scheduler, plans: list[Plan], token: int, now: float) -> list[Addressed]:
    return [event for plan in plans for event in made.commit(plan, [token] * len(plan.sampled), now)]


def step(made: Scheduler, allowance: Allowance | int) -> list[list[tuple[object, int]]]:
    """What each call of the next step holds, of which prompts may have so many tokens."""
    if isinstance(allowance, int):
        allowance = Allowance(allowance)
    return [shape(plan) for plan in made.plan(allowance)]


def shape(plan: Plan) -> list[tuple[object, int]]:
    return [(part.sequence.key, part.n_tokens) for part in plan.slices]


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


# --- no token of a long prompt is computed alone ------------------------------------------------------------


def computed_together(plan: Plan) -> list[list[Sequence]]:
    """Who is in each of llama.cpp's calls for a plan: a sequence for every token.

    Source: llama_batch_allocr::split_equal, as it is called with a stream for each sequence.
    """
    left = {part.sequence: part.n_tokens for part in plan.slices}
    calls = []
    while left:
        together: list[Sequence] = []
        for sequence in left:
            if not together or sequence.slot == together[-1].slot + 1:
                together.append(sequence)
        n_tokens = min(left[sequence] for sequence in together)
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


def test_slices_come_in_the_order_of_their_slots_and_holes_are_filled_first() -> None:
    made = scheduler(*(sequence(str(i), max_tokens=1 if i in (0, 2) else 9) for i in range(4)))
    turn(made, ord("x"))
    for key in ("new", "newer"):
        made.enqueue(sequence(key))
    made.admit(now=3.0, n_admissible=4)
    with_those_that_decode, _ = made.plan(Allowance(100))
    assert [part.sequence.slot for part in with_those_that_decode.slices] == [1, 2, 3]
    assert step(made, 100) == [[("1", 1), ("new", 1), ("3", 1)], [("newer", 3), ("new", 2)]]


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
