"""The budget's laws: prompts never stretch a running stream's gap too far, and never stop."""

import random

from llm_engine.budget import CROWD_STEPS, GAP_STEPS, IDLE_STEP_S, Allowance, Budget, Load, PromptCost

TOKEN_S = 0.004


def learned(*, batch_size: int = 512) -> Budget:
    """A budget that has seen 4 sequences decode in 20 ms and prompt tokens cost 4 ms each."""
    budget = Budget(batch_size, n_slots=8)
    for _ in range(50):
        budget.observe_prompts(10, 0, 10 * TOKEN_S)
        budget.observe_decoding(4, 0.020)
    return budget


def load(n_decoding: int, n_prompts: int) -> Load:
    return Load(n_decoding=n_decoding, n_prompts=n_prompts)


def n_tokens(budget: Budget, n_decoding: int, n_prompts: int, *, depth: int = 0) -> int:
    """Of one prompt, as deep as that."""
    return budget.allowance(load(n_decoding, n_prompts)).n_at(depth)


def test_a_slice_beside_running_streams_stays_within_the_gap() -> None:
    usual_s = 0.020 + TOKEN_S  # of the five that there will be
    n = n_tokens(learned(), 4, 1)
    assert 0.020 + n * TOKEN_S <= GAP_STEPS * usual_s < 0.020 + (n + 2) * TOKEN_S


def test_a_crowd_of_prompts_may_take_the_step_it_will_cost_anyway() -> None:
    assert n_tokens(learned(), 4, 4) > n_tokens(learned(), 4, 1)


def test_where_more_wait_for_a_first_token_than_decode_a_step_may_take_longer() -> None:
    step_s = 3 * TOKEN_S + n_tokens(learned(), 3, 5) * TOKEN_S
    assert abs(step_s - CROWD_STEPS * 8 * TOKEN_S) <= TOKEN_S


def test_a_batch_that_was_slow_for_a_deep_sequence_in_it_allows_no_longer_gap() -> None:
    budget = learned()
    before = n_tokens(budget, 4, 1)
    for _ in range(50):
        budget.observe_decoding(5, 0.060)
    assert n_tokens(budget, 4, 1) == before


def test_no_step_takes_longer_than_an_idle_one() -> None:
    budget = Budget(100_000, n_slots=64)
    budget.observe_prompts(10, 0, 10 * TOKEN_S)
    budget.observe_decoding(60, 0.2)
    assert 0.2 + n_tokens(budget, 60, 4) * TOKEN_S <= IDLE_STEP_S + 1e-9


def test_a_slice_grows_when_nobody_decodes() -> None:
    assert abs(n_tokens(learned(), 0, 1) - IDLE_STEP_S / TOKEN_S) <= 1


def test_a_slice_is_never_empty_and_never_beyond_the_batch() -> None:
    assert n_tokens(learned(batch_size=16), 0, 1) == 16
    slow = Budget(512, n_slots=8)
    slow.observe_prompts(1, 0, 10.0)
    slow.observe_decoding(7, 0.001)
    assert n_tokens(slow, 7, 1) > 0


def test_an_unmeasured_count_is_guessed_from_a_smaller_one() -> None:
    spare_s = GAP_STEPS * (0.020 + 3 * TOKEN_S) - (0.020 + 2 * TOKEN_S)
    assert abs(n_tokens(learned(), 6, 1) - spare_s / TOKEN_S) <= 1


# -- what prompts cost, by their depth --

CELL_S = TOKEN_S / 800


