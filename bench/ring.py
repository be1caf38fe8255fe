"""`python -m bench ring`: what one chunk costs the ingress when its worker is at the far end of the ring.

Three processes, as in a deployment: the ingress (public surface on hypercorn, gateway, control listener, no
engine); a fake worker over mutual TLS that writes, at every step, one event of `--size` bytes with its
progress to every stream; a light reader. The figure is the ingress process's own CPU time, user and system,
from the first step to the last, divided by the events.

Behind it, how long a request takes to be claimed: by a worker that has room, from the client's first byte to
the grant in the worker; of a request that is parked, from the worker's offer to the grant.
"""

import argparse
import asyncio
import multiprocessing
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.relay import CARD, HEAD, REQUEST, WARM_UP_STEPS, CountingGateway, Load, read_streams
from bench.report import print_table, spread, write_json
from llm_ingress.certs import CertificateFiles
from llm_ingress.control import ControlConfig, serve_control
from llm_ingress.draining import Drain
from llm_ingress.gateway import GatewayConfig
from llm_ingress.pki import Period, parse_names
from llm_ingress.pki_folder import init, issue_worker
from llm_ingress.public import Public
from llm_ingress.serving import ServingConfig, listen, serve
from llm_ingress.tls import LiveContext, control_context, worker_context
from llm_ingress.wire import End, FinishReason, Grant, Hello, LaneRef
from llm_worker.remote import RemoteRing
from llm_worker.ring import Ring

PROGRESS = b"\x01\x02\x03\x04"  # a token's
N_CLAIMS = 200
PARKED_S = 0.01


