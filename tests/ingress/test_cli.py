"""What `llm-ingress` makes of its flags, and what the command lines do with signals."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from llm_ingress.cli import main, reload_on_hangup
from llm_ingress.tls import LiveContext, control_context, worker_context
from tests.certificates import TODAY, issue


async def test_a_hangup_loads_every_certificate_again_and_survives_one_that_is_gone(tmp_path: Path) -> None:
    ring = issue(tmp_path)
    lives = [
        LiveContext(control_context, ring.ingress, TODAY),
        LiveContext(worker_context, ring.worker, TODAY),
    ]
    before = [live.current for live in lives]
    ring.ingress.key.unlink()
    reload_on_hangup(lives)
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(5):
            while lives[1].current is before[1]:  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0)
        assert lives[0].current is before[0]
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `llm-ingress certs init` makes."""
    return issue(tmp_path_factory.mktemp("pki")).ingress.cert.parent


def complaint_of(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line that `llm-ingress` ends with."""
    assert main(["--port", "0", *flags]) == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith("llm-ingress: ")
    assert complaint.count("\n") == 1
    return complaint


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--control-bind nowhere", "'nowhere' is not HOST:PORT"),
        ("--control-bind 127.0.0.1:70000", "has the port '70000'"),
        ("--allow-worker -odd-", "'-odd-' can be no worker's name"),
        ("--trusted-proxy proxy", "trusted proxy 'proxy' is not an address"),
        ("--claim-timeout 0.5", "--claim-timeout is 0.5, must be more than --heartbeat-interval, 1.0"),
        (
            "--max-request-bytes 66846721",
            "--max-request-bytes is 66846721, must be at most 66846720: with the progress of its answer, "
            "up to --response-buffer, 262144, it is to fit into a lane",
        ),
        (
            "--history-conversation-bytes 33423361",
            "is 33423361, must be at most 33423360",  # twice that travels
        ),
        ("--response-buffer 67108864", "must be at most 0"),
        (
            "--heartbeat-timeout 0.5",
            "--heartbeat-timeout is 0.5, must be more than --heartbeat-interval, 1.0",
        ),
        ("--bind 0.0.0.0", "refusing plain HTTP on 0.0.0.0"),
        ("--bind=", "refusing plain HTTP on every address"),
        ("--port 70000", "--port is 70000, must be"),
        ("--body-timeout 0", "--body-timeout is 0.0, must"),
        ("--tls-cert x.pem", "--tls-cert and --tls-key go together"),
        ("--ring-streams 0", "--ring-streams is 0, must be at least 1"),
        ("--max-in-flight-decodes 0", "--max-in-flight-decodes is 0, must be at least 1"),
        ("--affinity-wait-ms -1", "--affinity-wait-ms is -1.0, must not be negative"),
    ],
)
def test_a_flag_that_is_wrong_is_one_line(
    pki: Path, capsys: pytest.CaptureFixture[str], flags: str, complaint: str
) -> None:
    flags = flags.replace("--allow-worker ", "--allow-worker=")
    assert complaint in complaint_of(capsys, "--pki", str(pki), *flags.split())


def test_without_certificates_it_says_how_to_make_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert "`llm-ingress certs init` makes it" in complaint_of(capsys)


def test_a_certificate_that_cannot_be_used_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = issue(tmp_path).worker.cert.parent
    assert "not the certificate of the ingress" in complaint_of(capsys, "--pki", str(worker))
    assert "missing/cert.pem: No such file" in complaint_of(capsys, "--pki", str(tmp_path / "missing"))


def test_a_control_port_that_is_taken_is_one_line(pki: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        complaint = complaint_of(capsys, "--pki", str(pki), "--control-bind", where)
    assert "cannot listen for workers on 127.0.0.1 port" in complaint
