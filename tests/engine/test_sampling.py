"""Sampling against a plain reference that sorts the whole vocabulary."""

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_engine.errors import RequestError
from llm_engine.sampling import Sampler, SamplingParams, argmax_rows, uniform

GREEDY = SamplingParams(temperature=0)
OPEN = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
PINNED = [0.13870941014555427, 0.1000788863334513, 0.9386090038521101]


def row_of(*logits: float) -> npt.NDArray[np.float32]:
    return np.array(logits, dtype=np.float32)


def random_row(n_vocab: int, seed: int = 0, spread: float = 3.0) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).normal(size=n_vocab) * spread).astype(np.float32)


def sampler(params: SamplingParams, seed: int = 0, choice: int = 0, prompt: tuple[int, ...] = ()) -> Sampler:
    return Sampler(params, seed, choice, prompt)


def reference_distribution(row: npt.NDArray[np.float32], params: SamplingParams) -> list[tuple[int, float]]:
    """The tokens that may be drawn with their probabilities, likeliest first: the rules, step by step."""
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    odds = [math.exp(float(row[token]) - float(row[ranked[0]])) for token in ranked]
    total, mass, kept = sum(odds), 0.0, 0
    while kept < len(ranked) and (params.top_p >= 1 or mass < params.top_p * total):
        mass += odds[kept]
        kept += 1
    ranked = [token for token, odd in zip(ranked[: max(kept, 1)], odds, strict=False) if odd >= params.min_p]
    heated = [math.exp((float(row[token]) - float(row[ranked[0]])) / params.temperature) for token in ranked]
    return [(token, odd / sum(heated)) for token, odd in zip(ranked, heated, strict=True)]


def reference_pick(row: npt.NDArray[np.float32], params: SamplingParams, number: float) -> int:
    distribution = reference_distribution(row, params)
    cuts = 0 < params.top_k < len(row) or params.top_p < 1 or params.min_p > 0
    if not cuts:
        distribution.sort()  # nothing to cut: the draw goes through the vocabulary as it stands
    mass = 0.0
    for token, probability in distribution:
        mass += probability
        if mass > number:
            return token
    return distribution[-1][0]


# The bounds are odd numbers so that no sum of rounded probabilities lies exactly on one.
sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.13, 0.8, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 300, 5000]),
    top_p=st.sampled_from([0.0, 0.1037, 0.5119, 0.9013, 0.99917, 1.0]),
    min_p=st.sampled_from([0.0, 0.00317, 0.0513, 0.7011, 1.0]),
)


@settings(deadline=None, max_examples=150)
@given(
    params=sampling_params,
    n_vocab=st.sampled_from([1, 2, 255, 256, 257, 1000, 2049]),
    spread=st.sampled_from([0.0, 0.5, 4.0, 30.0]),
    seed=st.integers(0, 2**32),
    ties=st.booleans(),
)
def test_pick_is_the_reference_pick(
    params: SamplingParams, n_vocab: int, spread: float, seed: int, ties: bool
) -> None:
    row = random_row(n_vocab, seed, spread)
    if ties:
        row = np.round(row)
    assert sampler(params, seed).pick(row, 5) == reference_pick(row, params, uniform(seed, 0, 5))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.5, top_k=3),
        SamplingParams(top_k=0, top_p=0.7, min_p=0),
        SamplingParams(top_k=0, top_p=1, min_p=0.1),
        OPEN,
    ],
)
def test_tokens_come_as_often_as_their_probability_says(params: SamplingParams) -> None:
    row, n_draws = random_row(300, seed=1, spread=2.0), 3000
    chooser = sampler(params, seed=11)
    drawn = Counter(chooser.pick(row, index) for index in range(n_draws))
    expected = {token: n_draws * p for token, p in reference_distribution(row, params)}
    assert set(drawn) <= set(expected)
    frequent = [token for token in expected if expected[token] >= 5]
    distance = sum((drawn[token] - expected[token]) ** 2 / expected[token] for token in frequent)
    # The mean of chi-square is its degrees of freedom; five standard deviations above it is no accident.
    assert distance < len(frequent) + 5 * math.sqrt(2 * len(frequent))


def test_temperature_zero_takes_the_maximum_and_the_lowest_id_among_equals() -> None:
    assert sampler(GREEDY).pick(row_of(1, 7, 3, 7), 0) == 1
    assert argmax_rows(np.stack([row_of(1, 7, 3, 7), row_of(9, 0, 9, 0)])).tolist() == [1, 0]


def test_equal_logits_at_the_edge_of_top_k_leave_the_lowest_ids() -> None:
    row = np.zeros(1000, dtype=np.float32)
    params = SamplingParams(temperature=1, top_k=3, top_p=1, min_p=0)
    assert {sampler(params, seed).pick(row, 0) for seed in range(50)} == {0, 1, 2}


def test_a_very_low_temperature_is_greedy_and_no_division_by_zero() -> None:
    row = random_row(500, seed=3)
    for params in (
        SamplingParams(temperature=1e-300),
        SamplingParams(temperature=1e-300, top_k=0, min_p=0, top_p=1),
    ):
        assert sampler(params).pick(row, 0) == row.argmax()


@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("temperature", [0, 1])
def test_impossible_tokens_are_never_picked(top_k: int, top_p: float, temperature: float) -> None:
    row = random_row(700, seed=4)
    row[::2], row[1::4] = -np.inf, np.nan
    possible = set(np.flatnonzero(np.isfinite(row)).tolist())
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=0)
    assert {sampler(params, seed).pick(row, 0) for seed in range(200)} <= possible
    assert int(argmax_rows(row[np.newaxis])[0]) in possible