def main(argv: Sequence[str]) -> int:
    """Measure each number of streams `--runs` times, then the claims, and print tables."""
    args = _parser().parse_args(argv)
    results = []
    for n_streams in args.streams:
        load = Load(
            n_streams=n_streams,
            n_chunks=args.chunks or max(200, 20_000 // n_streams),
            size_bytes=args.size,
            # Slower than the ingress can relay, so that events are not merged on the way.
            interval_s=args.interval_ms / 1000 + n_streams * 1e-4,
        )
        runs = [_measure(load) for _ in range(args.runs)]
        results.append({"streams": n_streams, "chunks": load.n_chunks, "runs": runs})
    print_table(
        ("streams", "CPU us per chunk", "events a write", "RSS MiB"), [_row(result) for result in results]
    )
    claims = _measure_claims()
    print_table(("claim of a request", "p50 ms", "p99 ms"), [_claim_row(*claim) for claim in claims.items()])
    write_json(args.json, "ring", vars(args), {"relay": results, "claims_ms": claims})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench ring", description=__doc__)
    parser.add_argument(
        "--streams",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[1, 8, 64, 200, 500],
        help="numbers of streams, comma separated (1,8,64,200,500)",
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
        spread([run["events_a_write"] for run in runs], 2),
        f"{statistics.median([run['rss_mib'] for run in runs]):.0f}",
    )


def _claim_row(name: str, times_ms: list[float]) -> tuple[object, ...]:
    p50, p99 = statistics.median(times_ms), sorted(times_ms)[int(len(times_ms) * 0.99)]
    return name, f"{p50:.2f}", f"{p99:.2f}"


@dataclass(frozen=True, slots=True)
class Processes:
    """The ingress and the fake worker, and the pipes to them."""

    ingress: Connection
    worker: Connection
    public_port: int


@contextmanager
def _processes(load: Load) -> Iterator[Processes]:
    """Start an ingress and a worker attached to it; end both."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        _issue(Path(folder))
        ingress, ingress_end = context.Pipe()
        worker, worker_end = context.Pipe()
        server = context.Process(target=_ingress, args=(ingress_end, folder, load))
        server.start()
        public_port, control_port = ingress.recv()
        fake = context.Process(target=_worker, args=(worker_end, folder, control_port, load))
        fake.start()
        assert worker.recv() == "attached"
        yield Processes(ingress, worker, public_port)
        worker.send("leave")
        fake.join()
        ingress.send("stop")
        server.join()


def _issue(folder: Path) -> None:
    period = Period(datetime.now(UTC), 60)
    init(folder / "pki", parse_names("localhost"), period)
    issue_worker(folder / "pki", "bench", folder / "worker", period)


def _measure(load: Load) -> dict[str, float]:
    with _processes(load) as processes:
        client = multiprocessing.get_context("spawn").Process(
            target=read_streams, args=(processes.public_port, load)
        )
        client.start()
        processes.worker.send("begin")
        assert processes.worker.recv() == "warm"
        before = _usage(processes.ingress)
        processes.worker.send("go")
        assert processes.worker.recv() == "done"
        after = _usage(processes.ingress)
        processes.worker.send("end")
        client.join()
        assert client.exitcode == 0, "the client missed events"
    n_events = load.n_chunks * load.n_streams
    return {
        "cpu_us": (after["cpu_s"] - before["cpu_s"]) / n_events * 1e6,
        "events_a_write": n_events / (after["n_takes"] - before["n_takes"]),
        "rss_mib": after["rss_mib"],
    }


def _usage(ingress: Connection) -> dict[str, float]:
    ingress.send("usage")
    usage: dict[str, float] = ingress.recv()
    return usage


def _measure_claims() -> dict[str, list[float]]:
    """Return milliseconds to the grant, of requests that find room and of parked ones."""
    at_once, parked = [], []
    with _processes(Load(n_streams=1, n_chunks=0, size_bytes=0, interval_s=0)) as processes:
        for _ in range(N_CLAIMS):
            at_once.append(_time_a_claim(processes, is_parked=False))
        for _ in range(N_CLAIMS):
            parked.append(_time_a_claim(processes, is_parked=True))
    return {"that finds room": at_once, "that is parked": parked}


def _time_a_claim(processes: Processes, *, is_parked: bool) -> float:
    worker = processes.worker
    worker.send("withhold" if is_parked else "offer")
    assert worker.recv() == "told"
    with socket.create_connection(("127.0.0.1", processes.public_port)) as connection:
        time.sleep(PARKED_S)  # the offer has reached the ingress, the connection is accepted
        sent_at = time.monotonic()
        connection.sendall(REQUEST)
        if is_parked:
            time.sleep(PARKED_S)
            worker.send("offer")
            assert worker.recv() == "told"
        worker.send("answer")
        times: tuple[float, float] = worker.recv()
        offered_at, granted_at = times
        while connection.recv(65536):
            pass
    return (granted_at - (offered_at if is_parked else sent_at)) * 1000


# --- the ingress ----------------------------------------------------------------------------------------


def _ingress(parent: Connection, folder: str, load: Load) -> None:
    asyncio.run(_serve_ingress(parent, CertificateFiles.in_folder(Path(folder) / "pki"), load))


async def _serve_ingress(parent: Connection, files: CertificateFiles, load: Load) -> None:
    gateway = CountingGateway(GatewayConfig(ring_streams=load.n_streams))
    tls = LiveContext(control_context, files, datetime.now(UTC)).for_listener()
    control = await serve_control(gateway, tls, ControlConfig(port=0))
    config = ServingConfig(port=0)
    listener = listen(config)
    parent.send((listener.socket.getsockname()[1], control.port))
    drain = Drain()
    asyncio.get_running_loop().add_reader(parent.fileno(), _answer, parent, gateway, drain)
    await serve(Public(gateway), gateway, listener, config, drain)
    await control.close()


def _answer(parent: Connection, gateway: CountingGateway, drain: Drain) -> None:
    if parent.recv() == "stop":
        asyncio.get_running_loop().remove_reader(parent.fileno())
        drain.ask()
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    parent.send(
        {
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "n_takes": gateway.n_takes,
            "rss_mib": usage.ru_maxrss / 1024,
        }
    )


# --- the worker -----------------------------------------------------------------------------------------


class FakeWorker:
    """Takes every lane it is granted, and does what the parent process says."""

    def __init__(self, ring: RemoteRing, load: Load) -> None:
        self._ring = ring
        self._load = load
        self._refs: asyncio.Queue[tuple[LaneRef, float]] = asyncio.Queue()
        self._offered_at = 0.0
        self._attached = asyncio.Event()

    async def obey(self, parent: Connection) -> None:
        """Attach, and do as told until told to leave."""
        hello = Hello(worker="bench", instance_id="i", model=CARD, max_inflight=self._load.n_streams)
        self._ring.attach(hello, self)
        await self._attached.wait()
        parent.send("attached")
        while (word := await asyncio.to_thread(parent.recv)) != "leave":
            if word == "begin":
                await self._relay(parent)
            elif word == "answer":
                ref, granted_at = await self._refs.get()
                parent.send((self._offered_at, granted_at))
                self._finish(ref)
            else:
                self._offered_at = time.monotonic()
                self._ring.credit(int(word == "offer"))
                parent.send("told")
        self._ring.detach()
        await self._ring.closed()

    async def _relay(self, parent: Connection) -> None:
        load, ring = self._load, self._ring
        ring.credit(load.n_streams)
        refs = [(await self._refs.get())[0] for _ in range(load.n_streams)]
        for ref in refs:
            ring.head(ref, HEAD)
        await self._steps(refs, WARM_UP_STEPS)
        parent.send("warm")
        assert await asyncio.to_thread(parent.recv) == "go"
        await self._steps(refs, load.n_chunks)
        parent.send("done")
        assert await asyncio.to_thread(parent.recv) == "end"
        for ref in refs:
            ring.end(ref, End(finish_reason=FinishReason.STOP))

    async def _steps(self, refs: list[LaneRef], n_steps: int) -> None:
        event = b"data: " + b"x" * (self._load.size_bytes - 8) + b"\n\n"
        for _ in range(n_steps):
            for ref in refs:
                self._ring.body(ref, event, PROGRESS)
            await asyncio.sleep(self._load.interval_s)
        await asyncio.sleep(0.2)  # until the last is relayed

    def _finish(self, ref: LaneRef) -> None:
        self._ring.head(ref, HEAD)
        self._ring.body(ref, b"data: [DONE]\n\n", b"")
        self._ring.end(ref, End(finish_reason=FinishReason.STOP))

    def on_attached(self, ring: Ring) -> None:
        self._attached.set()

    def on_grant(self, ring: Ring, grant: Grant) -> None:
        self._refs.put_nowait((grant.ref, time.monotonic()))

    def on_cancel(self, ring: Ring, ref: LaneRef) -> None:
        raise AssertionError(f"{ref} was cancelled: the client did not keep up")

    def on_pause(self, ring: Ring, ref: LaneRef) -> None:
        raise AssertionError(f"{ref} was paused: the client did not keep up")

    def on_resume(self, ring: Ring, ref: LaneRef) -> None:
        pass

    def on_drain(self, ring: Ring) -> None:
        pass

    def on_detached(self, ring: Ring) -> None:
        raise AssertionError("the ring was lost")


def _worker(parent: Connection, folder: str, control_port: int, load: Load) -> None:
    asyncio.run(_work(parent, CertificateFiles.in_folder(Path(folder) / "worker"), control_port, load))


async def _work(parent: Connection, files: CertificateFiles, control_port: int, load: Load) -> None:
    tls = LiveContext(worker_context, files, datetime.now(UTC))
    await FakeWorker(RemoteRing(f"https://localhost:{control_port}", tls), load).obey(parent)
