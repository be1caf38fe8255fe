"""What serves a real model over HTTP: llm-serve, or llm-ingress with one llm-worker."""

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.fleet import DAYS, SERVER_NAME, ingress, port_in_line
from llm_ingress.pki import Period, parse_names
from llm_ingress.pki_folder import init, issue_worker

CTX_SIZE = 512
LOAD_S = 60.0


@contextmanager
def llm_serve(model: str, n: int) -> Iterator[int]:
    """llm-serve in a process of its own, with a slot for every client; its port."""
    command = [sys.executable, "-m", "llm_serve.cli", "--port", "0", *_engine_flags(model, n)]
    command += ["--ring-streams", str(2 * n)]
    with _running(command, stdout=subprocess.PIPE) as process:
        yield port_in_line(process)


@contextmanager
def remote_worker(model: str, n: int) -> Iterator[int]:
    """One llm-worker over mutual TLS, and an llm-ingress, niced since it shares the machine; its port."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        period = Period(datetime.now(UTC), DAYS)
        init(folder / "pki", parse_names(SERVER_NAME), period)
        issue_worker(folder / "pki", "w0", folder / "w0", period)
        with ingress(folder, ("--ring-streams", str(2 * n)), niceness=10) as front:
            command = [sys.executable, "-m", "llm_worker.cli", "--pki", str(folder / "w0")]
            command += [
                "--ingress-url",
                f"https://{SERVER_NAME}:{front.control_port}",
                *_engine_flags(model, n),
            ]
            with _running(command):
                _wait_until_ready(front.port)
                yield front.port


def _engine_flags(model: str, n: int) -> list[str]:
    # No round profits from the one before it.
    return ["--model", model, "--max-inflight", str(n), "--ctx-size", str(CTX_SIZE), "--no-cache-prompt"]


@contextmanager
def _running(command: list[str], stdout: int = subprocess.DEVNULL) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + LOAD_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready"):
                return
        except urllib.error.HTTPError:
            time.sleep(0.1)
    raise RuntimeError("no worker has attached")