def prompts_s(n_tokens: int, depth: int, noise: float = 1.0) -> float:
    return noise * n_tokens * (TOKEN_S + CELL_S * (depth + n_tokens // 2))


def compute(budget: Budget, n_prompt: int, n_decoding: int, noise: float = 1.0) -> list[float]:
    """A prompt beside so many that decode in 5 ms each: what the steps took."""
    depth, steps_s = 0, []
    chance = random.Random(n_prompt)
    while depth < n_prompt:
        if n_decoding:
            budget.observe_decoding(n_decoding, 0.005 * n_decoding)
        n = min(n_prompt - depth, n_tokens(budget, n_decoding, 1, depth=depth))
        slice_s = prompts_s(n, depth, chance.uniform(1 / noise, noise))
        budget.observe_prompts(n, n * (depth + n // 2), slice_s)
        steps_s.append(0.005 * n_decoding + slice_s)
        depth += n
    return steps_s


def test_a_prompt_that_gets_dearer_the_deeper_it_is_does_not_lengthen_the_gap() -> None:
    budget = learned()
    assert max(compute(budget, 2000, n_decoding=4)) < 3 * 0.020
    assert max(compute(budget, 2000, n_decoding=4, noise=1.2)) < 1.2 * 3 * 0.020


def test_what_a_deep_prompt_takes_is_not_held_against_one_that_begins() -> None:
    budget = learned()
    for _ in range(3):
        compute(budget, 4000, n_decoding=4)
    steps_s = compute(budget, 100, n_decoding=4)
    assert len(steps_s) <= len(compute(learned(), 100, n_decoding=4)) + 1


def test_slices_alone_take_as_long_at_every_depth() -> None:
    budget = learned()
    for _ in range(6):
        *steps_s, _ = compute(budget, 4000, n_decoding=0)
    assert 0.8 * IDLE_STEP_S < min(steps_s) < max(steps_s) < 1.2 * IDLE_STEP_S


def test_on_a_machine_where_every_call_takes_long_a_slice_is_worth_its_call() -> None:
    """As on a GPU: a token more costs next to nothing beside the call."""
    budget, call_s, token_s = Budget(512, n_slots=8), 0.003, 0.00005
    budget.observe_prompts(32, 0, call_s + 32 * token_s)
    budget.observe_decoding(1, call_s + token_s)
    for _ in range(100):
        n = n_tokens(budget, 1, 1)
        budget.observe_prompts(n, 0, call_s + n * token_s)
        budget.observe_decoding(1, call_s + token_s)
    assert 40 <= n <= 80


def test_a_deep_prompt_has_no_more_time_where_every_call_takes_long() -> None:
    """A call of 8 ms, half a millisecond for a token, and 6.5 for one that is 2,000 deep."""
    budget, call_s, cost = Budget(512, n_slots=8), 0.008, PromptCost(0.0005, 0.000003)
    for depth in (*range(0, 2000, 100), *range(0, 2000, 100)):
        budget.observe_decoding(1, call_s + cost.token_s)
        budget.observe_prompts(100, 100 * depth, call_s + 100 * cost.at(depth))
    assert n_tokens(budget, 1, 1, depth=2000) == 2


def test_remainders_of_prompts_do_not_make_the_next_long_one_begin_small() -> None:
    """As with conversations whose KV is there, on a GPU."""
    budget, call_s, token_s = Budget(512, n_slots=8), 0.003, 0.00005
    budget.observe_decoding(1, call_s + token_s)
    budget.observe_prompts(512, 0, call_s + 512 * token_s)
    for n in range(200):
        budget.observe_prompts(5, 0, (call_s + 5 * token_s) * (1.1 if n % 2 else 0.9))
    assert n_tokens(budget, 1, 1) > 30


def test_a_clock_that_stands_still_ends_nothing() -> None:
    budget = Budget(512, n_slots=8)
    for _ in range(2):
        budget.observe_prompts(3, 0, 0.0)
        budget.observe_decoding(1, 0.0)
        budget.observe_joined(1, 1, 10, 0.0)
    assert n_tokens(budget, 1, 1) > 0


def test_before_anything_was_measured_a_slice_is_small() -> None:
    assert 0 < n_tokens(Budget(512, 8), 0, 1) <= 64


def test_a_fixed_chunk_is_kept_whatever_steps_take() -> None:
    budget = Budget(100, n_slots=8, chunk=30)
    budget.observe_prompts(10, 0, 10.0)
    assert n_tokens(budget, 0, 1) == n_tokens(budget, 4, 1, depth=1000) == 30


def test_what_is_given_to_one_prompt_is_missing_to_the_next() -> None:
    allowance = Allowance(100, 3, 0.1, PromptCost(0.001, 0.00001))
    assert (allowance.n_at(0), allowance.n_at(1000), allowance.n_at(100_000)) == (100, 9, 3)
    left = allowance.after(5, 1000)
    assert (left.n_tokens, left.n_at_least, round(left.seconds, 9)) == (95, 0, 0.045)
    assert Allowance(7).after(5, 1000).n_at(0) == 2


# -- a target for the step --

TARGET_S = 0.030


def aiming(n_slots: int = 8) -> Budget:
    """As `learned`, with room in the target for two sequences more than four."""
    budget = Budget(512, n_slots=n_slots, target_s=TARGET_S)
    for _ in range(50):
        budget.observe_prompts(10, 0, 10 * TOKEN_S)
        budget.observe_decoding(4, 0.020)
    return budget


def test_without_a_target_every_slot_may_be_taken() -> None:
    budget = learned()
    budget.observe_decoding(4, 10.0)
    assert budget.n_admissible(4, 0) == 8


def test_as_many_are_admitted_as_a_step_of_the_target_holds() -> None:
    assert aiming().n_admissible(4, 0) == 6
    assert aiming().n_admissible(0, 0) == 6
    assert aiming(n_slots=5).n_admissible(4, 0) == 5


def test_nobody_is_admitted_while_the_step_is_over_its_target_but_one_always_is() -> None:
    budget = aiming()
    for _ in range(50):
        budget.observe_decoding(5, 0.040)
    assert budget.n_admissible(5, 0) == 5
    assert budget.n_admissible(0, 0) == 4
    slow = Budget(512, n_slots=8, target_s=TARGET_S)
    slow.observe_decoding(1, 1.0)
    assert slow.n_admissible(0, 0) == 1


def test_before_anything_was_measured_one_is_admitted_at_a_time() -> None:
    budget = Budget(512, n_slots=8, target_s=TARGET_S)
    assert (budget.n_admissible(0, 0), budget.n_admissible(1, 1)) == (1, 1)
    budget.observe_prompts(10, 0, 10 * TOKEN_S)
    assert budget.n_admissible(1, 0) > 1


def test_a_count_that_was_too_slow_once_is_tried_again_later() -> None:
    budget = aiming()
    budget.observe_decoding(5, 1.0)
    assert budget.n_admissible(4, 0) == 4
    for _ in range(600):
        budget.observe_decoding(4, 0.020)
    assert budget.n_admissible(4, 0) == 6


def test_slices_fill_the_step_up_to_its_target_and_no_further() -> None:
    budget = aiming()
    for n_decoding in (0, 4):
        n = n_tokens(budget, n_decoding, 1)
        step_s = (0.020 if n_decoding else 0.0) + n * TOKEN_S
        assert TARGET_S - TOKEN_S - 1e-9 <= step_s <= TARGET_S or n == 4


def test_while_there_are_prompts_a_part_of_the_target_is_theirs() -> None:
    budget = aiming()
    assert budget.n_admissible(4, 0) == 6
    assert budget.n_admissible(4, 1) == 4


def test_single_tokens_beside_those_that_decode_tell_what_prompts_take() -> None:
    """With a house so full that a prompt has no more, a slow spell would never be forgotten."""
    budget = aiming()
    for _ in range(8):
        budget.observe_prompts(10, 0, 40 * TOKEN_S)
    assert n_tokens(budget, 4, 1) == 1
    for _ in range(300):
        budget.observe_decoding(4, 0.020)
        budget.observe_joined(4, 1, 0, 0.020 + TOKEN_S)
    assert n_tokens(budget, 4, 1) == 2


def test_one_step_that_somebody_else_held_up_changes_little() -> None:
    budget = aiming()
    budget.observe_decoding(4, 20.0)
    assert budget.n_admissible(4, 0) == 4
    for _ in range(10):
        budget.observe_decoding(4, 0.020)
    assert budget.n_admissible(4, 0) >= 5


def test_it_tells_how_fast_prompts_are_computed_once_it_has_seen_one() -> None:
    assert Budget(512, n_slots=8).prompt_tokens_per_second == 0
    budget = learned()
    for _ in range(6):
        compute(budget, 2000, n_decoding=0)
    assert abs(budget.prompt_tokens_per_second * prompts_s(1, 1000) - 1) < 0.1
