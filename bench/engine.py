"""`python -m bench engine`: the engine's decode loop against a bare loop of llama.cpp's C calls.

Both generate greedily from the same prompts on contexts with the same settings, in alternating runs, each
in a process of its own. The figure is tokens per second of the decode phase, in which every sequence is
running: from the last first token to the first last token.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.bare import BareProcess
from bench.flags import add_files, numbers
from bench.plots import Panel, write_png
from bench.prompts import distinct
from bench.report import print_table, spread, write_json
from bench.targets import alternate
from llm_engine.config import EngineConfig
from llm_engine.engine import Engine
from llm_engine.generation import Delta, GenerateRequest, Prepared
from llm_engine.priority import yield_to_decode
from llm_engine.sampling import SamplingParams


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    results = [_compare(args, n) for n in args.batch]
    rows = [(r["batch"], spread(r["bare"]), spread(r["engine"]), spread(r["ratio"], 3)) for r in results]
    print_table(("batch", "bare loop tok/s", "engine tok/s", "engine / bare"), rows)
    write_json(args.json, "engine", vars(args), results)
    write_png(args.png, "decode loop", [_panel(results)])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench engine", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--model", default="smollm2", help="as for llm-engine (default: %(default)s)")
    parser.add_argument(
        "--batch", type=numbers, default=[1, 8, 32], help="sequences, up to 256 (default: 1,8,32)"
    )
    parser.add_argument(
        "--tokens", type=int, default=160, help="tokens for each sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="alternating runs of each (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, help="of each (default: every core)")
    parser.add_argument(
        "--n-gpu-layers", type=int, default=0, help="on the GPU, -1 all (default: %(default)s)"
    )
    add_files(parser)
    return parser


def _compare(args: argparse.Namespace, n: int) -> dict[str, Any]:
    config = EngineConfig(
        model=args.model,
        max_inflight=n,
        ctx_size=512,
        threads=args.threads,
        n_gpu_layers=args.n_gpu_layers,
    )
    with Engine.spawn(config) as engine, BareProcess(config) as bare:
        prompts = [_prepare(engine, text, args.tokens) for text in distinct(n)]
        measures: dict[str, Callable[[int], float]] = {
            "bare": lambda _: _bare_rate(bare, prompts, args.tokens),
            "engine": lambda _: _engine_rate(engine, prompts),
        }
        runs = alternate(f"batch {n}", args.rounds, measures)
    ratios = [
        engine_rate / bare_rate for bare_rate, engine_rate in zip(runs["bare"], runs["engine"], strict=True)
    ]
    return {"batch": n, **runs, "ratio": ratios, "median": statistics.median(ratios)}


def _panel(results: Sequence[dict[str, Any]]) -> Panel:
    series = {name: [(each["batch"], each[name]) for each in results] for name in ("bare", "engine")}
    return Panel(x="sequences", y="tok/s", series=series)


def _prepare(engine: Engine, text: str, n_tokens: int) -> Prepared:
    greedy = SamplingParams(temperature=0)
    return engine.prepare(GenerateRequest.user(text, max_tokens=n_tokens, sampling=greedy))


def _bare_rate(bare: BareProcess, prompts: list[Prepared], n_tokens: int) -> float:
    return bare.run([p.prompt for p in prompts], n_tokens).decode_rate


def _engine_rate(engine: Engine, prompts: list[Prepared]) -> float:
    """Tokens per second while every sequence runs; its reader yields to the decode, as llm-serve's does.

    Raises: RuntimeError if the first had ended when the last began.
    """
    with ThreadPoolExecutor(1, initializer=yield_to_decode) as reader:
        times = reader.submit(lambda: asyncio.run(_token_times(engine, prompts))).result()
    begin = max(each[0] for each in times)
    end = min(each[-1] for each in times)
    if end <= begin:
        raise RuntimeError(f"{len(times)} sequences never ran all together: more --tokens")
    n_tokens = sum(1 for each in times for at in each if begin < at <= end)
    return n_tokens / (end - begin)


async def _token_times(engine: Engine, prompts: list[Prepared]) -> list[list[float]]:
    async def read(prepared: Prepared) -> list[float]:
        return [time.perf_counter() async for event in engine.submit(prepared) if isinstance(event, Delta)]

    return await asyncio.gather(*(read(prepared) for prepared in prompts))
