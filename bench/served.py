"""What serves a real model over HTTP: llm-serve, or llm-ingress with one llm-worker; a round of clients."""

import argparse
import statistics
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

from bench.clients import ask_all
from bench.fleet import DAYS, NO_BUDGET, SERVER_NAME, ingress, port_in_line
from bench.prompts import distinct
from llm_ingress.pki import Period, parse_names
from llm_ingress.pki_folder import init, issue_worker

CTX_SIZE = 512
LOAD_S = 60.0


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The flags of the benchmarks that serve a real model."""
    flags = argparse.ArgumentParser(prog=f"python -m bench {name}", description=description)
    flags.add_argument("--model", default="smollm2", help="as for llm-serve (smollm2)")
    flags.add_argument(
        "--clients",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[8, 32],
        help="numbers of clients, comma separated (8,32)",
    )
    flags.add_argument("--tokens", type=int, default=96, help="tokens of each answer (96)")
    flags.add_argument("--rounds", type=int, default=5, help="alternating runs of each (5)")
    flags.add_argument("--json", metavar="FILE", help="file for the raw figures")
    return flags


def serve_once(port: int, model: str, n: int, n_tokens: int) -> dict[str, float]:
    """`n` clients send distinct prompts at once and read every token.

    Units: tokens a second from the first request to the last token; milliseconds.
    """
    requests = [
        {
            "model": model,
            "temperature": 0,
            "max_tokens": n_tokens,
            "messages": [{"role": "user", "content": text}],
        }
        for text in distinct(n)
    ]
    answers = ask_all("127.0.0.1", port, requests)
    n_generated = sum(answer.n_tokens for answer in answers)
    return {
        "rate": n_generated / max(answer.last_s for answer in answers),
        "tokens": n_generated,
        "ttft_ms": 1000 * statistics.median(answer.first_s for answer in answers),
    }


@contextmanager
def llm_serve(model: str, n: int) -> Iterator[int]:
    """llm-serve in a process of its own, with a slot for every client; its port."""
    command = [sys.executable, "-m", "llm_serve.cli", "--port", "0", *_engine_flags(model, n)]
    command += ["--ring-streams", str(2 * n), *NO_BUDGET]
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
