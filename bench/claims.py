"""`python -m bench claims`: how long a request takes to be claimed by a worker over mutual TLS.

By a worker that has room, from the client's first byte to the grant in the worker; of a request that is
parked, from the worker's offer to the grant.
"""

import argparse
import asyncio
import socket
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from bench.attached import END, HEAD, Attached, AttachedWorker, attached, issue
from bench.flags import add_files
from bench.plots import Panel, write_png
from bench.readers import H1_REQUEST
from bench.report import percentile, print_table, write_json
from bench.targets import alternate
from llm_ingress.wire import Grant
from llm_worker.ring import Ring

PARKED_S = 0.01
PERCENTS = (1, 10, 25, 50, 75, 90, 95, 99, 100)


def main(argv: Sequence[str]) -> int:
    """Measure one request after the other, of both kinds in turn, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench claims", description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="of each kind (200)")
    add_files(parser)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        issue(Path(folder))
        with attached(Path(folder), _worker, tls=False) as ring:
            measures = {
                "that finds room": lambda _: _time_a_claim(ring, is_parked=False),
                "that is parked": lambda _: _time_a_claim(ring, is_parked=True),
            }
            times_ms = alternate("claims", args.requests, measures)
    print_table(("claim of a request", "p50 ms", "p99 ms"), [_row(*each) for each in times_ms.items()])
    write_json(args.json, "claims", vars(args), times_ms)
    write_png(args.png, "claims", [_panel(times_ms)])
    return 0


def _panel(times_ms: Mapping[str, Sequence[float]]) -> Panel:
    """How many requests are claimed by when."""
    series = {
        name: [(percent, [percentile(times, percent)]) for percent in PERCENTS]
        for name, times in times_ms.items()
    }
    return Panel(x="percent of requests", y="claimed within ms", series=series)


def _row(name: str, times_ms: list[float]) -> tuple[object, ...]:
    return name, f"{statistics.median(times_ms):.2f}", f"{percentile(times_ms, 99):.2f}"


def _time_a_claim(ring: Attached, *, is_parked: bool) -> float:
    """Return milliseconds."""
    worker = ring.worker
    _tell(worker, "withhold" if is_parked else "offer")
    with socket.create_connection(("127.0.0.1", ring.port)) as connection:
        time.sleep(PARKED_S)  # the offer has reached the ingress, the connection is accepted
        sent_at = time.monotonic()
        connection.sendall(H1_REQUEST)
        if is_parked:
            time.sleep(PARKED_S)
            _tell(worker, "offer")
        worker.send("answer")
        times: tuple[float, float] = worker.recv()
        offered_at, granted_at = times
        while connection.recv(65536):
            pass
    return (granted_at - (offered_at if is_parked else sent_at)) * 1000


def _tell(worker: Connection, word: str) -> None:
    worker.send(word)
    assert worker.recv() == "told"


def _worker(parent: Connection, folder: Path, control_port: int) -> None:
    asyncio.run(_work(parent, _TimedWorker(folder, control_port)))


class _TimedWorker(AttachedWorker):
    """Offers when it is told to, and notes when."""

    offered_at = 0.0
    granted_at = 0.0

    def on_grant(self, ring: Ring, grant: Grant) -> None:
        self.granted_at = time.monotonic()
        super().on_grant(ring, grant)

    def offer(self, n_lanes: int) -> None:
        self.offered_at = time.monotonic()
        self.ring.credit(n_lanes)

    async def answer(self) -> tuple[float, float]:
        """Answer the request that is granted; return when it was offered and granted."""
        ref = await self.grants.get()
        self.ring.head(ref, HEAD)
        self.ring.body(ref, b"data: [DONE]\n\n", b"")
        self.ring.end(ref, END)
        return self.offered_at, self.granted_at


async def _work(parent: Connection, worker: _TimedWorker) -> None:
    await worker.attach(parent)
    while (word := await asyncio.to_thread(parent.recv)) is not None:
        if word == "answer":
            parent.send(await worker.answer())
        else:
            worker.offer(int(word == "offer"))
            parent.send("told")
    await worker.leave()
