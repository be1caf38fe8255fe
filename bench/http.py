"""`python -m bench http`: llm-serve through HTTP against the bare loop doing the same prompts and outputs.

N streaming clients in a process of their own send distinct prompts at once and read every token. The bare
loop, alone in its process, prefills the same prompts and decodes as many tokens. Alternating runs; the figure
is tokens per second over everything, from the first request to the last token.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from bench.bare import BareLoop
from bench.prompts import distinct
from bench.report import print_table, spread, write_json
from bench.served import CTX_SIZE, llm_serve, parser, serve_once
from llm_engine.config import EngineConfig


def main(argv: Sequence[str]) -> int:
    args = parser("http", __doc__).parse_args(argv)
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


def _compare(args: argparse.Namespace, n: int) -> dict[str, Any]:
    config = EngineConfig(model=args.model, max_inflight=n, ctx_size=CTX_SIZE)
    bare, served = [], []
    with llm_serve(args.model, n) as port, BareLoop(config) as loop:
        prompts = [loop.tokenize(text) for text in distinct(n)]
        for _ in range(args.rounds):
            run = loop.run(prompts, args.tokens)
            bare.append({"rate": run.total_rate, "tokens": run.n_tokens})
            served.append(serve_once(port, args.model, n, args.tokens))
    ratio = [s["rate"] / b["rate"] for s, b in zip(served, bare, strict=True)]
    return {"clients": n, "bare": bare, "served": served, "ratio": ratio}
