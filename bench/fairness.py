"""`python -m bench fairness`: what a light tenant waits beside one that offers ten times its share.

Requests arrive in an open loop, whatever the server does, at a real `llm-ingress` whose workers take a known
time for each answer. A tenant's share is half of what the fleet can serve. The light tenant offers `--light`
times its share and the heavy one `--heavy` times, so together they ask for several times what there is.

Wait is the time from when a request was due to the first text of its answer, which comes as soon as a slot
takes it; the service itself is not in it. Four cases, each on a fleet of its own, with the same arrivals:

alone, whole fleet     nobody else is there
alone, half the fleet  nobody else is there, and only the slots that are its share
beside, fair           with the heavy tenant; the ingress tells the two apart
beside, one queue      with the heavy tenant, both under one name: first come, first served

The second is what fairness can promise a tenant that uses its whole share; the first is what it would have if
nobody else were there, and no rule that lets running answers end can give it that while every slot is taken.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench.answers import Answer
from bench.arrivals import evenly, poisson
from bench.clients import ask_when_due, run_load
from bench.flags import add_files
from bench.fleet import fleet
from bench.plots import Panel, write_png
from bench.prompts import user
from bench.report import percentile, print_table, spread, write_json
from bench.targets import Target, alternate
from bench.timed import MODEL, TimedConfig

LIGHT, HEAVY = "light", "heavy"
N_WORKERS = 2
TENANTS = 2
SHARE_ALONE, FAIR = "alone, half the fleet", "beside, fair"


@dataclass(frozen=True, slots=True)
class Case:
    """One way to serve the light tenant."""

    name: str
    is_alone: bool = False
    n_workers: int = N_WORKERS
    is_one_name: bool = False


class Arrival(NamedTuple):
    """A request of a tenant, so many seconds after the first could come; `user` is what it says it is."""

    at_s: float
    tenant: str
    user: str


CASES = (
    Case("alone, whole fleet", is_alone=True),
    Case(SHARE_ALONE, is_alone=True, n_workers=N_WORKERS // 2),
    Case(FAIR),
    Case("beside, one queue", is_one_name=True),
)


def main(argv: Sequence[str]) -> int:
    """Run every case `--runs` times, each run with arrivals of its own, and print a table."""
    args = _parser().parse_args(argv)
    results = alternate("arrivals", args.runs, {case.name: _measure(args, case) for case in CASES})
    header = (
        "case",
        "wait p50 ms",
        "wait p95 ms",
        "worst wait ms",
        "worst to the end ms",
        "asked",
        "refused",
    )
    print_table(header, [_row(name, runs) for name, runs in results.items()])
    print(f"worst wait, {FAIR} / {SHARE_ALONE}: {spread(ratios(results), 2)}")
    write_json(args.json, "fairness", vars(args), results)
    write_png(args.png, "a light tenant", [_panel(results)])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench fairness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--slots", type=int, default=8, help="of each of the two workers (8)")
    parser.add_argument(
        "--service-ms", type=float, default=400, help="for an answer, half to one and a half of it (400)"
    )
    parser.add_argument("--light", type=float, default=1, help="what the light tenant offers, in shares (1)")
    parser.add_argument(
        "--heavy", type=float, default=10, help="what the heavy tenant offers, in shares (10)"
    )
    parser.add_argument(
        "--arrivals",
        choices=("poisson", "even"),
        default="poisson",
        help="of the light tenant; the heavy one's are always at random (poisson)",
    )
    parser.add_argument("--seconds", type=float, default=12, help="of arrivals in each run (12)")
    parser.add_argument("--ring-streams", type=int, default=64, help="of the ingress (64)")
    parser.add_argument("--runs", type=int, default=3, help="of each case (3)")
    add_files(parser)
    return parser


def _row(name: str, runs: Sequence[dict[str, float]]) -> tuple[object, ...]:
    def column(field: str) -> str:
        return spread([run[field] for run in runs], 0)

    waits = (column(field) for field in ("p50_ms", "p95_ms", "worst_ms", "worst_end_ms"))
    return (name, *waits, column("asked"), column("refused"))


def _panel(results: Mapping[str, Sequence[Mapping[str, float]]]) -> Panel:
    """What the light tenant waits in each case."""
    shown = {"p50": "p50_ms", "p95": "p95_ms", "worst": "worst_ms"}
    series = {
        label: [(name.replace(", ", ",\n"), [run[field] for run in runs]) for name, runs in results.items()]
        for label, field in shown.items()
    }
    return Panel(x="case", y="wait ms", series=series)


def _measure(args: argparse.Namespace, case: Case) -> Callable[[int], dict[str, float]]:
    return lambda run: figures(_of_the_light(args, case, run))


def _of_the_light(args: argparse.Namespace, case: Case, run: int) -> list[Answer]:
    """Return what became of the light tenant's requests."""
    service_s = args.service_ms / 1000
    engines = [TimedConfig(slots=args.slots, service_s=service_s, seed=n) for n in range(case.n_workers)]
    flags = ("--tenant-by", "user", "--ring-streams", str(args.ring_streams))
    with fleet(engines, *flags) as serving:
        target = Target(port=serving.ingresses[0].port, model=MODEL)
        arrivals = _arrivals(args, case, run)
        bodies = [(each.at_s, {"user": each.user, "messages": [user("hi")]}) for each in arrivals]
        answers = run_load(ask_when_due, target, bodies)
    pairs = zip(arrivals, answers, strict=True)
    return [answer for arrival, answer in pairs if arrival.tenant == LIGHT]


def _arrivals(args: argparse.Namespace, case: Case, run: int) -> list[Arrival]:
    """The light tenant's are the same in every case of a run."""
    share = N_WORKERS * args.slots / (args.service_ms / 1000) / TENANTS
    light_rate, heavy_rate = args.light * share, args.heavy * share
    light = (
        evenly(light_rate, args.seconds)
        if args.arrivals == "even"
        else poisson(light_rate, args.seconds, f"{LIGHT} {run}")
    )
    heavy = () if case.is_alone else poisson(heavy_rate, args.seconds, f"{HEAVY} {run}")
    name: Callable[[str], str] = (lambda _: "everybody") if case.is_one_name else str
    return [
        *(Arrival(at_s, LIGHT, name(LIGHT)) for at_s in light),
        *(Arrival(at_s, HEAVY, name(HEAVY)) for at_s in heavy),
    ]


def ratios(results: Mapping[str, Sequence[Mapping[str, float]]]) -> list[float]:
    """How often, in each run, the worst wait beside the other contains the worst with the share alone."""
    pairs = zip(results[FAIR], results[SHARE_ALONE], strict=True)
    return [fair["worst_ms"] / alone["worst_ms"] for fair, alone in pairs]


def figures(light: Sequence[Answer]) -> dict[str, Any]:
    """What the light tenant met. Waits are of what was answered; a refusal is counted, not waited for."""
    answered = [answer for answer in light if not answer.is_refused]
    waits_ms = [answer.first_s * 1000 for answer in answered]
    return {
        "p50_ms": statistics.median(waits_ms),
        "p95_ms": percentile(waits_ms, 95),
        "worst_ms": max(waits_ms),
        "worst_end_ms": max(answer.last_s for answer in answered) * 1000,
        "asked": len(light),
        "refused": len(light) - len(answered),
    }
