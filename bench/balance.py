"""`python -m bench balance`: how evenly workers share the requests of several ingresses.

Real `llm-ingress` processes, workers attached to all of them, and so many streams at a time on each ingress:
a client whose answer is complete asks again. With fewer slots than streams every ingress always has somebody
waiting; answers are then shorter by as much, so that about as many requests are served.

A worker offers its free slots to all ingresses; where two of them grant the same slot, one of the two
requests is given back (RELEASE) and goes elsewhere. Figures: the least and the most that one worker served,
where 1 is an equal share; RELEASEs in percent of grants; answers of the second half of the time in percent of
what the slots can give in it.
"""

import argparse
import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from bench.answers import Exchange
from bench.clients import ask, run_load
from bench.flags import add_files, numbers
from bench.fleet import Fleet, Tally, fleet
from bench.plots import Panel, Point, write_png
from bench.prompts import user
from bench.report import print_table, spread, write_json
from bench.targets import Target, alternate
from bench.timed import MODEL, TimedConfig

Figures: TypeAlias = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Measure each number of slots `--runs` times and print a table."""
    args = _parser().parse_args(argv)
    results = alternate("slots", args.runs, {f"{slots}": _measure(args, slots) for slots in args.slots})
    header = (
        "slots of each",
        "least of a share",
        "most of a share",
        "RELEASE % of grants",
        "of capacity %",
        "grants",
    )
    print_table(header, [_row(slots, runs) for slots, runs in results.items()])
    write_json(args.json, "balance", vars(args), results)
    write_png(args.png, "workers of several ingresses", _panels(results))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench balance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--streams",
        type=numbers,
        default=[200, 200],
        help="at a time on each ingress, comma separated (200,200)",
    )
    parser.add_argument("--workers", type=int, default=4, help="attached to all ingresses (4)")
    parser.add_argument(
        "--slots",
        type=numbers,
        default=[100, 25, 4],
        help="of each worker, comma separated (100,25,4)",
    )
    parser.add_argument(
        "--service-ms",
        type=float,
        default=2000,
        help="for an answer with a slot for each stream, half to one and a half of it (2000)",
    )
    parser.add_argument("--seconds", type=float, default=8, help="in which clients ask again (8)")
    parser.add_argument("--runs", type=int, default=3, help="of each number of slots (3)")
    add_files(parser)
    return parser


def _row(slots: str, runs: Sequence[Figures]) -> tuple[object, ...]:
    return (
        slots,
        spread([min(run["shares"]) for run in runs], 2),
        spread([max(run["shares"]) for run in runs], 2),
        spread([run["release_percent"] for run in runs]),
        spread([run["capacity_percent"] for run in runs]),
        f"{statistics.median([run['granted'] for run in runs]):.0f}",
    )


def _panels(results: Mapping[str, Sequence[Figures]]) -> list[Panel]:
    """Shares, what is given back, and what is served, over the slots."""

    def line(figure: Callable[[Figures], float]) -> list[Point]:
        return [(int(slots), [figure(run) for run in runs]) for slots, runs in results.items()]

    shares = {"least": line(lambda run: min(run["shares"])), "most": line(lambda run: max(run["shares"]))}
    released = {"RELEASE % of grants": line(lambda run: run["release_percent"])}
    served = {"of capacity %": line(lambda run: run["capacity_percent"])}
    x = "slots of each worker"
    return [
        Panel(x=x, y="share", series=shares),
        Panel(x=x, y="RELEASE % of grants", series=released),
        Panel(x=x, y="of capacity %", series=served),
    ]


def _measure(args: argparse.Namespace, slots: int) -> Callable[[int], Figures]:
    return lambda _: _share_out(args, slots)


def _share_out(args: argparse.Namespace, slots: int) -> Figures:
    # The same load in about as many requests, however many slots share it.
    service_s = args.service_ms / 1000 * slots * args.workers / sum(args.streams)
    engines = [TimedConfig(slots=slots, service_s=service_s, n_tokens=4, seed=n) for n in range(args.workers)]
    flags = ("--ring-streams", str(max(args.streams)))
    with fleet(engines, *flags, n_ingresses=len(args.streams)) as serving:
        ended_at = _ask(serving, args.streams, args.seconds)
        tallies = [worker.tally() for worker in serving.workers]
    # Where it is steady: not the first answers, which begin together, nor the last.
    n_steady = sum(args.seconds / 2 <= at_s < args.seconds for at_s in ended_at)
    capacity = args.seconds / 2 / service_s * slots * args.workers
    return figures(tallies) | {"capacity_percent": 100 * n_steady / capacity}


def _served(tally: Tally) -> int:
    return tally.granted - tally.released


def figures(tallies: Sequence[Tally]) -> Figures:
    """Each worker's part of what was served, in equal shares, and what was given back."""
    share = sum(map(_served, tallies)) / len(tallies)
    granted = sum(tally.granted for tally in tallies)
    return {
        "shares": [_served(tally) / share for tally in tallies],
        "release_percent": 100 * sum(tally.released for tally in tallies) / granted,
        "granted": granted,
    }


def _ask(serving: Fleet, n_streams: Sequence[int], seconds: float) -> list[float]:
    """Keep so many streams on each ingress, from another process; return when each answer ended."""
    ports = [ingress.port for ingress, n in zip(serving.ingresses, n_streams, strict=True) for _ in range(n)]
    return run_load(_clients, ports, seconds)


async def _clients(ports: Sequence[int], seconds: float) -> list[float]:
    """A client for each port; return the seconds to the end of each answer of theirs."""
    began_at = asyncio.get_running_loop().time()
    asked = await asyncio.gather(*(_client(port, began_at + seconds) for port in ports))
    return [exchange.served().ended_at - began_at for exchanges in asked for exchange in exchanges]


async def _client(port: int, until: float) -> list[Exchange]:
    target = Target(port=port, model=MODEL)
    exchanges: list[Exchange] = []
    while asyncio.get_running_loop().time() < until:
        exchanges.append(await ask(target, {"messages": [user("hi")]}))
    return exchanges
