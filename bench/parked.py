"""`python -m bench parked`: what a parked request costs an ingress, and how soon one too many is refused.

A real `llm-ingress` with as many places as there are requests; one worker with one slot, which the first
request keeps. Light clients in a process of their own connect, send a request each and wait. The figure is
the growth of the ingress's resident memory from none parked to all parked, divided by their number, less the
bytes of a request's body. Before it is taken, some requests have come and gone, so that what a server needs
only once is not in it. Memory of the kernel's sockets is not in it either.

With every place taken, further requests are sent one after the other on connections that are open already:
the time is from their first byte to the last of the answer, a 503.
"""

import argparse
import json
import multiprocessing
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from bench.answers import PATH, Exchange
from bench.flags import add_files
from bench.fleet import Fleet, fleet
from bench.plots import Panel, write_png
from bench.prompts import user
from bench.report import percentile, print_table, spread, write_json
from bench.targets import alternate
from bench.timed import MODEL, TimedConfig

FOREVER_S = 86_400.0
PROBE_PAUSE_S = 0.017  # no multiple of it is the ingress's own rhythm
POLL_S = 0.1
PATIENCE_S = 120
LOOPBACK = "127.0.0.1"

Figures: TypeAlias = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Measure plain HTTP and TLS, `--runs` times each, and print a table."""
    args = _parser().parse_args(argv)
    measures = {name: _measure(args, is_tls=name == "TLS") for name in args.over}
    results = alternate(f"{args.parked} parked", args.runs, measures)
    header = ("over", "parked", "RSS KiB each", "private KiB each", "refused in p50 ms", "p99 ms", "worst ms")
    print_table(header, [_row(name, args.parked, runs) for name, runs in results.items()])
    write_json(args.json, "parked", vars(args), results)
    write_png(args.png, f"{args.parked} parked requests", _panels(results))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench parked",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parked", type=int, default=10_000, help="requests (10000)")
    parser.add_argument("--body", type=int, default=200, help="characters of each message (200)")
    parser.add_argument("--warm-up", type=int, default=200, help="requests that come and go before (200)")
    parser.add_argument("--probes", type=int, default=200, help="requests beyond the last place (200)")
    parser.add_argument(
        "--over",
        type=lambda text: text.split(","),
        default=["HTTP", "TLS"],
        help="HTTP, TLS, or both, separated by commas (HTTP,TLS)",
    )
    parser.add_argument("--runs", type=int, default=3, help="measurements of each (3)")
    add_files(parser)
    return parser


def _row(name: str, n_parked: int, runs: Sequence[Figures]) -> tuple[object, ...]:
    def column(figure: Callable[[Figures], float], digits: int = 1) -> str:
        return spread([figure(run) for run in runs], digits)

    return (
        name,
        n_parked,
        column(lambda run: run["rss_kib"]),
        column(lambda run: run["private_kib"]),
        column(lambda run: percentile(run["refused_ms"], 50), 2),
        column(lambda run: percentile(run["refused_ms"], 99), 2),
        column(lambda run: max(run["refused_ms"]), 2),
    )


def _panels(results: Mapping[str, Sequence[Figures]]) -> list[Panel]:
    """Memory and the time to a refusal over each transport."""
    memory = {
        name: [(over, [run[figure] for run in runs]) for over, runs in results.items()]
        for name, figure in (("RSS", "rss_kib"), ("private", "private_kib"))
    }
    refusal = {
        f"p{percent}": [
            (over, [percentile(run["refused_ms"], percent) for run in runs]) for over, runs in results.items()
        ]
        for percent in (50, 99, 100)
    }
    return [
        Panel(x="over", y="KiB a request", series=memory),
        Panel(x="over", y="refused within ms", series=refusal),
    ]


def _measure(args: argparse.Namespace, *, is_tls: bool) -> Callable[[int], Figures]:
    return lambda _: _park(args, is_tls=is_tls)


def _park(args: argparse.Namespace, *, is_tls: bool) -> Figures:
    flags = ("--ring-streams", str(args.parked), "--queue-timeout", str(FOREVER_S))
    with fleet([TimedConfig(slots=1, service_s=FOREVER_S)], *flags, is_tls=is_tls) as serving:
        context = multiprocessing.get_context("spawn")
        clients, end = context.Pipe()
        process = context.Process(target=_clients, args=(end, _door(serving, is_tls), "x" * args.body))
        process.start()
        clients.send(("park", args.warm_up))
        clients.recv()
        clients.send(("leave", 0))
        clients.recv()
        before = memory_kib(serving.ingresses[0].pid)
        clients.send(("park", args.parked))
        n_body_bytes = clients.recv()
        after = memory_kib(serving.ingresses[0].pid)
        clients.send(("probe", args.probes))
        refused_ms = clients.recv()
        clients.send(("end", 0))
        process.join()
    body_kib = n_body_bytes / 1024
    return {
        "rss_kib": (after["Rss"] - before["Rss"]) / args.parked - body_kib,
        "private_kib": (after["Private"] - before["Private"]) / args.parked - body_kib,
        "refused_ms": refused_ms,
    }


def memory_kib(pid: int) -> dict[str, float]:
    """Resident memory of a process, and how much of it no other process shares."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    fields = {name: float(kib) for name, kib in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
    return {"Rss": fields["Rss"], "Private": fields["Private_Clean"] + fields["Private_Dirty"]}


