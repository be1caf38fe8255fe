"""`python -m bench step-target`: how close steps stay to `--target-step-ms`, and what that costs.

Requests arrive evenly over a few seconds at an engine with a slot for each, with the target and without, in
alternating runs; then the same with a long prompt among them. What counts for the target are the steps taken
while a request waits for admission: before and after, nothing but a lack of work keeps a step short.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import patch

from bench.flags import add_files
from bench.plots import Panel, over, write_png
from bench.prompts import distinct, passage
from bench.report import percentile, print_table, spread, write_json
from bench.targets import alternate
from llm_engine import llama
from llm_engine.backend import LlamaBackend
from llm_engine.config import EngineConfig
from llm_engine.engine import Engine
from llm_engine.generation import Delta, GenerateRequest
from llm_engine.loop import Loop
from llm_engine.plan import Plan
from llm_engine.sampling import SamplingParams

FREE, TARGET = "no target", "target"
LONG_AT = 0.5  # of the time in which the others arrive
COLUMNS = {
    "step p50 / target": ("median", 2),
    "step p95 / target": ("p95", 2),
    "sequences p50": ("n_sequences", 0),
    "tok/s": ("rate", 1),
    "long prompt TTFT ms": ("long_ttft_ms", 0),
}

Figures: TypeAlias = dict[str, float]


class Step(NamedTuple):
    """One turn of the engine: how long, how many sequences, and how many requests there were."""

    seconds: float
    n_sequences: int
    n_asked: int


class Heard(NamedTuple):
    """One answer: seconds from the request to its first token, and tokens."""

    first_s: float
    n_tokens: int


def main(argv: Sequence[str]) -> int:
    """Measure without and with a long prompt, print a table."""
    args = _parser().parse_args(argv)
    results = []
    for n_long in (0, args.prompt_tokens):
        measures = {FREE: _measure(args, 0, n_long), TARGET: _measure(args, args.target, n_long)}
        results.append({"long_prompt": n_long, "runs": alternate(f"{n_long}", args.rounds, measures)})
    show(results)
    write_json(args.json, "step-target", vars(args), results)
    write_png(args.png, f"a target of {args.target} ms", panels(results))
    return 0


def _parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(prog="python -m bench step-target", description=__doc__)
    flags.add_argument("--model", default="smollm2", help="as for llm-engine (%(default)s)")
    flags.add_argument("--threads", type=int, help="of the engine (all cores)")
    flags.add_argument("--target", type=int, default=60, help="milliseconds of a step (60)")
    flags.add_argument("--requests", type=int, default=32, help="that arrive (32)")
    flags.add_argument("--seconds", type=float, default=4, help="over which they do (4)")
    flags.add_argument("--tokens", type=int, default=96, help="of each answer at most (96)")
    flags.add_argument("--prompt-tokens", type=int, default=2000, help="of the long prompt, about (2000)")
    flags.add_argument("--rounds", type=int, default=5, help="alternating runs of each (5)")
    add_files(flags)
    return flags


def _measure(args: argparse.Namespace, target_ms: int, n_long: int) -> Callable[[int], Figures]:
    config = EngineConfig(
        model=args.model,
        threads=args.threads,
        max_inflight=args.requests + 1,
        ctx_size=n_long + 1024,
        target_step_ms=target_ms,
        cache_prompt=False,
    )
    return lambda round_: run(config, args, n_long, f"{round_}")


def run(config: EngineConfig, args: argparse.Namespace, n_long: int, name: str) -> Figures:
    """One run on an engine of its own."""
    with Engine.spawn(config) as engine, _stamped(engine) as steps:
        began = time.perf_counter()
        heard = asyncio.run(_arrive(engine, args, n_long, name))
        rate = sum(each.n_tokens for each in heard) / (time.perf_counter() - began)
    long_ms = {"long_ttft_ms": 1000 * heard[-1].first_s} if n_long else {}
    return figures(steps, args.target / 1000) | long_ms | {"rate": rate}


@contextmanager
def _stamped(engine: Engine) -> Iterator[list[Step]]:
    """What the engine's steps take, from now on."""
    steps: list[Step] = []
    slots: set[int] = set()  # in the calls of a step
    compute, take_step = LlamaBackend.run, Loop.step

    def noted(backend: LlamaBackend, plan: Plan) -> llama.Logits:
        slots.update(part.sequence.slot for part in plan.slices)
        return compute(backend, plan)

    def stamped(loop: Loop) -> bool:
        n_asked, began = engine.capacity().inflight, time.perf_counter()
        if computed := take_step(loop):
            steps.append(Step(time.perf_counter() - began, len(slots), n_asked))
        slots.clear()
        return computed

    with patch.object(LlamaBackend, "run", noted), patch.object(Loop, "step", stamped):
        yield steps


async def _arrive(engine: Engine, args: argparse.Namespace, n_long: int, name: str) -> list[Heard]:
    texts = distinct(args.requests, name)
    arrivals = [(n * args.seconds / args.requests, text) for n, text in enumerate(texts)]
    if n_long:
        arrivals.append((LONG_AT * args.seconds, passage(n_long, name)))
    return await asyncio.gather(*(_ask(engine, text, at_s, args.tokens) for at_s, text in arrivals))


async def _ask(engine: Engine, text: str, at_s: float, n_tokens: int) -> Heard:
    await asyncio.sleep(at_s)
    request = GenerateRequest.user(text, max_tokens=n_tokens, sampling=SamplingParams(temperature=0))
    asked = time.perf_counter()
    times = [time.perf_counter() async for event in engine.submit(request) if isinstance(event, Delta)]
    return Heard(times[0] - asked, len(times))


def figures(steps: Sequence[Step], target_s: float) -> Figures:
    """Of the steps while a request waited. Units: parts of the target, sequences."""
    crowded = [step for step in steps if step.n_asked > step.n_sequences] or list(steps)
    return {
        "median": statistics.median(step.seconds for step in crowded) / target_s,
        "p95": percentile([step.seconds for step in crowded], 95) / target_s,
        "n_sequences": statistics.median(step.n_sequences for step in crowded),
    }


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each load, with the target and without."""
    rows = [
        (result["long_prompt"] or "none", name, *_cells(runs))
        for result in results
        for name, runs in result["runs"].items()
    ]
    print_table(("long prompt", "engine", *COLUMNS), rows)


def _cells(runs: Sequence[Figures]) -> Iterator[str]:
    for figure, digits in COLUMNS.values():
        yield spread([run[figure] for run in runs], digits) if figure in runs[0] else "-"


def panels(results: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Steps and speed over the length of the long prompt."""
    shown = ("step p50 / target", "step p95 / target", "tok/s")
    return [
        Panel(x="tokens of the long prompt", y=label, series=over("long_prompt", COLUMNS[label][0], results))
        for label in shown
    ]
