"""What `llm-worker` makes of its flags and certificate files: each fault is one line, before all else."""

import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import pytest

from llm_worker.cli import CONTROL_PORT, Options, main, options_of, parser_of_flags
from llm_worker.discovery import Query
from tests.certificates import TODAY, Issued, issue

Complaint: TypeAlias = Callable[..., str]
URL = "https://127.0.0.1:8444"


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    """A CA, an ingress on loopback, and the worker gpu-1."""
    return issue(tmp_path_factory.mktemp("pki"))


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of this machine counts, and Ctrl-C is the test runner's again afterwards."""
    for name in ("COORDINATOR_URL", "WORKER_ID", "MODEL_PATH", "MODEL_URL"):
        monkeypatch.delenv(name, raising=False)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Complaint:
    """The one line that `llm-worker` ends with."""

    def run(*flags: str | Path) -> str:
        assert main([str(flag) for flag in flags]) == 1
        line = capsys.readouterr().err
        assert line.startswith("llm-worker: ")
        assert line.count("\n") == 1
        return line

    return run


def folder_of(issued: Issued, tmp_path: Path) -> Path:
    """A copy of the worker's folder, to be spoilt."""
    return Path(shutil.copytree(issued.worker.cert.parent, tmp_path / "copy"))


# Certificate files: each fault is told from the others.


def test_a_file_that_is_missing(tmp_path: Path, complaint: Complaint) -> None:
    assert "missing/cert.pem: No such file or directory" in complaint(
        "--ingress-url", URL, "--pki", tmp_path / "missing"
    )


@pytest.mark.parametrize("file", ["cert.pem", "key.pem", "ca.pem"])
def test_a_file_that_is_unreadable(issued: Issued, tmp_path: Path, complaint: Complaint, file: str) -> None:
    folder = folder_of(issued, tmp_path)
    (folder / file).write_text("garbage")
    assert f"{folder / file}: not " in complaint("--ingress-url", URL, "--pki", folder)


@pytest.mark.parametrize(("days_from_now", "fault"), [(-90, "expired on"), (30, "not yet valid, only from")])
def test_a_certificate_out_of_its_time(
    tmp_path: Path, complaint: Complaint, days_from_now: int, fault: str
) -> None:
    folder = issue(tmp_path, now=TODAY + timedelta(days=days_from_now)).worker.cert.parent
    assert f"{folder}/cert.pem: {fault}" in complaint("--ingress-url", URL, "--pki", folder)


def test_a_key_that_does_not_fit(issued: Issued, tmp_path: Path, complaint: Complaint) -> None:
    folder = folder_of(issued, tmp_path)
    shutil.copy(issued.ingress.key, folder / "key.pem")
    assert f"{folder}/key.pem: not the key of" in complaint("--ingress-url", URL, "--pki", folder)


def test_a_ca_that_did_not_sign_it(issued: Issued, tmp_path: Path, complaint: Complaint) -> None:
    folder = folder_of(issued, tmp_path)
    stranger = issue(tmp_path / "stranger")
    assert stranger.worker.ca is not None
    shutil.copy(stranger.worker.ca, folder / "ca.pem")
    assert f"not signed by the CA {folder}/ca.pem" in complaint("--ingress-url", URL, "--pki", folder)


def test_the_ingresss_own_folder(issued: Issued, complaint: Complaint) -> None:
    folder = issued.ingress.cert.parent
    assert "not the certificate of the worker" in complaint("--ingress-url", URL, "--pki", folder)


# Flags.


def options(issued: Issued, *flags: str) -> Options:
    return options_of(parser_of_flags().parse_args(["--pki", str(issued.worker.cert.parent), *flags]))


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("", "give --ingress-url or --discovery-dns"),
        ("--ingress-url http://a:1", "ingress URL 'http://a:1' must be https://HOST:PORT"),
        ("--ingress-url https://a:1/ring", "must be https://HOST:PORT"),
        ("--ingress-url https://me@a:1", "must be https://HOST:PORT"),
        ("--ingress-url https://a:x", "has the port 'x'"),
        ("--ingress-url https://a:0", "ingress URL 'https://a:0' has the port 0, must be 1 to 65535"),
        (f"--ingress-url {URL} --health-bind 1", "'1' is not HOST:PORT"),
        (f"--ingress-url {URL} --heartbeat-interval 0", "--heartbeat-interval is 0.0, must be more than 0"),
        (f"--ingress-url {URL} --drain-timeout -1", "--drain-timeout is -1.0, must not be negative"),
        ("--discovery-dns a --discovery-interval 0", "--discovery-interval is 0.0, must be more than 0"),
        (f"--ingress-url {URL} --name \x1b[31mred", "the name '\\x1b[31mred' is none"),
        (f"--ingress-url {URL} --alias {'x' * 257}", "must be 1 to 256 printable characters"),
        ("--discovery-dns a:b", "has the port 'b'"),
        (f"--ingress-url {URL} --model missing.gguf", "missing.gguf: no such file"),
    ],
)
def test_a_flag_that_is_wrong(issued: Issued, complaint: Complaint, flags: str, fault: str) -> None:
    assert fault in complaint("--pki", issued.worker.cert.parent, *flags.split())


def test_a_health_port_that_is_taken_is_known_before_a_model_is_loaded(
    issued: Issued, complaint: Complaint
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ("--ingress-url", URL, "--health-bind", where, "--model", "missing.gguf")
        assert f"health checks on {where}" in complaint("--pki", issued.worker.cert.parent, *flags)


def test_an_ingress_is_named_once_with_the_usual_port_unless_it_says_another(issued: Issued) -> None:
    urls = ("https://a", "https://a:8444/", "https://[::1]:9", "https://b:7")
    flags = [word for url in urls for word in ("--ingress-url", url)]
    assert options(issued, *flags).urls == (f"https://a:{CONTROL_PORT}", "https://[::1]:9", "https://b:7")


def test_a_flag_wins_over_its_variable(issued: Issued, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COORDINATOR_URL", "https://a:1, https://b:2")
    monkeypatch.setenv("WORKER_ID", "here")
    from_variables = options(issued)
    assert from_variables.urls == ("https://a:1", "https://b:2")
    assert from_variables.worker.name == "here"
    from_flags = options(issued, "--ingress-url", "https://c:3", "--name", "there")
    assert (from_flags.urls, from_flags.worker.name) == (("https://c:3",), "there")


def test_a_worker_is_called_what_its_certificate_says_unless_told_otherwise(issued: Issued) -> None:
    assert options(issued, "--ingress-url", URL).worker.name == "gpu-1"


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("ring.test", Query(name="ring.test", default_port=CONTROL_PORT)),
        ("ring.test:99", Query(name="ring.test", port=99, default_port=CONTROL_PORT)),
    ],
)
def test_discovery_is_enough_and_may_name_a_port(issued: Issued, text: str, query: Query) -> None:
    found = options(issued, "--discovery-dns", text)
    assert (found.urls, found.query) == ((), query)
