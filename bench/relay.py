"""`python -m bench relay`: what one relayed chunk costs the serving process, without any engine.

A process of its own serves the real public surface over the real gateway on hypercorn; in it a fake worker
writes, at every step, one event of `--size` bytes to every stream. A second, light process reads. The figure
is the serving process's own CPU time, user and system, from the first step to the last, divided by the
events: hypercorn, sockets, gateway and the fake worker's own calls included.
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import selectors
import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from bench.report import print_table, spread, write_json
from llm_ingress.draining import Drain
from llm_ingress.gateway import Gateway, GatewayConfig, Lane
from llm_ingress.public import Public
from llm_ingress.serving import ServingConfig, listen, serve
from llm_ingress.wire import End, FinishReason, Grant, Head, Hello, LaneRef, ModelCard

CARD = ModelCard(name="m", file="none", n_params=0, n_ctx=0, fingerprint="f", created=0)
HEAD = Head(status=200, headers=(("content-type", "text/event-stream"), ("cache-control", "no-cache")))
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(BODY), BODY)
)
WARM_UP_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One measurement: so many streams, so many events in each, one at every step."""

    n_streams: int
    n_chunks: int
    size_bytes: int
    interval_s: float


def main(argv: Sequence[str]) -> int:
    """Measure each number of streams `--runs` times and print a table."""
    args = _parser().parse_args(argv)
    results = []
    for n_streams in args.streams:
        load = Load(
            n_streams=n_streams,
            n_chunks=args.chunks or max(200, 20_000 // n_streams),
            size_bytes=args.size,
            # Slower than the server can relay, so that events are not merged on the way.
            interval_s=args.interval_ms / 1000 + n_streams * 1e-4,
        )
        runs = [_measure(load) for _ in range(args.runs)]
        results.append({"streams": n_streams, "chunks": load.n_chunks, "runs": runs})
    rows = [_row(result) for result in results]
    print_table(("streams", "CPU us per chunk", "of it system", "events a write", "RSS MiB"), rows)
    write_json(args.json, "relay", vars(args), results)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench relay", description=__doc__)
    parser.add_argument(
        "--streams",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[1, 8, 64, 200],
        help="numbers of streams, comma separated (1,8,64,200)",
    )
    parser.add_argument("--chunks", type=int, help="events in each stream (200, or more for few streams)")
    parser.add_argument("--size", type=int, default=190, help="bytes of one event (190)")
    parser.add_argument("--interval-ms", type=float, default=1.0, help="pause between steps, at least (1)")
    parser.add_argument("--runs", type=int, default=5, help="measurements of each number of streams (5)")
    parser.add_argument("--json", help="file for the raw figures")
    return parser


def _row(result: dict[str, Any]) -> tuple[object, ...]:
    runs = result["runs"]
    return (
        result["streams"],
        spread([run["cpu_us"] for run in runs]),
        spread([run["system_us"] for run in runs]),
        spread([run["events_a_write"] for run in runs], 2),
        f"{statistics.median([run['rss_mib'] for run in runs]):.0f}",
    )


def _measure(load: Load) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=_server, args=(there, load))
    server.start()
    port = here.recv()
    client = context.Process(target=read_streams, args=(port, load))
    client.start()
    result: dict[str, float] = here.recv()
    client.join()
    server.join()
    assert client.exitcode == 0, "the client missed events"
    return result


# --- the serving process --------------------------------------------------------------------------------


class CountingGateway(Gateway):
    """Counts how often a client's answer takes what is unread: events written together share their cost."""

    n_takes = 0

    def take(self, lane: Lane) -> bytes:
        self.n_takes += 1
        return super().take(lane)


class FakeWorker:
    """Takes every lane, and writes one event to each at every step."""

    def __init__(self, gateway: CountingGateway, load: Load) -> None:
        self._workers = gateway.workers
        self._load = load
        self._refs: list[LaneRef] = []
        self.all_granted = asyncio.Event()
        hello = Hello(worker="fake", instance_id="i", model=CARD, max_inflight=load.n_streams)
        self._id = gateway.workers.attach(hello, self)
        self._workers.credit(self._id, load.n_streams, 0)

    def grant(self, grant: Grant) -> None:
        self._refs.append(grant.ref)
        if len(self._refs) == self._load.n_streams:
            self.all_granted.set()

    def cancel(self, ref: LaneRef) -> None:
        raise AssertionError(f"{ref} was cancelled: the client did not keep up")

    def pause(self, ref: LaneRef) -> None:
        raise AssertionError(f"{ref} was paused: the client did not keep up")

    def resume(self, ref: LaneRef) -> None:
        pass

    def drain(self) -> None:
        pass

    def close(self, why: str) -> None:
        raise AssertionError(f"the gateway let go of the worker: {why}")

    def begin(self) -> None:
        for ref in self._refs:
            self._workers.head(self._id, ref, HEAD)

    def step(self, event: bytes) -> None:
        for ref in self._refs:
            self._workers.body(self._id, ref, event, b"")

    def end(self) -> None:
        for ref in self._refs:
            self._workers.end(self._id, ref, End(finish_reason=FinishReason.STOP))


def _server(parent: Connection, load: Load) -> None:
    asyncio.run(_serve(parent, load))


async def _serve(parent: Connection, load: Load) -> None:
    gateway = CountingGateway(GatewayConfig(ring_streams=load.n_streams, heartbeat_timeout_s=3600))
    public = Public(gateway)
    config = ServingConfig(port=0)
    listener = listen(config)
    parent.send(listener.socket.getsockname()[1])
    drain = Drain()
    serving = asyncio.create_task(serve(public, gateway, listener, config, drain))
    worker = FakeWorker(gateway, load)
    await worker.all_granted.wait()
    worker.begin()
    parent.send(await _steps(gateway, worker, load))
    worker.end()
    drain.ask()
    await serving


async def _steps(gateway: CountingGateway, worker: FakeWorker, load: Load) -> dict[str, float]:
    """Write every event; what a step has made ready is written to the sockets before the next step is due."""
    event = b"data: " + b"x" * (load.size_bytes - 8) + b"\n\n"
    for _ in range(WARM_UP_STEPS):
        worker.step(event)
        await asyncio.sleep(load.interval_s)
    n_takes = gateway.n_takes
    started = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(load.n_chunks):
        worker.step(event)
        await asyncio.sleep(load.interval_s)
    ended = resource.getrusage(resource.RUSAGE_SELF)
    n_events = load.n_chunks * load.n_streams
    user_s = ended.ru_utime - started.ru_utime
    system_s = ended.ru_stime - started.ru_stime
    return {
        "cpu_us": (user_s + system_s) / n_events * 1e6,
        "system_us": system_s / n_events * 1e6,
        "events_a_write": n_events / (gateway.n_takes - n_takes),
        "rss_mib": ended.ru_maxrss / 1024,
    }


# --- the reading process --------------------------------------------------------------------------------


def read_streams(port: int, load: Load) -> None:
    """Open every stream and read each to its end."""
    poll = selectors.DefaultSelector()
    for _ in range(load.n_streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(REQUEST)
        poll.register(connection.fileno(), selectors.EVENT_READ, connection)
    n_bytes = 0
    while poll.get_map():
        for key, _ in poll.select():
            connection = key.data
            data = connection.recv(65536)
            n_bytes += len(data)
            if not data:
                poll.unregister(key.fd)
                connection.close()
    assert n_bytes > load.n_streams * (load.n_chunks + WARM_UP_STEPS) * load.size_bytes
