"""`python -m bench conversation`: the time to the first token, turn by turn.

`--conversations` that begin with a long message each take turns: all have their first answer, one after the
other, before the first has its second. Where there are fewer slots than conversations, what a slot held has
to come from somewhere else, or is computed anew. Turn 1 is cold; a later turn sends all that went before.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from bench.answers import Answer
from bench.clients import ask, run_load
from bench.plots import Panel, write_png
from bench.prompts import Message, greedy, passage, user
from bench.report import print_table, spread, write_json
from bench.targets import Target, alternate, parser, targets

Figures: TypeAlias = list[dict[str, float]]  # one for each turn


def main(argv: Sequence[str]) -> int:
    """Measure, print a table."""
    args = _parser().parse_args(argv)
    measures = {server.name: _measure(server, args) for server in targets(args)}
    runs = alternate(f"{args.conversations} conversations", args.rounds, measures)
    *_, reference = runs
    header = ("turn", "server", "prompt tokens", "computed", "TTFT p50 ms", "worst ms", "p50 / turn 1")
    print_table(
        (*header, f"p50 / {reference}"), [row for turn in range(args.turns) for row in _rows(runs, turn)]
    )
    write_json(args.json, "conversation", vars(args), runs)
    write_png(args.png, "conversations", [_panel(runs)])
    return 0


def _parser() -> argparse.ArgumentParser:
    flags = parser("conversation", __doc__)
    flags.add_argument("--conversations", type=int, default=1, help="that take turns (1)")
    flags.add_argument("--history", type=int, default=2000, help="tokens of the first message, about (2000)")
    flags.add_argument("--turns", type=int, default=3, help="of each conversation (3)")
    flags.add_argument("--tokens", type=int, default=24, help="of each answer at most (24)")
    return flags


def _measure(target: Target, args: argparse.Namespace) -> Callable[[int], Figures]:
    def measure(round_: int) -> Figures:
        openings = [passage(args.history, f"{n}.{round_}.{args.seed}") for n in range(args.conversations)]
        return [figures(turn) for turn in run_load(_talk, target, openings, args.turns, args.tokens)]

    return measure


async def _talk(target: Target, openings: Sequence[str], n_turns: int, n_tokens: int) -> list[list[Answer]]:
    """Return every conversation's answer of each turn."""
    chats = [[user(opening)] for opening in openings]
    return [[await _turn(target, chat, n, n_tokens) for chat in chats] for n in range(n_turns)]


async def _turn(target: Target, chat: list[Message], number: int, n_tokens: int) -> Answer:
    """One more answer of a chat, which then ends with the next question."""
    answer = (await ask(target, greedy(chat, n_tokens))).served()
    chat += [
        {"role": "assistant", "content": answer.text},
        user(f"And what happened after that, in part {number + 2}?"),
    ]
    return answer


def figures(answers: Sequence[Answer]) -> dict[str, float]:
    """What one turn of all conversations comes to. Units: tokens, milliseconds."""
    first_ms = [1000 * answer.first_s for answer in answers]
    return {
        "prompt_tokens": statistics.median(answer.n_prompt for answer in answers),
        "computed": statistics.median(answer.n_prompt - answer.n_cached for answer in answers),
        "ttft_p50_ms": statistics.median(first_ms),
        "ttft_max_ms": max(first_ms),
    }


def _rows(runs: Mapping[str, Sequence[Figures]], turn: int) -> Iterator[tuple[object, ...]]:
    *_, reference = runs.values()
    for name, each in runs.items():
        turns = [run[turn] for run in each]
        pairs = zip(turns, reference, strict=True)
        yield (
            turn + 1,
            name,
            f"{statistics.median(run['prompt_tokens'] for run in turns):.0f}",
            spread([run["computed"] for run in turns], 0),
            spread([run["ttft_p50_ms"] for run in turns], 0),
            spread([run["ttft_max_ms"] for run in turns], 0),
            spread([run[turn]["ttft_p50_ms"] / run[0]["ttft_p50_ms"] for run in each], 3),
            spread([run["ttft_p50_ms"] / beside[turn]["ttft_p50_ms"] for run, beside in pairs], 2),
        )


def _panel(runs: Mapping[str, Sequence[Figures]]) -> Panel:
    series = {
        name: [
            (number, [turn["ttft_p50_ms"] for turn in turns])
            for number, turns in enumerate(zip(*each, strict=True), 1)
        ]
        for name, each in runs.items()
    }
    return Panel(x="turn", y="TTFT p50 ms", series=series)
