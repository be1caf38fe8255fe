"""`python -m bench affinity`: how many turns of conversations go back to the worker that has their KV.

Real `llm-ingress`, and real `llm-worker`s over mutual TLS. Each conversation begins with a long message; its
turns follow each other after pauses at random, as people's do. With more conversations than slots the holder
of one is often busy when its turn comes: it waits a while, and then goes elsewhere.

Of the turns but the first, by the ingress's own counts: whose holder had room when they came, how many of
those went to it at once, and how many of all went to it in the end; and the time to the first token.
"""

import argparse
import asyncio
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from bench.answers import Answer
from bench.clients import ask, run_load
from bench.flags import add_files, numbers
from bench.plots import Panel, Point, write_png
from bench.prompts import greedy, passage, user
from bench.report import percentile, print_table, spread, write_json
from bench.served import health, remote_workers
from bench.targets import Target, alternate
from llm_engine.config import EngineConfig

COLUMNS = {
    "later turns": ("turns", 0),
    "holder had room %": ("had_room", 1),
    "of these returned at once %": ("at_once", 1),
    "of all returned %": ("returned", 1),
    "TTFT p50 ms": ("ttft_p50_ms", 0),
    "TTFT p95 ms": ("ttft_p95_ms", 0),
    "turn 1 p50 ms": ("first_p50_ms", 0),
}

QUEUE_TIMEOUT_S = 600  # all are answered, however many there are

Figures: TypeAlias = dict[str, float]


def main(argv: Sequence[str]) -> int:
    """Measure each number of conversations `--runs` times and print a table."""
    args = _parser().parse_args(argv)
    measures = {f"{n}": _measure(args, n) for n in args.conversations}
    results = alternate("conversations", args.runs, measures)
    print_table(("conversations", *COLUMNS), [(name, *_cells(runs)) for name, runs in results.items()])
    write_json(args.json, "affinity", vars(args), results)
    write_png(args.png, "turns that go back to who has their KV", _panels(results))
    return 0


def _parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="python -m bench affinity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("--model", default="smollm2", help="as for llm-worker (smollm2)")
    flags.add_argument("--conversations", type=numbers, default=[4, 8, 24], help="at a time (4,8,24)")
    flags.add_argument("--turns", type=int, default=6, help="of each conversation (6)")
    flags.add_argument("--history", type=int, default=400, help="tokens of its first message, about (400)")
    flags.add_argument("--tokens", type=int, default=24, help="of each answer at most (24)")
    flags.add_argument("--pause", type=float, default=2.0, help="seconds before a turn on average (2)")
    flags.add_argument("--workers", type=int, default=2, help="llm-workers (2)")
    flags.add_argument("--slots", type=int, default=2, help="of each worker (2)")
    flags.add_argument("--runs", type=int, default=3, help="of each number of conversations (3)")
    add_files(flags)
    return flags


def _measure(args: argparse.Namespace, n: int) -> Callable[[int], Figures]:
    # Workers that share a machine share its cores: two threads on one would wait for each other's turns.
    n_threads = max(1, EngineConfig(model=args.model).n_threads // args.workers)
    engine = ("--model", args.model, "--max-inflight", f"{args.slots}", "--ctx-size", f"{_n_ctx(args)}")
    ring = ("--ring-streams", f"{n}", "--queue-timeout", f"{QUEUE_TIMEOUT_S}")

    def measure(round_: int) -> Figures:
        with remote_workers(args.workers, (*engine, "--threads", f"{n_threads}"), ring) as port:
            target = Target(port=port, model=args.model)
            answers = run_load(_converse, target, n, args, f"{round_}.{n}")
            return figures(answers, health(port)["affinity"])

    return measure


def _n_ctx(args: argparse.Namespace) -> int:
    """Room for what is said in all turns."""
    return int(args.history * 1.25) + int(args.turns + 1) * int(args.tokens + 40)


async def _converse(target: Target, n: int, args: argparse.Namespace, run: str) -> list[list[Answer]]:
    """Return the answers of each conversation, turn by turn."""
    return await asyncio.gather(*(_conversation(target, args, f"{i}.{run}") for i in range(n)))


async def _conversation(target: Target, args: argparse.Namespace, name: str) -> list[Answer]:
    chance, chat = random.Random(name), [user(passage(args.history, name))]
    answers: list[Answer] = []
    for number in range(args.turns):
        await asyncio.sleep(chance.uniform(0, 2 * args.pause))
        answer = (await ask(target, greedy(chat, args.tokens))).served()
        chat += [{"role": "assistant", "content": answer.text}, user(f"And what came after part {number}?")]
        answers.append(answer)
    return answers


def figures(conversations: Sequence[Sequence[Answer]], counts: Mapping[str, int]) -> Figures:
    """What one run comes to. Units: percent of turns but the first, milliseconds."""
    first = [answers[0].first_s for answers in conversations]
    later = [1000 * answer.first_s for answers in conversations for answer in answers[1:]]
    return {
        "turns": len(later),
        "had_room": 100 * counts["had_room"] / len(later),
        "at_once": 100 * counts["returned_at_once"] / max(1, counts["had_room"]),
        "returned": 100 * counts["returned"] / len(later),
        "ttft_p50_ms": statistics.median(later),
        "ttft_p95_ms": percentile(later, 95),
        "first_p50_ms": 1000 * statistics.median(first),
    }


def _cells(runs: Sequence[Figures]) -> Iterator[str]:
    for figure, digits in COLUMNS.values():
        yield spread([run[figure] for run in runs], digits)


def _panels(results: Mapping[str, Sequence[Figures]]) -> list[Panel]:
    """Over the number of conversations, which of the turns went back, and the wait."""

    def line(figure: str) -> list[Point]:
        return [(int(n), [run[figure] for run in runs]) for n, runs in results.items()]

    x = "conversations"
    returned = {"at once, of those it had room for": line("at_once"), "in all": line("returned")}
    waits = {"a later turn": line("ttft_p50_ms"), "the first": line("first_p50_ms")}
    return [Panel(x=x, y="returned %", series=returned), Panel(x=x, y="TTFT p50 ms", series=waits)]
