"""`python -m bench remote`: llm-ingress and one remote llm-worker against llm-serve, with a real model.

The load is that of `serve`; this mode starts what it measures. All processes share the machine; only one of
the two works at a time.
"""

import argparse
import secrets
from collections.abc import Sequence

from bench import serve
from bench.flags import add_files, add_load
from bench.plots import write_png
from bench.report import write_json
from bench.served import llm_serve, remote_worker
from bench.targets import Target, alternate


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    results = []
    for n in args.clients:
        with remote_worker(args.model, n) as remote_port, llm_serve(args.model, n) as whole_port:
            pair = (
                Target(name="remote", port=remote_port, model=args.model),
                Target(name="llm-serve", port=whole_port, model=args.model),
            )
            measures = {target.name: serve.measure(target, n, args) for target in pair}
            results.append({"clients": n, "runs": alternate(f"{n} clients", args.rounds, measures)})
    serve.show(results)
    write_json(args.json, "remote", vars(args), results)
    write_png(args.png, "a remote worker", serve.panels(results))
    return 0


def _parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(prog="python -m bench remote", description=__doc__)
    flags.add_argument("--model", default="smollm2", help="as for llm-serve (smollm2)")
    add_load(flags, [8, 32], 96)
    flags.add_argument("--rounds", type=int, default=5, help="alternating runs of each (5)")
    add_files(flags)
    flags.set_defaults(requests=1, seed=secrets.token_hex(2))
    return flags
