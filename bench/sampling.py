"""`python -m bench sampling`: what choosing the next tokens takes of a step.

Sequences decode together on the real model; in every step the engine's samplers choose from the same rows
of logits once for each set of parameters, and each choice is timed beside the step's `llama_decode`.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

from tqdm import tqdm

from bench.bare import BareLoop
from bench.flags import add_files
from bench.plots import Panel, one_by_one, write_png
from bench.prompts import distinct
from bench.report import print_table, spread, write_json
from llm_engine import llama
from llm_engine.config import EngineConfig
from llm_engine.sampling import Sampler, SamplingParams, argmax_rows

GREEDY = "greedy"
CASES = {
    "top_k 40, top_p 0.95, min_p 0.05": SamplingParams(),
    "top_p 0.95": SamplingParams(top_k=0, min_p=0),
    "temperature 1 alone": SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0),
    "top_k 40 and penalties": SamplingParams(frequency_penalty=0.5, repeat_penalty=1.1),
}


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    config = EngineConfig(
        model=args.model,
        max_inflight=args.batch,
        ctx_size=512,
        threads=args.threads,
        n_gpu_layers=args.n_gpu_layers,
    )
    decode_ms, chosen_ms = _measure(config, args.tokens)
    token_us = {name: [1000 * ms / args.batch for ms in times] for name, times in chosen_ms.items()}
    rows = [
        (
            name,
            spread(token_us[name]),
            f"{100 * statistics.median(times) / statistics.median(decode_ms):.2f} %",
        )
        for name, times in chosen_ms.items()
    ]
    print(f"llama_decode of {args.batch} sequences: {spread(decode_ms)} ms")
    print_table(("parameters", "µs a token", "of llama_decode"), rows)
    write_json(args.json, "sampling", vars(args), {"decode_ms": decode_ms, "chosen_ms": chosen_ms})
    panel = Panel(x="step", y="µs a token", series=one_by_one(token_us))
    write_png(args.png, f"{args.batch} sequences", [panel])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench sampling", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--model", default="smollm2", help="as for llm-engine (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="sequences (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="steps to take (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of llama.cpp (default: every core)")
    parser.add_argument(
        "--n-gpu-layers", type=int, default=0, help="on the GPU, -1 all (default: %(default)s)"
    )
    add_files(parser)
    return parser


def _measure(config: EngineConfig, n_steps: int) -> tuple[list[float], dict[str, list[float]]]:
    """Milliseconds of each step: computing it, and choosing its tokens in each way."""
    decode_ms: list[float] = []
    chosen_ms: dict[str, list[float]] = {GREEDY: [], **{name: [] for name in CASES}}
    with BareLoop(config) as loop:
        prompts = [loop.tokenize(text) for text in distinct(config.n_slots)]
        samplers = {
            name: [Sampler(params, seed, 0, prompt) for seed, prompt in enumerate(prompts)]
            for name, params in CASES.items()
        }
        told, *_ = samplers.values()  # whose choices the sequences go on with
        last = {i: told[i].pick(loop.prefill(i, prompt)[0], 0) for i, prompt in enumerate(prompts)}
        positions = [len(prompt) for prompt in prompts]
        for index in tqdm(range(1, n_steps + 1), desc="steps", disable=None, leave=False):
            started = time.perf_counter()
            rows = loop.step(last, positions)
            decode_ms.append(_ms_since(started))
            chosen_ms[GREEDY].append(_greedy_ms(rows))
            for name, each in samplers.items():
                tokens, ms = _choose(rows, each, index)
                chosen_ms[name].append(ms)
                if each is told:
                    last = dict(enumerate(tokens))
            for each in samplers.values():
                for i, token in last.items():
                    each[i].accept(token)
    return decode_ms, chosen_ms


def _greedy_ms(rows: llama.Logits) -> float:
    started = time.perf_counter()
    argmax_rows(rows).tolist()
    return _ms_since(started)


def _choose(rows: llama.Logits, samplers: list[Sampler], index: int) -> tuple[list[int], float]:
    started = time.perf_counter()
    tokens = [sampler.pick(row, index) for sampler, row in zip(samplers, rows, strict=True)]
    return tokens, _ms_since(started)


def _ms_since(started: float) -> float:
    return 1000 * (time.perf_counter() - started)
