"""The budget's laws: prompts never stretch a running stream's gap too far, and never stop."""

from llm_engine.budget import CROWD_STEPS, GAP_STEPS, IDLE_STEP_S, Budget, Load

TOKEN_S = 0.004


def learned(*, batch_size: int = 512) -> Budget:
    """A budget that has seen 4 sequences decode in 20 ms and prompt tokens cost 4 ms each."""
    budget = Budget(batch_size, n_slots=8)
    for _ in range(50):
        budget.observe(0, 10, 10 * TOKEN_S)
        budget.observe(4, 0, 0.020)
        budget.observe(4, 5, 0.020 + 5 * TOKEN_S)
    return budget


def load(n_decoding: int, n_prompts: int) -> Load:
    return Load(n_decoding=n_decoding, n_prompts=n_prompts)


def test_a_slice_beside_running_streams_stays_within_the_gap() -> None:
    budget = learned()
    usual_s = 0.020 + TOKEN_S  # of the five that there will be
    n_tokens = budget.prompt_tokens(load(4, 1))
    assert 0.020 + n_tokens * TOKEN_S <= GAP_STEPS * usual_s < 0.020 + (n_tokens + 2) * TOKEN_S


def test_a_crowd_of_prompts_may_take_the_step_it_will_cost_anyway() -> None:
    assert learned().prompt_tokens(load(4, 4)) > learned().prompt_tokens(load(4, 1))


def test_where_more_wait_for_a_first_token_than_decode_a_step_may_take_longer() -> None:
    budget = learned()
    step_s = 3 * TOKEN_S + budget.prompt_tokens(load(3, 5)) * TOKEN_S
    assert abs(step_s - CROWD_STEPS * 8 * TOKEN_S) <= TOKEN_S


def test_a_batch_that_was_slow_for_a_deep_sequence_in_it_allows_no_longer_gap() -> None:
    budget = learned()
    before = budget.prompt_tokens(load(4, 1))
    for _ in range(50):
        budget.observe(5, 0, 0.060)
    assert budget.prompt_tokens(load(4, 1)) == before


def test_no_step_takes_longer_than_an_idle_one() -> None:
    budget = Budget(100_000, n_slots=64)
    budget.observe(0, 10, 10 * TOKEN_S)
    budget.observe(60, 0, 0.2)
    assert 0.2 + budget.prompt_tokens(load(60, 4)) * TOKEN_S <= IDLE_STEP_S + 1e-9


def test_a_slice_grows_when_nobody_decodes() -> None:
    assert learned().prompt_tokens(load(0, 1)) == round(IDLE_STEP_S / TOKEN_S)


def test_a_slice_is_never_empty_and_never_beyond_the_batch() -> None:
    assert learned(batch_size=16).prompt_tokens(load(0, 1)) == 16
    slow = Budget(512, n_slots=8)
    slow.observe(0, 1, 10.0)
    slow.observe(7, 0, 0.001)
    assert slow.prompt_tokens(load(7, 1)) > 0


def test_an_unmeasured_count_is_guessed_from_a_smaller_one() -> None:
    budget = learned()
    spare_s = GAP_STEPS * (0.020 + 3 * TOKEN_S) - (0.020 + 2 * TOKEN_S)
    assert abs(budget.prompt_tokens(load(6, 1)) - spare_s / TOKEN_S) <= 1


def test_small_slices_that_cost_more_for_being_mixed_do_not_shrink_the_next() -> None:
    budget = learned()
    before = budget.prompt_tokens(load(4, 1))
    for _ in range(5):
        budget.observe(4, 4, 0.020 + 4 * TOKEN_S + 0.010)
    assert budget.prompt_tokens(load(4, 1)) >= before - 3


def test_a_prompt_that_gets_dearer_the_deeper_it_is_does_not_lengthen_the_gap() -> None:
    budget = learned()
    for depth in range(300):
        n_tokens = budget.prompt_tokens(load(4, 1))
        step_s = 0.020 + n_tokens * TOKEN_S * (1 + depth / 100)
        budget.observe(4, n_tokens, step_s)
        assert step_s < 3 * 0.020 or n_tokens == 3


