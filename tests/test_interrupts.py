"""Ctrl-C while a command is still loading: it ends with the status of that, and without a traceback."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.certificates import issue

ROOT = Path(__file__).parents[1]
PATIENCE_S = 30.0
POLL_S = 0.001
SMALL = ("--model", "smollm2", "--ctx-size", "256")
QUIET = (-signal.SIGINT, 130)


@pytest.fixture(scope="module")
def command_lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Each command with flags it can run with."""
    ring = issue(tmp_path_factory.mktemp("pki"))
    flags: dict[str, tuple[object, ...]] = {
        "llm-engine": (*SMALL, "--prompt", "Hi", "--max-tokens", "200"),
        "llm-ingress": ("--pki", ring.ingress.cert.parent, "--port", "0", "--control-bind", "127.0.0.1:0"),
        "llm-worker": (*SMALL, "--pki", ring.worker.cert.parent, "--ingress-url", "https://127.0.0.1:1"),
        "llm-serve": (*SMALL, "--port", "0"),
    }
    path = Path(sys.executable).parent
    return {name: [str(part) for part in (path / name, *given)] for name, given in flags.items()}


async def until_it_loads(process: "subprocess.Popen[str]") -> None:
    """Wait for sockets, which all of them load early; until then it may be Python itself that starts."""
    while "/_socket." not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        await asyncio.sleep(POLL_S)


@pytest.mark.parametrize("package", ["llm_engine", "llm_ingress", "llm_worker"])
def test_nothing_is_loaded_before_ctrl_c_is_dealt_with(package: str) -> None:
    source = (
        f"import signal, sys; before = set(sys.modules); import {package}.__main__;"
        "print(*sorted(set(sys.modules) - before))"
    )
    # Without site: what it loads, it loads before any of our code.
    done = subprocess.run([sys.executable, "-S", "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == [package, f"{package}.__main__"], done.stderr


@pytest.mark.model
@pytest.mark.parametrize("moment_s", [0.0, 0.05, 0.1, 0.2, 0.4])
@pytest.mark.parametrize("name", ["llm-engine", "llm-ingress", "llm-worker", "llm-serve"])
async def test_ctrl_c_ends_a_command_that_is_still_loading(
    command_lines: dict[str, list[str]], name: str, moment_s: float
) -> None:
    process = subprocess.Popen(command_lines[name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        await until_it_loads(process)
        await asyncio.sleep(moment_s)
        process.send_signal(signal.SIGINT)
        _, errors = await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
    finally:
        process.kill()
    assert "Traceback" not in errors
    # 0 from the moment on that it serves, and drains.
    assert process.returncode in (*QUIET, 0)
