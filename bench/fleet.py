"""A fleet for benchmarks: real `llm-ingress` processes, and workers whose engine only takes time.

The ingresses are what an operator starts. A worker is a process with the real worker and the real ring over
mutual TLS; only the engine under it is `TimedEngine`, so that what is measured is the ring and not a model.
"""

import asyncio
import multiprocessing
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.timed import TimedConfig, TimedEngine
from llm_ingress.certs import CertificateFiles
from llm_ingress.pki import Period, parse_names
from llm_ingress.pki_folder import init, issue_worker
from llm_ingress.tls import LiveContext, worker_context
from llm_ingress.wire import Grant, LaneRef
from llm_worker.remote import RemoteRing
from llm_worker.ring import Ring
from llm_worker.worker import Worker, WorkerConfig

SERVER_NAME = "localhost"
DAYS = 60
STOP_S = 30
# What is measured is the ring, and not what it is held to.
NO_BUDGET = ("--max-in-flight-decodes", "1000000")


@dataclass(frozen=True, slots=True)
class Ingress:
    """A running `llm-ingress`."""

    pid: int
    port: int
    control_port: int


@dataclass(frozen=True, slots=True)
class Tally:
    """What one worker was granted since it started, and how much of it it gave back."""

    granted: int
    released: int


class WorkerProcess:
    """The way to one running worker."""

    def __init__(self, parent: Connection, process: multiprocessing.process.BaseProcess) -> None:
        self._parent = parent
        self._process = process

    def until_attached(self) -> None:
        assert self._parent.recv() == "attached"

    def tally(self) -> Tally:
        self._parent.send("tally")
        tally: Tally = self._parent.recv()
        return tally

    def leave(self) -> None:
        self._parent.send("leave")
        self._process.join()


@dataclass(frozen=True, slots=True)
class Fleet:
    """Ingresses, and workers attached to all of them. `folder` holds the ring's certificates."""

    folder: Path
    ingresses: Sequence[Ingress]
    workers: Sequence[WorkerProcess]


def public_tls_flags(folder: Path) -> tuple[str, ...]:
    """What makes an ingress of this fleet serve its clients over TLS, with the certificate it has anyhow."""
    return ("--tls-cert", str(folder / "pki" / "cert.pem"), "--tls-key", str(folder / "pki" / "key.pem"))


@contextmanager
def fleet(
    workers: Sequence[TimedConfig], *flags: str, n_ingresses: int = 1, is_tls: bool = False
) -> Iterator[Fleet]:
    """Start it all, attached; end it all."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        period = Period(datetime.now(UTC), DAYS)
        init(folder / "pki", parse_names(SERVER_NAME), period)
        if is_tls:
            flags = (*flags, *public_tls_flags(folder))
        fronts = [stack.enter_context(ingress(folder, flags)) for _ in range(n_ingresses)]
        ports = [front.control_port for front in fronts]
        processes = []
        for n, engine in enumerate(workers):
            issue_worker(folder / "pki", f"w{n}", folder / f"w{n}", period)
            processes.append(stack.enter_context(_worker(folder / f"w{n}", ports, engine)))
        for process in processes:
            process.until_attached()
        yield Fleet(folder, fronts, processes)


@contextmanager
def ingress(folder: Path, flags: Sequence[str], *, niceness: int = 0) -> Iterator[Ingress]:
    """An `llm-ingress` on free ports. Its log is of no interest here, and would cost it time."""
    command = [
        "nice",
        "-n",
        str(niceness),
        sys.executable,
        "-m",
        "llm_ingress.cli",
        "--port",
        "0",
        "--control-bind",
        "127.0.0.1:0",
    ]
    command += ["--pki", str(folder / "pki"), "--drain-timeout", "1", *NO_BUDGET, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            control, public = (port_in_line(process) for _ in range(2))
            yield Ingress(process.pid, public, control)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_S)


def port_in_line(process: "subprocess.Popen[str]") -> int:
    """The port at the end of the next line that a server prints. Raises: RuntimeError if it says none."""
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r":(\d+)$", line.strip())
    if found is None:
        raise RuntimeError(f"a server did not start: {line!r}")
    return int(found.group(1))


@contextmanager
def _worker(folder: Path, ports: Sequence[int], engine: TimedConfig) -> Iterator[WorkerProcess]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, folder, list(ports), engine))
    process.start()
    worker = WorkerProcess(here, process)
    try:
        yield worker
    finally:
        worker.leave()


# --- in a worker's process ------------------------------------------------------------------------------


class _CountingWorker(Worker):
    """Counts what its rings grant it, and tells when all have taken it in."""

    def __init__(self, engine: TimedEngine, rings: Sequence[RemoteRing]) -> None:
        super().__init__(engine, WorkerConfig(), rings)
        self.n_granted = 0
        self.all_attached = asyncio.Event()

    def on_attached(self, ring: Ring) -> None:
        super().on_attached(ring)
        if all(facts.is_attached for facts in self.snapshot().rings):
            self.all_attached.set()

    def on_grant(self, ring: Ring, grant: Grant) -> None:
        self.n_granted += 1
        super().on_grant(ring, grant)


class _CountingRing(RemoteRing):
    """Counts what its worker gives back."""

    n_released = 0

    def release(self, ref: LaneRef) -> None:
        self.n_released += 1
        super().release(ref)


def _work(parent: Connection, folder: Path, ports: Sequence[int], engine: TimedConfig) -> None:
    asyncio.run(_obey(parent, folder, ports, engine))


async def _obey(parent: Connection, folder: Path, ports: Sequence[int], engine: TimedConfig) -> None:
    """Serve, and tell the parent process what it asks, until told to leave."""
    tls = LiveContext(worker_context, CertificateFiles.in_folder(folder), datetime.now(UTC))
    attended: dict[str, RemoteRing] = {}
    rings = [_CountingRing(f"https://{SERVER_NAME}:{port}", tls, attended=attended) for port in ports]
    worker = _CountingWorker(TimedEngine(engine), rings)
    worker.start()
    await worker.all_attached.wait()
    parent.send("attached")
    while await asyncio.to_thread(parent.recv) != "leave":
        parent.send(Tally(worker.n_granted, sum(ring.n_released for ring in rings)))
    worker.close()
    await asyncio.gather(*(ring.closed() for ring in rings))
