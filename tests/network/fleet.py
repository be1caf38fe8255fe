"""Real ingresses and workers, each a process of its own on loopback, with real TLS and the real model.

    ingress = await fleet.ingress()                      # started, and serving
    worker = await fleet.worker("gpu-1", ingress)        # started, loaded, and attached
    fleet.new_worker("gpu-2", ingress).launch()          # not waited for
    await worker.stop(); await worker.kill(); worker.freeze(); worker.thaw(); await worker.start()
    await ingress.until(lambda health: health["open"] == 0); worker.lines("attached")

A process keeps its command line, its ports and its log over restarts. Waiting is always for something that a
process tells (`/health`, `/ready`, its log, its end), never for time to pass.
Called by: conftest.py, which makes a `fleet` for each test and looks through its logs afterwards.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.error import URLError
from urllib.request import urlopen

from tests.network.line import Line

ROOT = Path(__file__).parent.parent.parent
LOOPBACK = "127.0.0.1"
PATIENCE_S = 60.0  # for what must come; nothing waits so long unless something is wrong
POLL_S = 0.02
# Below the range that outgoing connections take their ports from: a port stays free while its owner is down.
PORTS = range(20000, 32000)
FAULTS = ("Traceback", " ERROR ", "Task exception was never retrieved")
MODEL = "test-model"  # an alias that every worker has, whatever its file is called
WORKER_FLAGS = ("--ctx-size", "512", "--max-inflight", "2", "--threads", "1", "--alias", MODEL)

Health: TypeAlias = dict[str, Any]
T = TypeVar("T")


def command(module: str, *arguments: str) -> list[str]:
    """The command line of one of our commands, as this working tree has it."""
    return [sys.executable, "-m", f"{module}.cli", *arguments]


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one of our commands to its end."""
    return subprocess.run(
        command(module, *arguments),
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def certs(*arguments: str | Path) -> str:
    """What `llm-ingress certs` prints; it must not fail."""
    done = run("llm_ingress", "certs", *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return done.stdout


def free_port() -> int:
    """A port that nobody listens on."""
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
        return port


async def until(holds: Callable[[], T], what: object = "", within_s: float = PATIENCE_S) -> T:
    """Wait until something is the case, and return it; `what` tells what was waited for, if it never is."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not (value := holds()):
        assert asyncio.get_running_loop().time() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(POLL_S)
    return value


class Process:
    """One of our commands: started, ended in every way there is, and started again."""

    def __init__(
        self, name: str, arguments: list[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._arguments = arguments
        self._environment = {**os.environ, **(environment or {})}
        self._popen: subprocess.Popen[bytes] | None = None
        self._n_forgotten = 0  # lines of its log

    def __str__(self) -> str:
        return self.name

    # -- life and death --

    def launch(self) -> None:
        """Start it, and do not wait."""
        assert not self.is_running, f"{self} runs already"
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                self._arguments, stdout=log, stderr=log, cwd=ROOT, env=self._environment
            )

    async def start(self) -> None:
        """Start it; returns when it serves."""
        self.launch()
        await self.until_up()

    async def until_up(self) -> None:
        """Wait until it serves."""
        raise NotImplementedError

    async def stop(self) -> int:
        """SIGTERM; returns its exit status."""
        self.signal(signal.SIGTERM)
        return await self.exit_status()

    async def kill(self) -> int:
        """SIGKILL; it is gone when this returns."""
        self.signal(signal.SIGKILL)
        return await self.exit_status()

    def freeze(self) -> None:
        """SIGSTOP: its sockets stay open, and it does nothing."""
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    async def exit_status(self) -> int:
        """Wait for its end."""
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._popen is not None, f"{self} was never started"
        return self._popen

    @property
    def is_running(self) -> bool:
        """Whether it has started and not ended; a frozen one runs."""
        return self._popen is not None and self._popen.poll() is None

    # -- what it says --

    def lines(self, *words: str) -> list[str]:
        """The lines of its log that hold all of these words."""
        if not self.log.exists():
            return []
        lines = self.log.read_text().splitlines()[self._n_forgotten :]
        return [line for line in lines if all(word in line for word in words)]

    def forget(self) -> None:
        """Look at nothing any more that it has said so far."""
        self._n_forgotten += len(self.lines())

    async def until_says(self, *words: str, n: int = 1, within_s: float = PATIENCE_S) -> list[str]:
        """Wait for `n` lines of its log that hold all of these words."""

        def said() -> list[str]:
            lines = self.lines(*words)
            return lines if len(lines) >= n else []

        return await until(said, f"{self} says {words} {n} times", within_s)

    def faults(self) -> list[str]:
        """Lines of its log that no test should see."""
        return [line for line in self.lines() if any(fault in line for fault in FAULTS)]

    async def _until_answers(self, url: str, within_s: float = PATIENCE_S) -> None:
        def answers() -> bool:
            assert self.is_running, f"{self} ended:\n{self.log.read_text()}"
            return _status(url) == 200

        await until(answers, f"{self} answers {url}", within_s)


class Ingress(Process):
    """An `llm-ingress`."""

    def __init__(self, name: str, pki: Path, folder: Path, *flags: str, host: str = LOOPBACK) -> None:
        self.port, self.control_port = free_port(), free_port()
        self.url = f"http://{LOOPBACK}:{self.port}"
        self.control_url = f"https://{host}:{self.control_port}"
        where = ("--port", str(self.port), "--control-bind", f"{host}:{self.control_port}")
        super().__init__(
            name, command("llm_ingress", *where, "--pki", str(pki), "--drain-timeout", "50", *flags), folder
        )

    async def until_up(self) -> None:
        await self._until_answers(f"{self.url}/health")

    async def until_ready(self, within_s: float = PATIENCE_S) -> None:
        """Wait until a worker is attached."""
        await self._until_answers(f"{self.url}/ready", within_s)

    def status(self, path: str = "/ready") -> int:
        """The HTTP status of a GET; 0 where nobody answers."""
        return _status(self.url + path)

    def health(self) -> Health:
        """What `/health` says now."""
        return _json(f"{self.url}/health")

    async def until(self, holds: Callable[[Health], object], within_s: float = PATIENCE_S) -> Health:
        """Wait until something holds of its health, and return that."""
        health: Health = {}

        def look() -> bool:
            nonlocal health
            health = self.health()
            return bool(holds(health))

        await until(look, f"{self}: {health}", within_s)
        return health

    async def until_attached(self, n_workers: int) -> Health:
        """Wait until so many live workers are attached."""
        return await self.until(
            lambda health: sum(worker["is_live"] for worker in health["workers"]) == n_workers
        )

    async def quiet(self) -> Health:
        """Wait until every lane, slot and promised cell is given back; every request ended in one way."""
        health = await self.until(_is_quiet)
        assert health["accepted"] == health["finished"] + health["cancelled"] + health["failed"]
        return health

    def holders(self) -> list[str]:
        """The names of the workers that hold lanes now."""
        return [worker["name"] for worker in self.health()["workers"] if worker["lanes"]]


class Worker(Process):
    """An `llm-worker` with its engine; on this machine, or at the far end of a line."""

    def __init__(
        self,
        name: str,
        pki: Path,
        folder: Path,
        *flags: str,
        program: str = "llm_worker.cli",
        line: Line | None = None,
    ) -> None:
        address = f"{line.far if line else LOOPBACK}:{free_port()}"
        self.health_url = f"http://{address}"
        where = ("--pki", str(pki), "--health-bind", address, "--drain-timeout", "50")
        arguments = [sys.executable, "-m", program, *where, *WORKER_FLAGS, *flags]
        super().__init__(name, line.command(arguments) if line else arguments, folder)

    async def until_up(self) -> None:
        """Wait until its model is loaded, whether or not an ingress is there."""
        await self._until_answers(f"{self.health_url}/health")

    async def until_attached(self, within_s: float = PATIENCE_S) -> None:
        """Wait until it serves an ingress."""
        await self._until_answers(f"{self.health_url}/ready", within_s)

    def status(self, path: str = "/ready") -> int:
        """The HTTP status of a GET; 0 where nobody answers."""
        return _status(self.health_url + path)

    def health(self) -> Health:
        """What `/health` says now."""
        return _json(f"{self.health_url}/health")


class Fleet:
    """The processes of one test."""

    def __init__(self, folder: Path, pki: Path, model: Path) -> None:
        self.processes: list[Process] = []
        self._folder = folder
        self._pki = pki
        self._model = model

    def another_ca(self, san: str) -> Path:
        """The folder of an ingress of these names, and of a CA that nobody else knows."""
        folder = self._folder / "another-ca"
        certs("init", folder, "--san", san)
        return folder

    def another_certificate(self, san: str) -> Path:
        """The folder of an ingress of the same CA as all, that goes by these names."""
        folder = self._folder / "another-certificate"
        shutil.copytree(self._pki, folder)
        certs("init", folder, "--san", san, "--renew")
        return folder

    def new_ingress(
        self, *flags: str, name: str = "ingress", pki: Path | None = None, host: str = LOOPBACK
    ) -> Ingress:
        """An ingress that is not started yet; `pki` is for one with a certificate of another kind."""
        return self._added(Ingress(name, pki or self._pki, self._folder, *flags, host=host))

    def new_worker(
        self,
        name: str,
        *ingresses: Ingress,
        flags: tuple[str, ...] = (),
        identity: str | None = None,
        program: str = "llm_worker.cli",
        line: Line | None = None,
    ) -> Worker:
        """A worker of these ingresses that is not started yet; by default its certificate has its name."""
        to = [word for ingress in ingresses for word in ("--ingress-url", ingress.control_url)]
        own = self.certificate(identity or name)
        flags = ("--model", str(self._model), *to, *flags)
        return self._added(Worker(name, own, self._folder, *flags, program=program, line=line))

    async def ingress(self, *flags: str, name: str = "ingress", pki: Path | None = None) -> Ingress:
        """An ingress that serves."""
        ingress = self.new_ingress(*flags, name=name, pki=pki)
        await ingress.start()
        return ingress

    async def worker(self, name: str, *ingresses: Ingress, flags: tuple[str, ...] = ()) -> Worker:
        """A worker that is loaded and attached."""
        worker = self.new_worker(name, *ingresses, flags=flags)
        await worker.start()
        await worker.until_attached()
        return worker

    async def workers(self, ingress: Ingress, *names: str, flags: tuple[str, ...] = ()) -> list[Worker]:
        """Workers that load side by side, and are attached."""
        workers = [self.new_worker(name, ingress, flags=flags) for name in names]
        for worker in workers:
            worker.launch()
        for worker in workers:
            await worker.until_attached()
        return workers

    def certificate(self, name: str) -> Path:
        """The folder of a worker's certificate, as `llm-ingress certs worker` makes it."""
        folder = self._pki.parent / name
        if not folder.exists():
            certs("worker", self._pki, name, "--out", folder)
        return folder

    def holder(self, ingress: Ingress) -> Worker:
        """The one worker that holds lanes of an ingress now."""
        (name,) = ingress.holders()
        (worker,) = (one for one in self.processes if isinstance(one, Worker) and one.name == name)
        return worker

    def faults(self) -> list[str]:
        """What of all logs no test should see."""
        return [f"{process}: {line}" for process in self.processes for line in process.faults()]

    def close(self) -> None:
        """Kill whatever still runs, frozen or not."""
        for process in self.processes:
            if process.is_running:
                process.process.kill()
                process.process.wait(PATIENCE_S)

    def _added(self, process: "P") -> "P":
        assert process.name not in [other.name for other in self.processes], f"{process} exists already"
        self.processes.append(process)
        return process


P = TypeVar("P", bound=Process)


def _is_quiet(health: Health) -> bool:
    """Whether nothing is held for anybody."""
    held = [health["open"], health["inflight"], health["reading_bytes"]]
    for worker in health["workers"]:
        held += [worker["lanes"], worker.get("inflight"), worker.get("decoding")]
        held += [worker.get("kv_promised_tokens")]
    return not any(held)


def _status(url: str) -> int:
    try:
        with urlopen(url, timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except URLError as error:
        return int(getattr(error, "code", 0))
    except OSError:  # it ended in the middle of its answer
        return 0


def _json(url: str) -> Health:
    with urlopen(url, timeout=PATIENCE_S) as answer:
        health: Health = json.load(answer)
        return health
