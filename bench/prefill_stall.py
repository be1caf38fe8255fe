"""`python -m bench prefill-stall`: what running streams feel while a long prompt joins them.

One long prompt is asked alone. Then `--streams` answers run; once all have done so for some seconds, another
prompt as long joins, and when it has its answer the streams go on for some seconds more. The longest gap is
that of any stream from the moment the long prompt was sent until it has its first text. The usual step is the
mean gap before that and after it, since the streams grow deeper meanwhile; not the median, because where
every core is busy clients are woken by the tick of the machine's clock, and all gaps are multiples of that.

A server may spare its streams at the price of the long prompt, or the other way round: each `--url` is a
point of the plot. To draw the curve of one server, start it several times, with other `--prefill-chunk`.
"""

import argparse
import asyncio
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from bench.answers import Answer, Exchange
from bench.clients import Client, ask, run_load, send
from bench.flags import numbers
from bench.plots import Panel, write_png
from bench.prompts import distinct, greedy, passage, user
from bench.report import print_table, spread, write_json
from bench.targets import Target, alternate, parser, targets

ANSWERS_A_STREAM = 16  # at most, one after the other
UNDISTURBED_S = 3.0  # for which the streams run before the prompt joins, and after its answer
SETTLE_S = 1.0  # for the server to notice that the streams have left
TOKENS_AFTER = 16  # of the long prompt's answer
COLUMNS = {
    "usual step ms": ("step_ms", 1),
    "longest gap ms": ("gap_ms", 0),
    "gap / step": ("gap_ratio", 1),
    "TTFT alone ms": ("alone_ms", 0),
    "TTFT joining ms": ("joining_ms", 0),
    "joining / alone": ("ttft_ratio", 2),
}

Figures: TypeAlias = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """What was seen of one run. The streams' answers end when the clients left."""

    alone: Answer
    joining: Answer
    streams: Sequence[Answer]


def main(argv: Sequence[str]) -> int:
    """Measure each length of the long prompt, print a table."""
    args = _parser().parse_args(argv)
    servers = targets(args)
    results = []
    for n in args.prompt_tokens:
        measures = {server.name: _measure(server, n, args) for server in servers}
        results.append({"prompt_tokens": n, "runs": alternate(f"{n} tokens", args.rounds, measures)})
    print_table(("prompt tokens", "server", *COLUMNS), [row for result in results for row in _rows(result)])
    write_json(args.json, "prefill-stall", vars(args), results)
    write_png(args.png, "a long prompt joins", [_curve(results)])
    return 0


def _parser() -> argparse.ArgumentParser:
    flags = parser("prefill-stall", __doc__)
    flags.add_argument("--streams", type=int, default=4, help="that run already (4)")
    flags.add_argument(
        "--prompt-tokens",
        type=numbers,
        default=[2000],
        help="about, comma separated; the table counts (2000)",
    )
    flags.add_argument(
        "--stream-tokens",
        type=int,
        default=1024,
        help="of each stream's answer, after which it asks again (1024)",
    )
    return flags


def _measure(target: Target, n_prompt: int, args: argparse.Namespace) -> Callable[[int], Figures]:
    return lambda round_: figures(
        run_load(
            _join, target, f"{round_}.{n_prompt}.{args.seed}", n_prompt, args.streams, args.stream_tokens
        )
    )


async def _join(target: Target, run: str, n_prompt: int, n_streams: int, stream_tokens: int) -> Join:
    alone = await ask(target, greedy([user(passage(n_prompt, f"0.{run}"))], TOKENS_AFTER))
    texts = distinct(n_streams * ANSWERS_A_STREAM, run)
    streams = [_Stream(target, texts[i::n_streams], stream_tokens) for i in range(n_streams)]
    await asyncio.gather(*(stream.begin() for stream in streams))
    going_on = [asyncio.create_task(stream.go_on()) for stream in streams]
    await asyncio.sleep(UNDISTURBED_S)
    joining = await ask(target, greedy([user(passage(n_prompt, f"1.{run}"))], TOKENS_AFTER))
    await asyncio.sleep(UNDISTURBED_S)
    for stream, task in zip(streams, going_on, strict=True):
        task.cancel()
        stream.leave()
    await asyncio.sleep(SETTLE_S)
    return Join(
        alone=alone.served(),
        joining=joining.served(),
        streams=[exchange.served() for stream in streams for exchange in stream.exchanges],
    )


