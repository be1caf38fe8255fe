"""`python -m bench open-loop`: requests that arrive at random, whatever the server does.

A Poisson process of `--rate` requests a second for `--seconds`, each with a prompt of its own; every server
gets the same arrivals in a round. Times count from when a request was due.

TTFT alone is what a request meets on the idle server, measured before each run. The wait is what its first
text took beyond that: the queue, and whatever ran beside it. A gap is between one text of an answer and the
next, a step of the server.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from bench.answers import Answer
from bench.arrivals import poisson
from bench.clients import ask, ask_when_due, run_load
from bench.plots import Panel, over, write_png
from bench.prompts import distinct, greedy, user
from bench.report import percentile, print_table, spread, write_json
from bench.targets import Target, alternate, parser, targets

N_ALONE = 3
COLUMNS = {
    "TTFT alone ms": "alone_ms",
    "wait p50 ms": "wait_p50_ms",
    "wait p95 ms": "wait_p95_ms",
    "worst wait ms": "wait_max_ms",
    "gap p50 ms": "gap_p50_ms",
    "gap p95 ms": "gap_p95_ms",
    "longest gap ms": "gap_max_ms",
    "worst to the end ms": "end_max_ms",
    "tok/s": "rate",
    "asked": "asked",
    "refused": "refused",
}

Figures: TypeAlias = dict[str, float]


def main(argv: Sequence[str]) -> int:
    """Measure each rate, print a table."""
    args = _parser().parse_args(argv)
    servers = targets(args)
    results = []
    for rate in args.rate:
        measures = {server.name: _measure(server, rate, args) for server in servers}
        results.append({"rate": rate, "runs": alternate(f"{rate} a second", args.rounds, measures)})
    rows = [row for result in results for row in _rows(result)]
    print_table(("rate", "server", *COLUMNS), rows)
    write_json(args.json, "open-loop", vars(args), results)
    panels = [
        Panel(x="requests a second", y=label, series=over("rate", COLUMNS[label], results))
        for label in ("wait p50 ms", "worst wait ms")
    ]
    write_png(args.png, "open loop", panels)
    return 0


def _parser() -> argparse.ArgumentParser:
    flags = parser("open-loop", __doc__)
    flags.add_argument(
        "--rate",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[0.5, 1.0],
        help="requests a second, comma separated (0.5,1)",
    )
    flags.add_argument("--seconds", type=float, default=20, help="of arrivals in each run (20)")
    flags.add_argument("--tokens", type=int, default=64, help="of each answer at most (64)")
    return flags


def _measure(target: Target, rate: float, args: argparse.Namespace) -> Callable[[int], Figures]:
    def measure(round_: int) -> Figures:
        run = f"{round_}.{rate}.{args.seed}"
        times = list(poisson(rate, args.seconds, run)) or [0.0]
        bodies = [greedy([user(text)], args.tokens) for text in distinct(N_ALONE + len(times), run)]
        alone, answers = run_load(
            _arrive, target, bodies[:N_ALONE], list(zip(times, bodies[N_ALONE:], strict=True))
        )
        return figures(alone, answers)

    return measure


async def _arrive(
    target: Target, before: Sequence[Mapping[str, Any]], arrivals: Sequence[tuple[float, Mapping[str, Any]]]
) -> tuple[list[Answer], list[Answer]]:
    alone = [(await ask(target, body)).served() for body in before]
    return alone, await ask_when_due(target, arrivals)


def figures(alone: Sequence[Answer], answers: Sequence[Answer]) -> Figures:
    """What one run comes to; a refusal is counted, not waited for. Units: tokens a second, milliseconds."""
    answered = [answer for answer in answers if not answer.is_refused]
    if not answered:
        raise RuntimeError(f"all of {len(answers)} requests were refused")
    alone_s = statistics.median(answer.first_s for answer in alone)
    waits_ms = [1000 * max(0.0, answer.first_s - alone_s) for answer in answered]
    gaps_ms = [1000 * gap_s for answer in answered for gap_s in answer.gaps_s] or [0.0]
    took_s = max(a.ended_at for a in answered) - min(a.asked_at for a in answered)
    return {
        "alone_ms": 1000 * alone_s,
        "wait_p50_ms": statistics.median(waits_ms),
        "wait_p95_ms": percentile(waits_ms, 95),
        "wait_max_ms": max(waits_ms),
        "gap_p50_ms": statistics.median(gaps_ms),
        "gap_p95_ms": percentile(gaps_ms, 95),
        "gap_max_ms": max(gaps_ms),
        "end_max_ms": 1000 * max(answer.last_s for answer in answered),
        "rate": sum(answer.n_tokens for answer in answered) / took_s,
        "asked": len(answers),
        "refused": len(answers) - len(answered),
    }


def _rows(result: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    for name, runs in result["runs"].items():
        cells = (spread([run[figure] for run in runs], 0) for figure in COLUMNS.values())
        yield (result["rate"], name, *cells)
