"""`python -m bench mixed`: what a step takes that holds a part of a prompt beside sequences that decode.

Bare `llama_decode` with the engine's settings: `--streams` sequences have one token each in it, and a prompt
of which so many tokens are computed already has its next ones, in a call of their own, as in the engine, or
in the same call. What a token of a prompt takes grows with its depth: this is what slices are cut by, and
what a gap of so many usual steps leaves room for.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TypeAlias

from tqdm import tqdm

from bench.bare import BareLoop
from bench.flags import add_files, numbers
from bench.plots import Panel, write_png
from bench.prompts import distinct, passage
from bench.report import print_table, spread, write_json
from llm_engine.config import EngineConfig

Times: TypeAlias = dict[str, dict[int, list[float]]]  # milliseconds, by row and slice

WAYS = APART, TOGETHER = "apart", "together"


def main(argv: Sequence[str]) -> int:
    """Measure each slice at each depth, print a table."""
    args = _parser().parse_args(argv)
    times = _measure(args)
    print(f"ms of a step: {args.streams} sequences decode, and so many tokens of a prompt beside them")
    print_table(
        ("depth", *map(str, args.slices)), [(row, *map(spread, each.values())) for row, each in times.items()]
    )
    write_json(args.json, "mixed", vars(args), times)
    write_png(args.png, f"beside {args.streams} sequences that decode", [_panel(times)])
    return 0


def _parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(prog="python -m bench mixed", description=__doc__)
    flags.add_argument("--model", default="smollm2", help="as for llm-engine (smollm2)")
    flags.add_argument("--threads", type=int, help="of the engine (all cores)")
    flags.add_argument("--n-gpu-layers", type=int, default=0, help="on the GPU, -1 all (0)")
    flags.add_argument("--streams", type=int, default=4, help="sequences that decode (4)")
    flags.add_argument("--depths", type=numbers, default=[0, 500, 1000, 1900], help="(0,500,1000,1900)")
    flags.add_argument("--slices", type=numbers, default=[0, 1, 3, 4, 8, 16, 63], help="(0,1,3,4,8,16,63)")
    flags.add_argument("--rounds", type=int, default=9, help="each slice once (9)")
    add_files(flags)
    return flags


def _measure(args: argparse.Namespace) -> Times:
    n_steps = args.rounds * len(args.slices) * len(args.depths) * len(WAYS)
    config = EngineConfig(
        model=args.model,
        threads=args.threads,
        n_gpu_layers=args.n_gpu_layers,
        max_inflight=args.streams + 1,
        ctx_size=max(args.depths) + max(args.slices) + n_steps + 64,
    )
    times: Times = {f"{depth}, {way}": {n: [] for n in args.slices} for depth in args.depths for way in WAYS}
    with BareLoop(config) as loop:
        prompt = loop.tokenize(passage(2 * config.ctx_size, "mixed"))
        streams = [loop.tokenize(text) for text in distinct(args.streams)]
        last = {i: int(loop.prefill(i, tokens).argmax()) for i, tokens in enumerate(streams)}
        positions = [len(tokens) for tokens in streams]
        for depth in tqdm(args.depths, desc="depths", disable=None, leave=False):
            loop.prefill(args.streams, prompt[:depth])
            for _, n, way in product(range(args.rounds), args.slices, WAYS):
                beside = (args.streams, depth, prompt[depth : depth + n])
                started = time.perf_counter()
                loop.step(last, positions, beside if n and way == TOGETHER else None)
                if n and way == APART:
                    loop.compute(*beside)
                times[f"{depth}, {way}"][n].append(1000 * (time.perf_counter() - started))
                loop.cut(args.streams, depth)
            loop.cut(args.streams, 0)
    return times


def _panel(times: Mapping[str, Mapping[int, Sequence[float]]]) -> Panel:
    series = {f"depth {row}": [*each.items()] for row, each in times.items()}
    return Panel(x="tokens of the prompt", y="ms", series=series)
