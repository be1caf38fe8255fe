"""What serves a real model over HTTP: llm-serve, or llm-ingress with llm-workers."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.fleet import DAYS, NO_BUDGET, SERVER_NAME, ingress, port_in_line
from llm_ingress.pki import Period, parse_names
from llm_ingress.pki_folder import init, issue_worker

CTX_SIZE = 512
LOAD_S = 60.0


@contextmanager
def llm_serve(
    model: str,
    n: int,
    *flags: str,
    program: Sequence[str] = ("-m", "llm_serve.cli"),
    environment: Mapping[str, str] | None = None,
) -> Iterator[int]:
    """llm-serve in a process of its own, with a slot for every client; its port."""
    command = [sys.executable, *program, "--port", "0", *_engine_flags(model, n)]
    command += ["--ring-streams", str(2 * n), *NO_BUDGET, *flags]
    with _running(command, stdout=subprocess.PIPE, environment=environment) as process:
        yield port_in_line(process)


@contextmanager
def remote_worker(model: str, n: int) -> Iterator[int]:
    """One llm-worker with a slot for every client, and an llm-ingress; its port."""
    with remote_workers(1, _engine_flags(model, n), ("--ring-streams", str(2 * n))) as port:
        yield port


@contextmanager
def remote_workers(n: int, worker_flags: Sequence[str], ingress_flags: Sequence[str]) -> Iterator[int]:
    """llm-workers over mutual TLS, and an llm-ingress, niced since it shares the machine; its port."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        period = Period(datetime.now(UTC), DAYS)
        init(folder / "pki", parse_names(SERVER_NAME), period)
        front = stack.enter_context(ingress(folder, ingress_flags, niceness=10))
        for number in range(n):
            issue_worker(folder / "pki", f"w{number}", folder / f"w{number}", period)
            command = [sys.executable, "-m", "llm_worker.cli", "--pki", str(folder / f"w{number}")]
            url = f"https://{SERVER_NAME}:{front.control_port}"
            stack.enter_context(_running([*command, "--ingress-url", url, *worker_flags]))
        _wait_until_ready(front.port, n)
        yield front.port


def _engine_flags(model: str, n: int) -> list[str]:
    # No round profits from the one before it.
    return ["--model", model, "--max-inflight", str(n), "--ctx-size", str(CTX_SIZE), "--no-cache-prompt"]


@contextmanager
def _running(
    command: list[str], stdout: int = subprocess.DEVNULL, environment: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[str]"]:
    surroundings = os.environ | (environment or {})
    with subprocess.Popen(
        command, stdout=stdout, stderr=subprocess.DEVNULL, text=True, env=surroundings
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def _wait_until_ready(port: int, n_workers: int) -> None:
    deadline = time.monotonic() + LOAD_S
    while time.monotonic() < deadline:
        if len(health(port)["workers"]) == n_workers:
            return
        time.sleep(0.1)
    raise RuntimeError(f"{n_workers} workers have not attached")


def health(port: int) -> dict[str, Any]:
    """What a server tells of itself."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as response:
        facts: dict[str, Any] = json.load(response)
    return facts