# --- the clients' process --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Door:
    """Where clients come in; `ca` is set where they come over TLS."""

    port: int
    ca: Path | None


def _door(serving: Fleet, is_tls: bool) -> _Door:
    return _Door(serving.ingresses[0].port, serving.folder / "pki" / "ca.pem" if is_tls else None)


def _clients(parent: Connection, door: _Door, text: str) -> None:
    """Do what the parent process says until it says `end`."""
    clients = _Clients(door, text)
    while (order := parent.recv())[0] != "end":
        word, n = order
        parent.send({"park": clients.park, "leave": clients.leave, "probe": clients.probe}[word](n))
    clients.leave(0)


class _Clients:
    """Connections that wait for an answer, and those that are refused one."""

    def __init__(self, door: _Door, text: str) -> None:
        self._port = door.port
        self._tls = None if door.ca is None else ssl.create_default_context(cafile=door.ca)
        self._request = Exchange(
            LOOPBACK, PATH, {"model": MODEL, "messages": [user(text)]}, asked_at=0.0
        ).sent
        self._waiting: list[socket.socket] = []

    def park(self, n: int) -> int:
        """Have `n` requests wait; return the bytes of the body of each."""
        for _ in range(n - len(self._waiting)):
            connection = self._connect()
            connection.sendall(self._request)
            self._waiting.append(connection)
        self._until_open(n)
        return len(self._request.partition(b"\r\n\r\n")[2])

    def leave(self, n: int) -> None:
        """Have all but `n` leave."""
        for connection in self._waiting[n:]:
            connection.close()
        del self._waiting[n:]
        self._until_open(n)

    def probe(self, n: int) -> list[float]:
        """Send `n` requests too many; return the milliseconds each took to be refused."""
        times_ms = []
        for _ in range(n):
            with self._connect() as connection:
                time.sleep(PROBE_PAUSE_S)
                sent_at = time.perf_counter()
                connection.sendall(self._request)
                answer = _read_all(connection)
                times_ms.append((time.perf_counter() - sent_at) * 1000)
            assert answer.startswith(b"HTTP/1.1 503"), answer
            assert b"ring_full" in answer, answer
        return times_ms

    def _connect(self) -> socket.socket:
        connection = socket.create_connection((LOOPBACK, self._port))
        if self._tls is None:
            return connection
        return self._tls.wrap_socket(connection, server_hostname="localhost")

    def _until_open(self, n: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self._n_open() != n:
            assert time.monotonic() < deadline, f"{self._n_open()} of {n} requests are held"
            time.sleep(POLL_S)

    def _n_open(self) -> int:
        with self._connect() as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
            health: dict[str, Any] = json.loads(_read_all(connection).partition(b"\r\n\r\n")[2])
        return int(health["open"])


def _read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))
