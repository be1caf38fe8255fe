"""`python -m bench remote`: llm-ingress and one remote llm-worker against llm-serve, with a real model.

N streaming clients in a process of their own send distinct prompts at once and read every token, of the one
and of the other in turn. All processes share the machine; only one of the two works at a time.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from bench.report import print_table, spread, write_json
from bench.served import llm_serve, parser, remote_worker, serve_once


def main(argv: Sequence[str]) -> int:
    args = parser("remote", __doc__).parse_args(argv)
    results = [_compare(args, n) for n in args.clients]
    rows = [
        (
            result["clients"],
            spread([run["rate"] for run in result["whole"]]),
            spread([run["rate"] for run in result["remote"]]),
            spread(result["ratio"], 3),
            spread([run["ttft_ms"] for run in result["remote"]], 0),
        )
        for result in results
    ]
    print_table(("clients", "llm-serve tok/s", "remote tok/s", "remote / serve", "remote TTFT p50 ms"), rows)
    write_json(args.json, "remote", vars(args), results)
    return 0


def _compare(args: argparse.Namespace, n: int) -> dict[str, Any]:
    whole, remote = [], []
    with llm_serve(args.model, n) as whole_port, remote_worker(args.model, n) as remote_port:
        for _ in range(args.rounds):
            whole.append(serve_once(whole_port, args.model, n, args.tokens))
            remote.append(serve_once(remote_port, args.model, n, args.tokens))
    ratio = [r["rate"] / w["rate"] for r, w in zip(remote, whole, strict=True)]
    return {"clients": n, "whole": whole, "remote": remote, "ratio": ratio}
