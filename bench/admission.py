"""`python -m bench admission`: what it costs to ask whether a request is within the budgets.

Over a real gateway with ten fake workers: the check that refuses a request at once or lets it in, which looks
up who holds its conversation and every budget; and the hashing of a history that comes without a key.
"""

import argparse
import time
from collections.abc import Callable, Sequence

from bench.flags import add_files
from bench.plots import Panel, one_by_one, write_png
from bench.report import print_table, spread, write_json
from bench.targets import alternate
from llm_ingress.conversation import Conversation
from llm_ingress.gateway import Budgets, Gateway, GatewayConfig, LaneRequest
from llm_ingress.wire import End, FinishReason, Grant, Head, Hello, LaneRef, ModelCard

MODEL = "bench"
N_WORKERS = 10
HEAD = Head(status=200, headers=())
END = End(finish_reason=FinishReason.STOP, n_prompt=1000, n_completion=100)
MESSAGE_CHARS = 400


def main(argv: Sequence[str]) -> int:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(prog="python -m bench admission", description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000, help="that live (1000)")
    parser.add_argument("--messages", type=int, default=200, help="of the history that is hashed (200)")
    parser.add_argument("--checks", type=int, default=2000, help="in each run (2000)")
    parser.add_argument("--runs", type=int, default=20, help="of each kind (20)")
    add_files(parser)
    args = parser.parse_args(argv)
    requests = [_request(n) for n in range(max(10, args.sessions))]
    new = _request(-1)
    few, many = _gateway(requests[:10]), _gateway(requests[: args.sessions])
    history = [("user" if n % 2 == 0 else "assistant", "x" * MESSAGE_CHARS) for n in range(args.messages)]
    kinds: dict[str, Callable[[int], object]] = {
        "check, 10 sessions": lambda n: few.spent(requests[n % 10], MODEL, 0.0),
        f"check, {args.sessions} sessions": lambda n: many.spent(requests[n % args.sessions], MODEL, 0.0),
        f"check of a new session beside {args.sessions}": lambda _: many.spent(new, MODEL, 0.0),
        f"hash of {args.messages} messages": lambda _: Conversation.of_messages(history),
    }
    measures = {name: _measure(ask, args.checks) for name, ask in kinds.items()}
    results = alternate("checks", args.runs, measures)
    rows = [(name, spread(times, 2), f"{max(times):.2f}") for name, times in results.items()]
    print_table(("what", "microseconds: median (min-max of runs)", "worst run"), rows)
    write_json(args.json, "admission", vars(args), results)
    write_png(args.png, "admission", [Panel(x="run", y="microseconds", series=one_by_one(results))])
    return 0


def _measure(ask: Callable[[int], object], n_checks: int) -> Callable[[int], float]:
    return lambda _: _time_us(ask, n_checks)


def _time_us(ask: Callable[[int], object], n_checks: int) -> float:
    """Return the mean of a run."""
    began_at = time.perf_counter()
    for n in range(n_checks):
        ask(n)
    return (time.perf_counter() - began_at) / n_checks * 1e6


def _request(n: int) -> LaneRequest:
    conversation = Conversation.of_key(f"c{n}", session=f"c{n}")
    return LaneRequest(
        path="/p", body=b"{}", model=MODEL, request_id="r", tenant="t", conversation=conversation
    )


class _Worker:
    """Answers every lane it is granted."""

    def __init__(self, gateway: Gateway, number: int) -> None:
        card = ModelCard(name=MODEL, file="none", n_params=0, n_ctx=0, fingerprint="f", created=0)
        hello = Hello(worker=f"w{number}", instance_id=f"i{number}", model=card, max_inflight=4)
        self._gateway = gateway
        self._granted: list[LaneRef] = []
        self.n_granted = 0
        self.id = gateway.workers.attach(hello, self)

    def offer(self) -> None:
        self._gateway.workers.credit(self.id, 4, self.n_granted)

    def answer(self) -> None:
        for ref in self._granted:
            self._gateway.workers.head(self.id, ref, HEAD)
            self._gateway.workers.end(self.id, ref, END)
        self._granted.clear()
        self.offer()

    def grant(self, grant: Grant) -> None:
        self.n_granted += 1
        self._granted.append(grant.ref)

    def cancel(self, ref: LaneRef) -> None: ...
    def pause(self, ref: LaneRef) -> None: ...
    def resume(self, ref: LaneRef) -> None: ...
    def drain(self) -> None: ...
    def close(self, why: str) -> None: ...


def _gateway(sessions: Sequence[LaneRequest]) -> Gateway:
    """A gateway whose workers have answered a turn of each of these."""
    n_sessions = len(sessions)
    budgets = Budgets(max_sessions=n_sessions + 1, max_sessions_per_worker=n_sessions + 1)
    gateway = Gateway(GatewayConfig(budgets=budgets), clock=lambda: 0.0)
    workers = [_Worker(gateway, number) for number in range(N_WORKERS)]
    for worker in workers:
        worker.offer()
    for request in sessions:
        gateway.open_lane(request, lambda: None)
        for worker in workers:
            worker.answer()
    assert gateway.snapshot().budgets.sessions == n_sessions
    return gateway
