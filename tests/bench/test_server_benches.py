"""The benchmarks of servers: what their figures count, and that they run against a real one."""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import conversation, open_loop, prefill_stall, serve, shared_prefix, threads
from bench.prompts import distinct, passage
from bench.report import percentile
from bench.targets import alternate, named_url, ratios
from tests.bench.seen import answer
from tests.serve.process import LlmServe, running

# --- figures ----------------------------------------------------------------------------------------------


def test_a_percentile_is_a_value_that_enough_others_do_not_exceed() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (0, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([3.0], 99) == 3.0


def test_a_url_has_a_name_and_may_end_in_v1() -> None:
    assert (
        named_url("ours=http://host:80/v1/") == ("ours", "http://host:80") == named_url("ours=http://host:80")
    )
    for text in ("http://host:80", "=http://host", "ours=host:80", "ours=http://"):
        with pytest.raises(argparse.ArgumentTypeError, match="NAME=http"):
            named_url(text)


def test_servers_take_turns() -> None:
    taken: list[tuple[str, int]] = []

    def measure(name: str, n: int) -> int:
        taken.append((name, n))
        return n

    runs = alternate("", 2, {name: partial(measure, name) for name in "ab"})
    assert taken == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert runs == {"a": [0, 1], "b": [0, 1]}


def test_the_last_server_is_what_others_are_compared_with_round_by_round() -> None:
    runs = {"ours": [{"rate": 2.0}, {"rate": 9.0}], "peer": [{"rate": 1.0}, {"rate": 3.0}]}
    assert ratios(runs, "ours", "rate") == [2.0, 3.0]


def test_prompts_repeat_in_a_run_and_have_no_beginning_in_common_with_another() -> None:
    assert distinct(2, "0.a") == distinct(2, "0.a")
    assert passage(200, "0.a") == passage(200, "0.a")
    assert passage(200, "0.a")[:1] != passage(200, "1.a")[:1]
    assert len({*distinct(40, "0.a"), *distinct(40, "1.a")}) == 80


def test_speed_is_over_everything_and_gaps_are_within_an_answer() -> None:
    figures = serve.figures(
        [
            answer(asked_at=10.0, text_at=(11.0, 11.1, 11.2)),
            answer(asked_at=10.0, text_at=(13.0, 13.5), ended_at=14.0),
        ]
    )
    assert figures["rate"] == pytest.approx(5 / 4)
    assert (figures["ttft_p50_ms"], figures["ttft_max_ms"]) == (2000, 3000)
    assert figures["gap_p50_ms"] == pytest.approx(100)
    assert figures["gap_max_ms"] == pytest.approx(500)


def test_each_client_has_messages_of_its_own() -> None:
    first, second = serve.prompts(2, 3, "a")
    assert len(first) == len(second) == 3
    assert len({*first, *second}) == 6


def test_a_wait_is_what_comes_on_top_of_the_idle_server() -> None:
    alone = [answer(text_at=(0.2,))]
    seen = [answer(text_at=(0.1, 0.9)), answer(text_at=(1.2, 1.3)), answer(status=503, ended_at=0.0)]
    figures = open_loop.figures(alone, seen)
    assert (figures["asked"], figures["refused"]) == (3, 1)
    assert figures["wait_max_ms"] == pytest.approx(1000)
    assert figures["wait_p50_ms"] == pytest.approx(500)  # the other was sooner than alone: no wait
    assert figures["gap_max_ms"] == pytest.approx(800)


def test_a_stall_is_a_gap_that_reaches_into_the_long_prompts_time() -> None:
    join = prefill_stall.Join(
        alone=answer(text_at=(2.0,)),
        joining=answer(asked_at=11.0, text_at=(15.0, 15.1), ended_at=15.3, n_prompt=2000),
        streams=[
            answer(asked_at=5.0, text_at=(6.0, 9.0, 9.1, 9.2, 10.9, 12.9, 13.0, 15.2, 15.4, 15.7)),
            answer(asked_at=5.0, text_at=(9.0, 9.1, 9.2)),  # ended; its client has asked again
            answer(asked_at=9.3, text_at=(16.0, 16.3)),
        ],
    )
    figures = prefill_stall.figures(join)
    assert figures["step_ms"] == pytest.approx((2100 / 5 + 300) / 2)  # from 9.0 on; from 15.3 on
    assert figures["gap_ms"] == pytest.approx(2200)  # 13.0 to 15.2; what came later is another matter
    assert figures["ttft_ratio"] == pytest.approx(2)


def test_tokens_that_come_in_one_read_are_no_step_apart() -> None:
    """Where steps are short, most tokens do, and the usual step would be none at all."""
    stream = answer(text_at=[0.0, 0.0, 0.0, 0.1, 0.1, 0.1, 0.3, 0.3, 0.3, 0.6, 0.6, 0.8, 0.8])
    figures = prefill_stall.figures(
        prefill_stall.Join(
            alone=answer(text_at=[1.0]),
            joining=answer(asked_at=0.15, text_at=[0.35], ended_at=0.5),
            streams=[stream],
        )
    )
    assert figures["step_ms"] == pytest.approx((100 / 5 + 200 / 3) / 2)  # 6 tokens before, and 4 after
    assert round(figures["gap_ms"]) == 300


def test_a_long_prompt_that_no_stream_ran_beside_measures_nothing() -> None:
    join = prefill_stall.Join(
        alone=answer(text_at=(2.0,)),
        joining=answer(asked_at=11.0, text_at=(15.0,)),
        streams=[answer(ended_at=9.0)],
    )
    with pytest.raises(RuntimeError, match="no stream"):
        prefill_stall.figures(join)


def test_what_was_cached_was_not_computed() -> None:
    cold = [answer(text_at=(n,), n_prompt=100, n_cached=cached) for n, cached in ((3.0, 90), (2.0, 0))]
    figures = shared_prefix.figures(cold, [answer(text_at=(0.5,), n_prompt=100, n_cached=98)])
    assert (figures["first_ms"], figures["last_ms"], figures["warm_last_ms"]) == (2000, 3000, 500)
    assert (figures["computed"], figures["warm_computed"]) == (110, 2)


# --- runs -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmServe]:
    log = tmp_path_factory.mktemp("bench") / "log"
    # One thread: two that wait for each other would crawl beside anything else on the machine.
    flags = ("--max-inflight", "3", "--ctx-size", "512", "--ring-streams", "16", "--threads", "1")
    with running("--model", str(smollm2), *flags, log=log) as server:
        yield server


@pytest.fixture
def flags(server: LlmServe, files: list[str]) -> list[str]:
    """Of one round against one server, and where its figures go."""
    return ["--url", f"ours={server.url}", "--rounds", "1", *files]


def test_serve_runs(flags: list[str], results: Any, smollm2: Path) -> None:
    load = ["--clients", "2", "--requests", "2", "--tokens", "4"]
    assert serve.main([*flags, *load, "--bare", str(smollm2), "--threads", "1"]) == 0
    (each,) = results()
    assert each["runs"]["ours"][0]["tokens"] == each["runs"]["bare"][0]["tokens"] == 16


def test_open_loop_runs(flags: list[str], results: Any) -> None:
    assert open_loop.main([*flags, "--rate", "4", "--seconds", "1", "--tokens", "4"]) == 0
    (run,) = results()[0]["runs"]["ours"]
    assert run["asked"] > run["refused"] == 0


def test_prefill_stall_runs(flags: list[str], results: Any) -> None:
    assert prefill_stall.main([*flags, "--streams", "2", "--prompt-tokens", "200"]) == 0
    (run,) = results()[0]["runs"]["ours"]
    assert 150 < run["prompt_tokens"] < 300
    assert run["gap_ms"] > 0


def test_shared_prefix_runs(flags: list[str], results: Any) -> None:
    assert shared_prefix.main([*flags, "--requests", "3", "--system-tokens", "100", "--tokens", "2"]) == 0
    (run,) = results()["ours"]
    assert run["computed"] < 2 * run["prompt_tokens"]  # of three prompts
    assert run["warm_computed"] < run["computed"]


def test_conversation_runs(flags: list[str], results: Any) -> None:
    more = ["--conversations", "4", "--history", "100", "--turns", "2", "--tokens", "4"]
    assert conversation.main([*flags, *more]) == 0
    (turns,) = results()["ours"]
    assert turns[1]["prompt_tokens"] > turns[0]["prompt_tokens"] > 80
    assert turns[1]["computed"] < turns[0]["computed"]  # also with fewer slots than conversations


@pytest.mark.usefixtures("smollm2")
def test_threads_runs(files: list[str], results: Any) -> None:
    load = ["--clients", "1", "--tokens", "2", "--rounds", "1", "--busy", "--only", "nobody niced"]
    assert threads.main([*load, *files]) == 0
    (one,) = results()
    assert {name: len(runs) for name, runs in one["runs"].items()} == {"nobody niced": 1, "default": 1}