class _Stream:
    """A client that always reads an answer: when one ends it asks for the next."""

    def __init__(self, target: Target, texts: Sequence[str], n_tokens: int) -> None:
        self.exchanges: list[Exchange] = []
        self._target = target
        self._bodies = [greedy([user(text)], n_tokens) for text in texts]
        self._client: Client

    async def begin(self) -> None:
        """Ask for the first answer; return when it is under way."""
        await self._ask()
        await self._client.flows()

    async def go_on(self) -> None:
        """Read until cancelled."""
        while self._bodies:
            await self._client.ended()
            await self._ask()

    def leave(self) -> None:
        self._client.leave()

    async def _ask(self) -> None:
        self._client = await send(self._target, self._bodies.pop())
        self.exchanges.append(self._client.exchange)


def figures(join: Join) -> Figures:
    """What one run comes to. Units: milliseconds. Raises: RuntimeError if no stream ran beside the prompt."""
    joined_at, first_at = join.joining.asked_at, join.joining.asked_at + join.joining.first_s
    firsts = [
        answer.text_at[0] for answer in join.streams if answer.text_at and answer.text_at[0] < joined_at
    ]
    before_ms = _mean_gap_ms(join.streams, max(firsts, default=joined_at), joined_at)
    after_ms = _mean_gap_ms(join.streams, join.joining.ended_at, math.inf)
    during_ms = list(_gaps_ms(join.streams, joined_at, first_at))
    if not before_ms or not during_ms or not after_ms:
        raise RuntimeError("no stream ran when the long prompt came, or none after it")
    step_ms, gap_ms = (before_ms + after_ms) / 2, max(during_ms)
    alone_ms, joining_ms = 1000 * join.alone.first_s, 1000 * join.joining.first_s
    return {
        "prompt_tokens": join.joining.n_prompt,
        "step_ms": step_ms,
        "gap_ms": gap_ms,
        "gap_ratio": gap_ms / step_ms,
        "alone_ms": alone_ms,
        "joining_ms": joining_ms,
        "ttft_ratio": joining_ms / alone_ms,
    }


def _gaps_ms(streams: Sequence[Answer], begin: float, end: float) -> Iterator[float]:
    """The gaps of all streams that lie in this time or reach into it; none within what came in one read."""
    for answer in streams:
        for earlier, later in pairwise(dict.fromkeys(answer.text_at)):
            if earlier < end and later > begin:
                yield 1000 * (later - earlier)


def _mean_gap_ms(streams: Sequence[Answer], begin: float, end: float) -> float:
    """Of the gaps within this time; what came in one read counts as many. 0 if there are none."""
    within = [[at for at in answer.text_at if begin <= at <= end] for answer in streams]
    n_gaps = sum(len(times) - 1 for times in within if times)
    return 1000 * sum(times[-1] - times[0] for times in within if times) / n_gaps if n_gaps else 0.0


def _rows(result: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    for name, runs in result["runs"].items():
        cells = (spread([run[figure] for run in runs], digits) for figure, digits in COLUMNS.values())
        yield (f"{statistics.median(run['prompt_tokens'] for run in runs):.0f}", name, *cells)


def _curve(results: Sequence[Mapping[str, Any]]) -> Panel:
    """The long prompt's price over the streams': a point for each length of the prompt."""
    series = {
        name: [
            (statistics.median(run["gap_ratio"] for run in runs), [run["ttft_ratio"] for run in runs])
            for runs in (result["runs"][name] for result in results)
        ]
        for name in results[0]["runs"]
    }
    return Panel(x="longest gap / usual step", y="TTFT joining / alone", series=series)
