"""`llm-ingress certs`, as it is typed and as it answers."""

import argparse
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from llm_ingress.certs import CertificateFiles, Role, diagnose, read_facts
from llm_ingress.certs_cli import add_certs_command
from llm_ingress.cli import main

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Type a command in an empty folder; exit status, output and complaint come back."""
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_certs_command(parser.add_subparsers())

    def typed(command: str, now: datetime = NOON) -> tuple[int, str, str]:
        args = parser.parse_args(["certs", *command.split()])
        status = args.run(args, now)
        out, err = capsys.readouterr()
        return status, out, err

    return typed


def test_an_ingress_and_a_worker_are_set_up_with_two_commands(run: Run) -> None:
    assert run("init ./pki --san ingress-a,10.0.0.5") == (
        0,
        "certificate   names                expires\n"
        "pki/ca.pem    (a CA)               2040-01-29  in 3650 days\n"
        "pki/cert.pem  ingress-a, 10.0.0.5  2031-01-31  in 365 days\n",
        "",
    )
    assert run("worker ./pki gpu-1") == (
        0,
        "certificate     names             expires\n"
        "gpu-1/cert.pem  llm-worker:gpu-1  2031-01-31  in 365 days\n",
        "",
    )
    diagnose(CertificateFiles.in_folder(Path("pki")), Role.INGRESS, NOON)
    diagnose(CertificateFiles.in_folder(Path("gpu-1")), Role.WORKER, NOON)


def test_status_shows_what_expires_when(run: Run) -> None:
    run("init pki --san ingress-a --days 60")
    run("worker pki gpu-1 --days 90")
    assert run("status pki", NOON + timedelta(days=29, seconds=1)) == (  # a part of a day counts as one
        0,
        "certificate            names             expires\n"
        "pki/ca.pem             (a CA)            2040-01-29  in 3621 days\n"
        "pki/cert.pem           ingress-a         2030-04-01  in 31 days\n"
        "pki/workers/gpu-1.pem  llm-worker:gpu-1  2030-05-01  in 61 days\n",
        "",
    )
    status, out, _ = run("status pki", NOON + timedelta(days=30))
    assert status == 0
    assert [line for line in out.splitlines() if "renew it soon" in line] == [
        "pki/cert.pem           ingress-a         2030-04-01  in 30 days, renew it soon"
    ]


def test_status_fails_when_anything_has_expired(run: Run) -> None:
    run("init pki --san ingress-a --days 60")
    status, out, _ = run("status pki", NOON + timedelta(days=62))
    assert (status, out.splitlines()[-1]) == (1, "pki/cert.pem  ingress-a  2030-04-01  EXPIRED 2 days ago")


def test_status_fails_when_anything_is_not_yet_valid_or_unreadable(run: Run) -> None:
    run("init pki --san ingress-a")
    status, out, _ = run("status pki", NOON - timedelta(days=1))
    assert status == 1
    assert "not valid before 2030-01-31 11:00 UTC" in out
    Path("pki/cert.pem").write_text("garbage")
    status, out, _ = run("status pki")
    assert (status, out.splitlines()[-1].split(maxsplit=1)) == (
        1,
        ["pki/cert.pem", "not a certificate in PEM form"],
    )


def test_status_shows_a_workers_folder_too(run: Run) -> None:
    run("init pki --san ingress-a")
    run("worker pki gpu-1 --out here")
    status, out, _ = run("status here")
    assert (status, len(out.splitlines())) == (0, 3)


def test_renewing(run: Run) -> None:
    run("init pki --san ingress-a,10.0.0.5")
    run("worker pki gpu-1")
    later = NOON + timedelta(days=300)
    assert run("init pki --renew", later)[0] == 0
    assert run("worker pki gpu-1 --renew --days 30", later)[0] == 0
    assert read_facts(Path("pki/cert.pem")).names == ("ingress-a", "10.0.0.5")
    assert read_facts(Path("pki/cert.pem")).not_after == later + timedelta(days=365)
    assert read_facts(Path("gpu-1/cert.pem")).not_after == later + timedelta(days=30)


def test_a_worker_renewed_away_from_its_key_is_to_be_copied(run: Run) -> None:
    run("init pki --san ingress-a")
    run("worker pki gpu-1")
    _, out, _ = run("worker pki gpu-1 --renew --out new")
    assert "copy new/ca.pem and new/cert.pem to the worker's folder: its key is not here" in out


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("init pki", "give --san: the DNS names and addresses that workers dial"),
        ("init pki --san a..b", "'a..b' is neither a DNS name nor an address"),
        ("init pki --san a --days 0", "days is 0, must be 1 to 3650"),
        ("init pki --renew", "pki/ca.pem: No such file or directory"),
        ("init /dev/null/pki --san a", "/dev/null/pki: Not a directory"),
        ("worker pki gpu-1", "pki/ca.pem: No such file or directory"),
        (
            "worker pki gpu/1",
            "worker name is 'gpu/1', must be 1 to 63 letters, digits, '.', '_' or '-', no sign first",
        ),
        ("status pki", "pki: no certificates there"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_status_1(run: Run, command: str, complaint: str) -> None:
    assert run(command) == (1, "", f"llm-ingress certs: {complaint}\n")


def test_init_refuses_to_overwrite(run: Run) -> None:
    run("init pki --san ingress-a")
    status, out, err = run("init pki --san ingress-a")
    assert (status, out) == (1, "")
    assert err.startswith("llm-ingress certs: pki/ca.pem exists, and is not overwritten")


def test_it_is_a_command_of_llm_ingress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pki = str(tmp_path / "pki")
    assert main(["certs", "init", pki, "--san", "ingress-a"]) == 0
    assert main(["certs", "status", pki]) == 0
    assert "in 365 days" in capsys.readouterr().out