def test_before_anything_was_measured_a_slice_is_small() -> None:
    assert 0 < Budget(512, 8).prompt_tokens(load(0, 1)) <= 64


def test_a_fixed_chunk_is_kept_whatever_steps_take() -> None:
    budget = Budget(100, n_slots=8, chunk=30)
    budget.observe(0, 10, 10.0)
    assert budget.prompt_tokens(load(0, 1)) == 30
    assert budget.prompt_tokens(load(80, 1)) == 20


# -- a target for the step --

TARGET_S = 0.030


def aiming(n_slots: int = 8) -> Budget:
    """As `learned`, with room in the target for two sequences more than four."""
    budget = Budget(512, n_slots=n_slots, target_s=TARGET_S)
    for _ in range(50):
        budget.observe(0, 10, 10 * TOKEN_S)
        budget.observe(4, 0, 0.020)
    return budget


def test_without_a_target_every_slot_may_be_taken() -> None:
    budget = learned()
    budget.observe(4, 0, 10.0)
    assert budget.n_admissible(4, 0) == 8


def test_as_many_are_admitted_as_a_step_of_the_target_holds() -> None:
    assert aiming().n_admissible(4, 0) == 6
    assert aiming().n_admissible(0, 0) == 6
    assert aiming(n_slots=5).n_admissible(4, 0) == 5


def test_nobody_is_admitted_while_the_step_is_over_its_target_but_one_always_is() -> None:
    budget = aiming()
    for _ in range(50):
        budget.observe(5, 0, 0.040)
    assert budget.n_admissible(5, 0) == 5
    assert budget.n_admissible(0, 0) == 4
    slow = Budget(512, n_slots=8, target_s=TARGET_S)
    slow.observe(1, 0, 1.0)
    assert slow.n_admissible(0, 0) == 1


def test_before_anything_was_measured_one_is_admitted_at_a_time() -> None:
    budget = Budget(512, n_slots=8, target_s=TARGET_S)
    assert (budget.n_admissible(0, 0), budget.n_admissible(1, 1)) == (1, 1)
    budget.observe(0, 10, 10 * TOKEN_S)
    assert budget.n_admissible(1, 0) > 1


def test_a_count_that_was_too_slow_once_is_tried_again_later() -> None:
    budget = aiming()
    budget.observe(5, 0, 1.0)
    assert budget.n_admissible(4, 0) == 4
    for _ in range(600):
        budget.observe(4, 0, 0.020)
    assert budget.n_admissible(4, 0) == 6


def test_slices_fill_the_step_up_to_its_target_and_no_further() -> None:
    budget = aiming()
    for n_decoding in (0, 4):
        n_tokens = budget.prompt_tokens(load(n_decoding, 1))
        step_s = (0.020 if n_decoding else 0.0) + n_tokens * TOKEN_S
        assert TARGET_S - TOKEN_S - 1e-9 <= step_s <= TARGET_S or n_tokens == 4


def test_while_there_are_prompts_a_part_of_the_target_is_theirs() -> None:
    budget = aiming()
    assert budget.n_admissible(4, 0) == 6
    assert budget.n_admissible(4, 1) == 4


def test_mixed_steps_tell_what_a_count_costs_that_never_decodes_alone() -> None:
    budget = aiming()
    for _ in range(50):
        budget.observe(5, 2, 0.034 + 2 * TOKEN_S)
    assert budget.n_admissible(5, 0) == 5


def test_one_step_that_somebody_else_held_up_changes_little() -> None:
    budget = aiming()
    budget.observe(4, 0, 20.0)
    assert budget.n_admissible(4, 0) == 4
    for _ in range(10):
        budget.observe(4, 0, 0.020)
    assert budget.n_admissible(4, 0) >= 5


def test_it_tells_how_fast_prompts_are_computed_once_it_has_seen_one() -> None:
    assert Budget(512, n_slots=8).prompt_tokens_per_second == 0
    assert abs(learned().prompt_tokens_per_second - 1 / TOKEN_S) < 0.1 / TOKEN_S
