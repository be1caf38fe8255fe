"""`python -m bench shared-prefix`: requests with one long system prompt, all at once.

Cold: nobody has sent this system prompt before, so whoever computes it for each of them anew lets the last
one wait longest. Warm: the same system prompt again, with other questions.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from bench.answers import Answer
from bench.clients import ask_all, run_load
from bench.plots import Panel, write_png
from bench.prompts import distinct, greedy, passage, user
from bench.report import print_table, spread, write_json
from bench.targets import Target, alternate, parser, ratios, targets

Figures: TypeAlias = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Measure, print a table."""
    args = _parser().parse_args(argv)
    measures = {server.name: _measure(server, args) for server in targets(args)}
    runs = alternate(f"{args.requests} requests", args.rounds, measures)
    *_, reference = runs
    header = ("server", "prompt tokens", "computed", "first TTFT ms", "last TTFT ms", f"last / {reference}")
    print_table((*header, "warm: computed", "last TTFT ms"), list(_rows(runs)))
    write_json(args.json, "shared-prefix", vars(args), runs)
    write_png(args.png, "one system prompt, cold", [_panel(runs)])
    return 0


def _parser() -> argparse.ArgumentParser:
    flags = parser("shared-prefix", __doc__)
    flags.add_argument("--requests", type=int, default=16, help="at once (16)")
    flags.add_argument("--system-tokens", type=int, default=1000, help="about; the table counts (1000)")
    flags.add_argument("--tokens", type=int, default=24, help="of each answer at most (24)")
    return flags


def _measure(target: Target, args: argparse.Namespace) -> Callable[[int], Figures]:
    def measure(round_: int) -> Figures:
        run = f"{round_}.{args.seed}"
        system = {"role": "system", "content": passage(args.system_tokens, run)}
        questions = distinct(2 * args.requests, run)
        bodies = [greedy([system, user(question)], args.tokens) for question in questions]
        cold, warm = (
            run_load(ask_all, target, part) for part in (bodies[: args.requests], bodies[args.requests :])
        )
        return figures(cold, warm)

    return measure


def figures(cold: Sequence[Answer], warm: Sequence[Answer]) -> Figures:
    """What one run comes to. Units: tokens, milliseconds."""
    ttfts_ms = sorted(1000 * answer.first_s for answer in cold)
    return {
        "prompt_tokens": statistics.median(answer.n_prompt for answer in cold),
        "computed": _n_computed(cold),
        "ttfts_ms": ttfts_ms,
        "first_ms": ttfts_ms[0],
        "last_ms": ttfts_ms[-1],
        "warm_computed": _n_computed(warm),
        "warm_last_ms": 1000 * max(answer.first_s for answer in warm),
    }


def _n_computed(answers: Sequence[Answer]) -> int:
    return sum(answer.n_prompt - answer.n_cached for answer in answers)


def _rows(runs: Mapping[str, Sequence[Figures]]) -> Iterator[tuple[object, ...]]:
    for name, each in runs.items():
        n_prompt, n_computed, first, last, n_warm, warm_last = (
            [run[figure] for run in each]
            for figure in (
                "prompt_tokens",
                "computed",
                "first_ms",
                "last_ms",
                "warm_computed",
                "warm_last_ms",
            )
        )
        yield (
            name,
            f"{statistics.median(n_prompt):.0f}",
            spread(n_computed, 0),
            spread(first, 0),
            spread(last, 0),
            spread(ratios(runs, name, "last_ms"), 3),
            spread(n_warm, 0),
            spread(warm_last, 0),
        )


def _panel(runs: Mapping[str, Sequence[Figures]]) -> Panel:
    """How many requests have been answered by when."""
    series = {
        name: [(n, times) for n, times in enumerate(zip(*(run["ttfts_ms"] for run in each), strict=True), 1)]
        for name, each in runs.items()
    }
    return Panel(x="requests that have their first text", y="after ms", series=series)
