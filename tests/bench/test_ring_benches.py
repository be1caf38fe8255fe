"""The benchmarks of the ring: that they run, and that they count what they say."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import balance, fairness, parked
from bench.arrivals import poisson
from bench.fleet import Tally
from tests.bench.seen import answer


def results(path: Path) -> Any:
    return json.loads(path.read_text())["results"]


def test_random_arrivals_repeat_with_their_seed_and_come_at_their_rate() -> None:
    times = list(poisson(100, 50, "a"))
    assert times == list(poisson(100, 50, "a")) == sorted(times)
    assert times != list(poisson(100, 50, "b"))
    assert 4600 < len(times) < 5400
    assert min(times) > 0
    assert max(times) < 50


def test_a_tenant_waits_for_what_is_answered_and_refusals_are_counted() -> None:
    seen = [answer(text_at=(n / 100,), ended_at=n / 100 + 1) for n in range(1, 101)]
    figures = fairness.figures([*seen, answer(status=503, ended_at=9.0)])
    assert (figures["asked"], figures["refused"]) == (101, 1)
    assert figures["worst_ms"] == pytest.approx(1000)
    assert figures["worst_end_ms"] == pytest.approx(2000)
    assert figures["p95_ms"] == pytest.approx(950)


def test_shares_are_of_what_was_served_and_releases_of_what_was_granted() -> None:
    figures = balance.figures([Tally(granted=110, released=10), Tally(granted=300, released=0)])
    assert figures["shares"] == [0.5, 1.5]
    assert figures["release_percent"] == pytest.approx(100 * 10 / 410)


def test_fairness_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = tuple(case for case in fairness.CASES if case.name in (fairness.FAIR, fairness.SHARE_ALONE))
    monkeypatch.setattr(fairness, "CASES", cases)  # each has a fleet to start
    out = tmp_path / "out.json"
    flags = ["--slots", "2", "--service-ms", "50", "--seconds", "0.5", "--runs", "1", "--json", str(out)]
    assert fairness.main([*flags, "--ring-streams", "16"]) == 0
    assert [results(out)[case.name][0]["refused"] for case in cases] == [0, 0]


def test_parked_runs(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--parked", "20", "--warm-up", "5", "--probes", "3", "--runs", "1", "--json", str(out)]
    assert parked.main(flags) == 0
    assert [len(results(out)[over][0]["refused_ms"]) for over in ("HTTP", "TLS")] == [3, 3]


def test_balance_runs(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--workers", "2", "--streams", "4,4", "--slots", "2", "--service-ms", "100", "--seconds", "0.5"]
    assert balance.main([*flags, "--runs", "1", "--json", str(out)]) == 0
    (run,) = results(out)["2"]
    assert sum(run["shares"]) == pytest.approx(2)
