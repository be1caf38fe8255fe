"""An ingress and a fake worker attached to it over mutual TLS, each a process of its own.

The ingress is the real command without any engine behind it. The worker takes every lane it is granted.
"""

import asyncio
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

from bench.fleet import NO_BUDGET, port_in_line
from bench.sources import MODEL, Load
from llm_ingress.certs import CertificateFiles
from llm_ingress.pki import Period, parse_names
from llm_ingress.pki_folder import init, issue_worker
from llm_ingress.tls import LiveContext, worker_context
from llm_ingress.wire import End, FinishReason, Grant, Head, Hello, LaneRef, ModelCard
from llm_worker.progress import pack_tokens
from llm_worker.remote import RemoteRing
from llm_worker.ring import Ring

CARD = ModelCard(name=MODEL, file="none", n_params=0, n_ctx=4096, fingerprint="f", created=0)
HEAD = Head(status=200, headers=(("content-type", "text/event-stream"), ("cache-control", "no-cache")))
END = End(finish_reason=FinishReason.STOP)
MAX_STREAMS = 1024
PROGRESS = pack_tokens((1,))
_PATIENCE_S = 3600  # between loads the worker is silent


@dataclass(frozen=True, slots=True)
class Attached:
    """The ingress, and the pipe to its worker."""

    pid: int
    port: int
    worker: Connection


@contextmanager
def attached(folder: Path, work: Callable[[Connection, Path, int], None], *, tls: bool) -> Iterator[Attached]:
    """Start an ingress with certificates of `folder`, and a worker that does `work`; end both."""
    command = [sys.executable, "-m", "llm_ingress.cli", "--port", "0", "--control-bind", "127.0.0.1:0"]
    command += ["--pki", str(folder / "pki"), "--ring-streams", str(MAX_STREAMS), *NO_BUDGET]
    command += ["--heartbeat-timeout", str(_PATIENCE_S)]
    if tls:
        command += ["--tls-cert", str(folder / "pki/cert.pem"), "--tls-key", str(folder / "pki/key.pem")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as ingress:
        control_port, port = port_in_line(ingress), port_in_line(ingress)
        context = multiprocessing.get_context("spawn")
        worker, worker_end = context.Pipe()
        process = context.Process(target=work, args=(worker_end, folder / "worker", control_port))
        process.start()
        assert worker.recv() == "attached"
        try:
            yield Attached(ingress.pid, port, worker)
        finally:
            worker.send(None)
            process.join()
            ingress.terminate()


def issue(folder: Path) -> None:
    """Make the certificates of an ingress, which peers use too, and of its worker."""
    period = Period(datetime.now(UTC), 60)
    init(folder / "pki", parse_names("localhost"), period)
    issue_worker(folder / "pki", "bench", folder / "worker", period)


class AttachedWorker:
    """The worker's end: a queue of what is granted, and a source of loads."""

    def __init__(self, folder: Path, control_port: int) -> None:
        tls = LiveContext(worker_context, CertificateFiles.in_folder(folder), datetime.now(UTC))
        self.ring = RemoteRing(f"https://localhost:{control_port}", tls)
        self.grants: asyncio.Queue[LaneRef] = asyncio.Queue()
        self._attached = asyncio.Event()
        self._refs: list[LaneRef] = []

    async def attach(self, parent: Connection) -> None:
        """Attach, and tell the parent process."""
        hello = Hello(worker="bench", instance_id="i", model=CARD, max_inflight=MAX_STREAMS)
        self.ring.attach(hello, self)
        await self._attached.wait()
        parent.send("attached")

    async def leave(self) -> None:
        """End the connection."""
        self.ring.detach()
        await self.ring.closed()

    # A source of loads.

    async def begin(self, load: Load) -> None:
        self.ring.credit(load.n_streams)
        self._refs = [await self.grants.get() for _ in range(load.n_streams)]
        for ref in self._refs:
            self.ring.head(ref, HEAD)

    def step(self, event: bytes) -> None:
        for ref in self._refs:
            self.ring.body(ref, event, PROGRESS)

    def end(self) -> None:
        for ref in self._refs:
            self.ring.end(ref, END)

    # What the ring says.

    def on_attached(self, ring: Ring) -> None:
        self._attached.set()

    def on_grant(self, ring: Ring, grant: Grant) -> None:
        self.grants.put_nowait(grant.ref)

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