@pytest.mark.parametrize("params", [GREEDY, OPEN, SamplingParams()])
def test_an_infinite_logit_is_certain(params: SamplingParams) -> None:
    row = row_of(1, np.nan, np.inf, -np.inf, 5)
    assert {sampler(params, seed).pick(row, 0) for seed in range(20)} == {2}


@pytest.mark.parametrize("params", [GREEDY, OPEN, SamplingParams(), SamplingParams(repeat_penalty=1.3)])
@pytest.mark.parametrize("logit", [np.nan, -np.inf])
def test_a_row_without_a_possible_token_gives_a_token_of_the_vocabulary(
    params: SamplingParams, logit: float
) -> None:
    row = np.full(300, logit, dtype=np.float32)
    assert sampler(params, prompt=(1, 2)).pick(row, 0) == 0


def test_presence_counts_a_generated_token_once_and_frequency_each_time() -> None:
    presence = sampler(SamplingParams(temperature=0, presence_penalty=1.5), prompt=(1,))
    frequency = sampler(SamplingParams(temperature=0, frequency_penalty=1.0), prompt=(1,))
    row = row_of(0, 3, 2)
    assert presence.pick(row, 0) == 1  # the prompt's tokens do not count
    assert frequency.pick(row, 0) == 1
    for chooser in (presence, frequency):
        chooser.accept(1)
    assert presence.pick(row, 1) == 2
    assert frequency.pick(row_of(0, 3.1, 2), 1) == 1
    frequency.accept(1)
    assert frequency.pick(row_of(0, 3.1, 2), 2) == 2
    presence.accept(1)
    assert presence.pick(row_of(0, 3.6, 2), 2) == 1


def test_repeat_penalty_counts_prompt_and_generated_tokens_and_never_helps_a_token() -> None:
    chooser = sampler(SamplingParams(temperature=0, repeat_penalty=2.0), prompt=(0, 3, 3))
    assert chooser.pick(row_of(4, 3, 0, 0), 0) == 1
    assert chooser.pick(row_of(-1, -1.5, -5, -1), 0) == 1  # a negative logit is made more so
    chooser.accept(1)
    assert chooser.pick(row_of(4, 3, 1.9, 0), 1) == 0


def test_penalties_hold_for_more_tokens_than_they_made_room_for() -> None:
    chooser = sampler(SamplingParams(temperature=0, presence_penalty=2.0))
    row = np.zeros(300, dtype=np.float32)
    for expected in range(300):
        assert chooser.pick(row, expected) == expected
        chooser.accept(expected)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), OPEN, SamplingParams(repeat_penalty=1.3)])
def test_the_row_is_left_as_it_was(params: SamplingParams) -> None:
    row = random_row(600)
    row[5] = np.nan
    before = row.copy()
    row.setflags(write=False)
    sampler(params, prompt=(1, 2, 3)).pick(row, 0)
    np.testing.assert_array_equal(row, before)


def test_a_continuation_picks_what_the_undisturbed_run_would_have() -> None:
    params = SamplingParams(temperature=1.2, repeat_penalty=1.2, frequency_penalty=0.5)
    rows = [random_row(400, seed) for seed in range(12)]

    def run(chooser: Sampler, first: int) -> list[int]:
        picked = []
        for index in range(first, len(rows)):
            picked.append(chooser.pick(rows[index], index))
            chooser.accept(picked[-1])
        return picked

    whole = run(sampler(params, 7, prompt=(1, 2, 3)), 0)
    resumed = sampler(params, 7, prompt=(1, 2, 3))
    for token in whole[:5]:
        resumed.accept(token)
    assert run(resumed, 5) == whole[5:]


def test_random_numbers_are_pinned_so_that_every_machine_draws_the_same() -> None:
    assert [uniform(0, 0, 0), uniform(7, 0, 1), uniform(-1, 2, 3)] == PINNED
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_random_numbers_differ_in_seed_choice_and_index_and_are_even() -> None:
    numbers = np.array(
        [uniform(seed, choice, i) for seed in range(20) for choice in range(5) for i in range(100)]
    )
    assert len(set(numbers.tolist())) == len(numbers)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    shares = np.histogram(numbers, bins=10, range=(0, 1))[0] / len(numbers)
    assert np.abs(shares - 0.1).max() < 0.015


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature is -1: it must be between 0.0 and 2.0"),
        ({"temperature": math.nan}, "temperature is nan: it must be between 0.0 and 2.0"),
        ({"temperature": math.inf}, "temperature is inf: it must be between 0.0 and 2.0"),
        ({"top_p": 1.1}, "top_p is 1.1: it must be between 0.0 and 1.0"),
        ({"top_k": -1}, "top_k is -1: it must be between 0 and 2147483647"),
        ({"min_p": -0.1}, "min_p is -0.1: it must be between 0.0 and 1.0"),
        ({"seed": 2**64}, "seed is 18446744073709551616: it must be between -9223372036854775808 and 184"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5: it must be between -2.0 and 2.0"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3: it must be between -2.0 and 2.0"),
        ({"repeat_penalty": 0}, "repeat_penalty is 0: it must be between 0.1 and 10.0"),
    ],
)
def test_a_value_out_of_range_is_refused_with_field_value_and_range(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**options)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0, "top_k": 3, "seed": 5}, True),
        ({"temperature": 0.1}, False),
        ({"temperature": 0, "presence_penalty": 0.1}, False),
        ({"temperature": 0, "frequency_penalty": 0.1}, False),
        ({"temperature": 0, "repeat_penalty": 1.1}, False),
    ],
)
def test_greedy_means_the_plain_maximum(options: dict[str, Any], greedy: bool) -> None:
    assert sampler(SamplingParams(**options)).is_greedy is greedy
