"""The benchmarks of the engine alone, each run once with little to do, on a model with random weights."""

from pathlib import Path
from typing import Any

import pytest

from bench import engine, mixed, prefix, sampling, step_target

pytestmark = pytest.mark.model


@pytest.fixture
def flags(hybrid_model: Path, files: list[str]) -> list[str]:
    """The model, and where the figures go."""
    return ["--model", str(hybrid_model), *files]


def test_engine_runs(flags: list[str], results: Any) -> None:
    load = ["--batch", "1,2", "--tokens", "32", "--rounds", "2", "--threads", "1"]
    assert engine.main([*flags, *load]) == 0
    assert [each["batch"] for each in results()] == [1, 2]
    assert all(len(each["ratio"]) == 2 and min(each["ratio"]) > 0 for each in results())


def test_mixed_runs(smollm2: Path, flags: list[str], results: Any) -> None:
    load = ["--model", str(smollm2), "--streams", "2", "--depths", "0,80", "--slices", "0,3", "--rounds", "2"]
    assert mixed.main([*flags, *load, "--threads", "1"]) == 0
    assert {(row, n): len(ms) for row, each in results().items() for n, ms in each.items()} == {
        (f"{depth}, {way}", n): 2 for depth in ("0", "80") for way in mixed.WAYS for n in ("0", "3")
    }


def test_sampling_runs(flags: list[str], results: Any) -> None:
    assert sampling.main([*flags, "--batch", "2", "--tokens", "3", "--threads", "1"]) == 0
    assert set(results()["chosen_ms"]) == {sampling.GREEDY, *sampling.CASES}
    assert all(len(times) == 3 for times in results()["chosen_ms"].values())


def test_step_target_runs(flags: list[str], results: Any) -> None:
    load = ["--requests", "3", "--seconds", "0.7", "--tokens", "4", "--prompt-tokens", "200", "--target", "5"]
    assert step_target.main([*flags, *load, "--rounds", "1", "--threads", "1"]) == 0
    short, long = results()
    assert set(short["runs"]) == {step_target.FREE, step_target.TARGET}
    assert long["runs"][step_target.TARGET][0]["long_ttft_ms"] > 0


def test_prefix_runs(flags: list[str], results: Any) -> None:
    assert prefix.main([*flags, "--loads", "alternating", "--rounds", "1"]) == 0
    runs = results()["alternating"]
    reused, anew = (sum(turn["n_cached"] for turn in runs[mode][0]) for mode in ("reused", "anew"))
    assert reused > anew == 0
