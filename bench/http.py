"""`python -m bench http`: llm-serve through HTTP against the bare loop doing the same prompts and outputs.

N streaming clients in a process of their own send distinct prompts at once and read every token. The bare
loop, alone in its process, prefills the same prompts and decodes as many tokens. Alternating runs; the figure
is tokens per second over everything, from the first request to the last token.
"""

import argparse
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench.bare import BareLoop
from bench.clients import Served, ask_all
from bench.prompts import distinct
from bench.report import print_table, spread, write_json
from llm_engine.config import EngineConfig

CTX_SIZE = 512


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    results = [_compare(args, n) for n in args.clients]
    rows = [
        (
            r["clients"],
            spread([run["rate"] for run in r["bare"]]),
            spread([run["rate"] for run in r["served"]]),
            spread(r["ratio"], 3),
            spread([run["ttft_ms"] for run in r["served"]], 0),
        )
        for r in results
    ]
    print_table(("clients", "bare loop tok/s", "llm-serve tok/s", "serve / bare", "TTFT p50 ms"), rows)
    write_json(args.json, "http", vars(args), results)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench http", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="as for llm-serve (smollm2)")
    parser.add_argument(
        "--clients",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[8, 32],
        help="numbers of clients, comma separated (8,32)",
    )
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer (96)")
    parser.add_argument("--rounds", type=int, default=5, help="alternating runs of each (5)")
    parser.add_argument("--json", metavar="FILE", help="file for the raw figures")
    return parser


def _compare(args: argparse.Namespace, n: int) -> dict[str, Any]:
    config = EngineConfig(model=args.model, max_inflight=n, ctx_size=CTX_SIZE)
    bare, served = [], []
    with _server(args.model, n) as port, BareLoop(config) as loop:
        prompts = [loop.tokenize(text) for text in distinct(n)]
        for _ in range(args.rounds):
            run = loop.run(prompts, args.tokens)
            bare.append({"rate": run.total_rate, "tokens": run.n_tokens})
            served.append(_serve_once(args, port, n))
    ratio = [s["rate"] / b["rate"] for s, b in zip(served, bare, strict=True)]
    return {"clients": n, "bare": bare, "served": served, "ratio": ratio}


def _serve_once(args: argparse.Namespace, port: int, n: int) -> dict[str, Any]:
    requests = [
        {
            "model": args.model,
            "temperature": 0,
            "max_tokens": args.tokens,
            "messages": [{"role": "user", "content": text}],
        }
        for text in distinct(n)
    ]
    answers: list[Served] = ask_all("127.0.0.1", port, requests)
    n_tokens = sum(answer.n_tokens for answer in answers)
    return {
        "rate": n_tokens / max(answer.last_s for answer in answers),
        "tokens": n_tokens,
        "ttft_ms": 1000 * statistics.median(answer.first_s for answer in answers),
    }


@contextmanager
def _server(model: str, n: int) -> Iterator[int]:
    """llm-serve in a process of its own, with a slot for every client; its port."""
    command = [sys.executable, "-m", "llm_serve.cli", "--model", model, "--port", "0"]
    command += ["--max-inflight", str(n), "--ctx-size", str(CTX_SIZE), "--ring-streams", str(2 * n)]
    command += ["--no-cache-prompt"]  # the bare loop computes every prompt anew, too
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r":(\d+)$", process.stdout.readline().strip())
        if found is None:
            raise RuntimeError("llm-serve did not start")
        yield int(found.group(1))
    finally:
        process.terminate()
        process.wait()
