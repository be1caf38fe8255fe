"""`python -m bench relay`: what one relayed chunk costs the serving process, without any engine.

A process of its own serves the real public surface over the real gateway on hypercorn; in it a fake worker
writes, at every step, one event of `--size` bytes with its progress to every stream. A second, light process
reads. So the figure holds hypercorn, sockets, gateway and the fake worker's own calls.
"""

import asyncio
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection

from bench import streams
from bench.attached import CARD, END, HEAD, MAX_STREAMS, PROGRESS
from bench.plots import write_png
from bench.report import print_table, write_json
from bench.sources import Load, obey
from bench.streams import Subject
from llm_ingress.draining import Drain
from llm_ingress.gateway import Budgets, Gateway, GatewayConfig
from llm_ingress.public import Public
from llm_ingress.serving import ServingConfig, listen, serve
from llm_ingress.wire import Grant, Hello, LaneRef


def main(argv: Sequence[str]) -> int:
    """Measure each number of streams and print a table."""
    args = streams.parser("relay", __doc__).parse_args(argv)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=_server, args=(there,))
    server.start()
    assert server.pid is not None
    subject = Subject(name="in one process", pid=server.pid, port=here.recv(), source=here)
    results = streams.compare(args, "http1", [subject])
    here.send(None)
    server.join()
    print_table(streams.HEADER, list(streams.rows(results)))
    write_json(args.json, "relay", vars(args), results)
    write_png(args.png, "one relayed chunk", streams.panels(results))
    return 0


class FakeWorker:
    """Takes every lane, and writes one event to each at every step."""

    def __init__(self, gateway: Gateway) -> None:
        self._workers = gateway.workers
        self._granted: asyncio.Queue[LaneRef] = asyncio.Queue()
        self._n_granted = 0
        self._refs: list[LaneRef] = []
        self._id = gateway.workers.attach(
            Hello(worker="fake", instance_id="i", model=CARD, max_inflight=MAX_STREAMS), self
        )

    # A source of loads.

    async def begin(self, load: Load) -> None:
        self._workers.credit(self._id, load.n_streams, self._n_granted)
        self._refs = [await self._granted.get() for _ in range(load.n_streams)]
        for ref in self._refs:
            self._workers.head(self._id, ref, HEAD)

    def step(self, event: bytes) -> None:
        for ref in self._refs:
            self._workers.body(self._id, ref, event, PROGRESS)

    def end(self) -> None:
        for ref in self._refs:
            self._workers.end(self._id, ref, END)

    # What the gateway says.

    def grant(self, grant: Grant) -> None:
        self._n_granted += 1
        self._granted.put_nowait(grant.ref)

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


def _server(parent: Connection) -> None:
    asyncio.run(_serve(parent))


async def _serve(parent: Connection) -> None:
    budgets = Budgets(max_in_flight_decodes=MAX_STREAMS)
    gateway = Gateway(GatewayConfig(ring_streams=MAX_STREAMS, heartbeat_timeout_s=3600, budgets=budgets))
    config = ServingConfig(port=0)
    listener = listen(config)
    drain = Drain()
    serving = asyncio.create_task(serve(Public(gateway), gateway, listener, config, drain))
    worker = FakeWorker(gateway)
    parent.send(listener.socket.getsockname()[1])
    await obey(parent, worker)
    drain.ask()
    await serving
