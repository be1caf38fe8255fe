"""The budget's laws: prompts never stretch a running stream's gap too far, and never stop."""

from llm_engine.budget import GAP_STEPS, IDLE_STEP_S, Budget

TOKEN_S = 0.004


def learned(*, batch_size: int = 512) -> Budget:
    """A budget that has seen 4 sequences decode in 20 ms and prompt tokens cost 4 ms each."""
    budget = Budget(batch_size, n_slots=8)
    for _ in range(50):
        budget.observe(0, 10, 10 * TOKEN_S)
        budget.observe(4, 0, 0.020)
        budget.observe(4, 5, 0.020 + 5 * TOKEN_S)
    return budget


def test_a_slice_beside_running_streams_stays_within_the_gap() -> None:
    n_tokens = learned().prompt_tokens(4)
    assert 0.020 + n_tokens * TOKEN_S <= GAP_STEPS * 0.020 + 1e-9
    assert n_tokens == 7


def test_a_slice_grows_when_nobody_decodes() -> None:
    assert learned().prompt_tokens(0) == round(IDLE_STEP_S / TOKEN_S)


def test_a_slice_is_never_empty_and_never_beyond_the_batch() -> None:
    assert learned(batch_size=16).prompt_tokens(0) == 16
    slow = Budget(512, 8)
    slow.observe(0, 1, 10.0)
    slow.observe(8, 0, 0.001)
    assert slow.prompt_tokens(8) > 0


def test_an_unmeasured_count_borrows_from_a_smaller_one() -> None:
    budget = learned()
    assert budget.prompt_tokens(6) == budget.prompt_tokens(4)


def test_before_anything_was_measured_a_slice_is_small() -> None:
    assert 0 < Budget(512, 8).prompt_tokens(0) <= 64
