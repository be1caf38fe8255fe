"""`python -m bench serve`: servers under a closed loop of streaming clients, in alternating runs.

N clients begin at once; each sends a prompt of its own, reads every token, and sends the next until it has
sent `--requests`. In a round every server gets the same prompts, and no two rounds have one in common.

tok/s is over everything, from the first request to the last token. TTFT is from a request to the first text
of its answer; a gap is the time between one text of an answer and the next. `--bare MODEL` lets a bare loop
of llama.cpp's C calls prefill and decode the same prompts, alone in its process, in turn with the servers.
"""

import argparse
import asyncio
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from bench.answers import Answer, Exchange
from bench.bare import BareProcess
from bench.clients import ask, run_load
from bench.flags import add_load
from bench.plots import Panel, over, write_png
from bench.prompts import distinct, greedy, sampled, user
from bench.report import percentile, print_table, spread, write_json
from bench.targets import Target, alternate, parser, ratios, targets
from llm_engine.config import EngineConfig

COLUMNS = {
    "tok/s": ("rate", 1),
    "TTFT p50 ms": ("ttft_p50_ms", 0),
    "TTFT max ms": ("ttft_max_ms", 0),
    "gap p50 ms": ("gap_p50_ms", 1),
    "gap p99 ms": ("gap_p99_ms", 1),
    "gap max ms": ("gap_max_ms", 0),
}

Body: TypeAlias = dict[str, Any]
Figures: TypeAlias = dict[str, float]


def main(argv: Sequence[str]) -> int:
    """Measure each number of clients, print a table."""
    args = _parser().parse_args(argv)
    servers = targets(args)
    body = sampled if args.sampled else greedy
    results = []
    for n in args.clients:
        with _bare(args, n) as bare:
            measures = bare | {server.name: measure(server, n, args, body) for server in servers}
            results.append({"clients": n, "runs": alternate(f"{n} clients", args.rounds, measures)})
    show(results)
    write_json(args.json, "serve", vars(args), results)
    write_png(args.png, "closed loop", panels(results))
    return 0


def _parser() -> argparse.ArgumentParser:
    flags = parser("serve", __doc__)
    add_load(flags, [1, 8, 32], 128)
    flags.add_argument("--requests", type=int, default=1, help="of each client, one after the other (1)")
    flags.add_argument("--sampled", action="store_true", help="draw tokens as each server does by default")
    flags.add_argument("--bare", metavar="MODEL", help="measure a bare loop with this model beside them")
    flags.add_argument("--ctx-size", type=int, default=512, help="of each sequence of the bare loop (512)")
    flags.add_argument("--threads", type=int, help="of the bare loop (all cores)")
    flags.add_argument("--n-gpu-layers", type=int, default=0, help="of the bare loop (0)")
    return flags


def measure(
    target: Target, n: int, args: argparse.Namespace, body: Callable[..., Body] = greedy
) -> Callable[[int], Figures]:
    """One run of `n` clients. `body` makes a request of messages and a limit of tokens."""

    def run(round_: int) -> Figures:
        each = prompts(n, args.requests, _run(args, n, round_))
        return closed_loop(target, [[body([user(text)], args.tokens) for text in texts] for texts in each])

    return run


def _run(args: argparse.Namespace, n: int, round_: int) -> str:
    """A name that no other run has, what differs first."""
    return f"{round_}.{n}.{args.seed}"


def prompts(n_clients: int, n_requests: int, run: str) -> list[list[str]]:
    """Each client's messages."""
    texts = distinct(n_clients * n_requests, run)
    return [texts[i::n_clients] for i in range(n_clients)]


def closed_loop(target: Target, each: Sequence[Sequence[Body]]) -> Figures:
    """One run: a client for each list of requests. Raises: RuntimeError if one is refused."""
    return figures(run_load(_clients, target, each))


async def _clients(target: Target, each: Sequence[Sequence[Body]]) -> list[Answer]:
    done = await asyncio.gather(*(_client(target, requests) for requests in each))
    return [exchange.served() for exchanges in done for exchange in exchanges]


async def _client(target: Target, requests: Sequence[Body]) -> list[Exchange]:
    return [await ask(target, body) for body in requests]


def figures(answers: Sequence[Answer]) -> Figures:
    """What one run comes to. Units: tokens a second, milliseconds."""
    began_at, ended_at = min(a.asked_at for a in answers), max(a.ended_at for a in answers)
    n_tokens = sum(answer.n_tokens for answer in answers)
    first_ms = [1000 * answer.first_s for answer in answers]
    gaps_ms = [1000 * gap_s for answer in answers for gap_s in answer.gaps_s] or [0.0]
    return {
        "rate": n_tokens / (ended_at - began_at),
        "tokens": n_tokens,
        "ttft_p50_ms": statistics.median(first_ms),
        "ttft_max_ms": max(first_ms),
        "gap_p50_ms": statistics.median(gaps_ms),
        "gap_p99_ms": percentile(gaps_ms, 99),
        "gap_max_ms": max(gaps_ms),
    }


# --- the bare loop ----------------------------------------------------------------------------------------


@contextmanager
def _bare(args: argparse.Namespace, n: int) -> Iterator[dict[str, Callable[[int], Figures]]]:
    """The bare loop as one more measure, if it is asked for."""
    if args.bare is None:
        yield {}
        return
    config = EngineConfig(
        model=args.bare,
        max_inflight=n,
        ctx_size=args.ctx_size,
        threads=args.threads,
        n_gpu_layers=args.n_gpu_layers,
    )
    with BareProcess(config) as loop:
        yield {"bare": lambda round_: _bare_run(loop, prompts(n, args.requests, _run(args, n, round_)), args)}


def _bare_run(loop: BareProcess, each: Sequence[Sequence[str]], args: argparse.Namespace) -> Figures:
    runs = [
        loop.run([loop.tokenize(text) for text in texts], args.tokens) for texts in zip(*each, strict=True)
    ]
    n_tokens = sum(run.n_tokens for run in runs)
    return {"rate": n_tokens / sum(run.prefill_s + run.decode_s for run in runs), "tokens": n_tokens}


# --- what is shown ----------------------------------------------------------------------------------------


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each server and number of clients."""
    *_, reference = results[0]["runs"]
    rows = [
        (result["clients"], name, spread(ratios(result["runs"], name, "rate"), 3), *_cells(runs))
        for result in results
        for name, runs in result["runs"].items()
    ]
    print_table(("clients", "server", f"tok/s / {reference}", *COLUMNS), rows)


def _cells(runs: Sequence[Figures]) -> Iterator[str]:
    for figure, digits in COLUMNS.values():
        yield spread([run[figure] for run in runs], digits) if figure in runs[0] else "-"


def panels(results: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Speed, first token and worst gap over the number of clients."""
    shown = ("tok/s", "TTFT p50 ms", "gap max ms")
    return [
        Panel(x="clients", y=label, series=over("clients", COLUMNS[label][0], results)) for label in shown
    ]
