"""`python -m bench threads`: llm-serve with threads set in other ways than by default, in alternating runs.

The load is that of `serve`; every run has a server of its own, since an idle one whose compute threads spin
would take the cores of the next. `--busy` lets somebody send bodies of 2 MB meanwhile, to be taken apart and
refused: what event loop and preparation have to do besides is what their niceness is for.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from bench import serve
from bench.answers import PATH
from bench.clients import NICENESS
from bench.flags import add_files, add_load
from bench.plots import write_png
from bench.prompts import greedy, user
from bench.report import write_json
from bench.served import llm_serve, remote_worker
from bench.targets import Target, alternate
from llm_engine.config import EngineConfig

SERVE = "import sys; from llm_serve.cli import main; sys.exit(main())"
UNNICED = "import llm_engine.priority as p; p.yield_to_decode = lambda: None; " + SERVE
SWITCHED = "import sys; sys.setswitchinterval(0.0005); " + SERVE
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What is set: in the environment, by what the process runs, by flags."""

    environment: Mapping[str, str] = field(default_factory=dict)
    program: str = SERVE
    flags: tuple[str, ...] = ()

    def served(self, model: str, n: int) -> AbstractContextManager[int]:
        """A server set like that; its port."""
        program = ("-c", self.program)
        return llm_serve(model, n, *self.flags, program=program, environment=self.environment)


DEFAULT = "default"
WAYS: dict[str, Way | None] = {  # None: llm-ingress, and the engine in the process of an llm-worker
    "a thread less than cores": Way(flags=("--threads", f"{max(1, EngineConfig().n_threads - 1)}")),
    "OMP_WAIT_POLICY=passive": Way(environment={"OMP_WAIT_POLICY": "passive"}),
    "OMP_WAIT_POLICY=active": Way(environment={"OMP_WAIT_POLICY": "active"}),
    "OMP_PROC_BIND=true": Way(environment={"OMP_PROC_BIND": "true"}),
    "GOMP_SPINCOUNT=1000": Way(environment={"GOMP_SPINCOUNT": "1000"}),
    "nobody niced": Way(program=UNNICED),
    "switch interval 0.5 ms": Way(program=SWITCHED),
    "engine in its own process": None,
    DEFAULT: Way(),  # last: what the others are compared with
}


def main(argv: Sequence[str]) -> int:
    """Measure each number of clients, print a table."""
    args = _parser().parse_args(argv)
    ways = [name for name in WAYS if name == DEFAULT or not args.only or name in args.only]
    results = []
    for n in args.clients:
        measures = {name: _measure(name, n, args) for name in ways}
        results.append({"clients": n, "runs": alternate(f"{n} clients", args.rounds, measures)})
    serve.show(results)
    write_json(args.json, "threads", vars(args), results)
    write_png(args.png, "threads", serve.panels(results))
    return 0


def _parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(prog="python -m bench threads", description=__doc__)
    flags.add_argument("--model", default="smollm2", help="as for llm-serve (smollm2)")
    add_load(flags, [1, 8], 64)
    flags.add_argument("--rounds", type=int, default=5, help="alternating runs of each (5)")
    flags.add_argument(
        "--only", action="append", choices=tuple(WAYS), help="beside the default; again for more"
    )
    flags.add_argument("--busy", action="store_true", help="somebody sends large bodies meanwhile")
    add_files(flags)
    flags.set_defaults(requests=1, seed=secrets.token_hex(2))
    return flags


def _measure(name: str, n: int, args: argparse.Namespace) -> Callable[[int], serve.Figures]:
    way = WAYS[name]

    def run(round_: int) -> serve.Figures:
        with way.served(args.model, n) if way else remote_worker(args.model, n) as port:
            target = Target(port=port, model=args.model)
            serve.closed_loop(target, [[greedy([user("Say hi.")], 8)]])  # whatever is slow only once
            with _annoyed(target) if args.busy else nullcontext():
                return serve.measure(target, n, args)(round_)

    return run


@contextmanager
def _annoyed(target: Target) -> Iterator[None]:
    """Somebody sends large bodies, one after another."""
    process = multiprocessing.get_context("spawn").Process(target=_annoy, args=(target,), daemon=True)
    process.start()
    time.sleep(SETTLE_S)
    try:
        yield
    finally:
        process.kill()
        process.join()


def _annoy(target: Target) -> None:
    os.nice(NICENESS)
    body = json.dumps({"model": target.model, "messages": [user("so it goes on " * 150_000)]})
    while True:
        connection = http.client.HTTPConnection(target.host, target.port)
        connection.request("POST", PATH, body, {"content-type": "application/json"})
        connection.getresponse().read()
        connection.close()
