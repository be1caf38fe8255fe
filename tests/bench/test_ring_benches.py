"""The benchmarks of the ring: that they run, and that they count what they say."""

from types import ModuleType
from typing import Any

import pytest

from bench import admission, affinity, balance, claims, fairness, parked, relay, ring
from bench.arrivals import poisson
from bench.fleet import Tally
from tests.bench.seen import answer


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


def test_turns_are_counted_by_the_ingress_and_timed_by_their_clients() -> None:
    talk = [answer(text_at=(1.0,)), answer(text_at=(0.1,)), answer(text_at=(0.3,))]
    figures = affinity.figures(
        [talk, talk], {"known": 4, "had_room": 2, "returned_at_once": 1, "returned": 3}
    )
    assert (figures["turns"], figures["had_room"], figures["at_once"], figures["returned"]) == (4, 50, 50, 75)
    assert (figures["first_p50_ms"], figures["ttft_p95_ms"]) == (1000, 300)


def test_fairness_runs(files: list[str], results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = tuple(case for case in fairness.CASES if case.name in (fairness.FAIR, fairness.SHARE_ALONE))
    monkeypatch.setattr(fairness, "CASES", cases)  # each has a fleet to start
    flags = ["--slots", "2", "--service-ms", "50", "--seconds", "0.5", "--runs", "1", "--ring-streams", "16"]
    assert fairness.main([*flags, *files]) == 0
    assert [results()[case.name][0]["refused"] for case in cases] == [0, 0]


def test_parked_runs(files: list[str], results: Any) -> None:
    flags = ["--parked", "20", "--warm-up", "5", "--probes", "3", "--runs", "1"]
    assert parked.main([*flags, *files]) == 0
    assert [len(results()[over][0]["refused_ms"]) for over in ("HTTP", "TLS")] == [3, 3]


def test_admission_runs(files: list[str], results: Any) -> None:
    flags = ["--sessions", "20", "--messages", "10", "--checks", "10", "--runs", "2"]
    assert admission.main([*flags, *files]) == 0
    assert [len(times) for times in results().values()] == [2] * 4


def test_balance_runs(files: list[str], results: Any) -> None:
    flags = ["--workers", "2", "--streams", "4,4", "--slots", "2", "--service-ms", "100", "--seconds", "0.5"]
    assert balance.main([*flags, "--runs", "1", *files]) == 0
    (run,) = results()["2"]
    assert sum(run["shares"]) == pytest.approx(2)


def test_claims_runs(files: list[str], results: Any) -> None:
    assert claims.main(["--requests", "3", *files]) == 0
    assert [len(times) for times in results().values()] == [3, 3]


@pytest.mark.parametrize("mode", [relay, ring])
def test_one_chunk_runs(mode: ModuleType, files: list[str], results: Any) -> None:
    assert mode.main(["--streams", "1,2", "--chunks", "20", "--runs", "1", *files]) == 0
    assert [(each["streams"], len(each["runs"])) for each in results()] == [(1, 1), (2, 1)]


@pytest.mark.model
@pytest.mark.usefixtures("smollm2")
def test_affinity_runs(files: list[str], results: Any) -> None:
    load = ["--conversations", "2", "--turns", "2", "--history", "100", "--tokens", "2", "--pause", "0.1"]
    assert affinity.main([*load, "--runs", "1", *files]) == 0
    (run,) = results()["2"]
    assert (run["turns"], run["had_room"], run["at_once"]) == (2, 100, 100)
