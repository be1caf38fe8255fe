"""What lies where, with which modes, and what is never overwritten."""

import errno
import os
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from llm_ingress.certs import CertificateFiles, Role, diagnose, read_facts
from llm_ingress.errors import CertificateFault, ConfigError
from llm_ingress.pki import CA_DAYS, Period, parse_names
from llm_ingress.pki_folder import certificates_in, init, issue_worker, renew_ingress, renew_worker
from tests.certificates import issue

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
YEAR = Period(NOON, 365)
LATER = NOON + timedelta(days=300)
NAMES = parse_names("ingress-a,10.0.0.5")


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    init(tmp_path / "pki", NAMES, YEAR)
    return tmp_path / "pki"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}


def test_an_ingress_can_use_what_init_makes(pki: Path) -> None:
    diagnose(CertificateFiles.in_folder(pki), Role.INGRESS, NOON)
    assert read_facts(pki / "cert.pem").names == ("ingress-a", "10.0.0.5")


def test_a_worker_can_use_what_is_issued_to_it(pki: Path, tmp_path: Path) -> None:
    issue_worker(pki, "gpu-1", tmp_path / "gpu-1", YEAR)
    diagnose(CertificateFiles.in_folder(tmp_path / "gpu-1"), Role.WORKER, NOON)
    assert read_facts(tmp_path / "gpu-1" / "cert.pem").names == ("llm-worker:gpu-1",)


def test_keys_are_for_their_owner_alone(pki: Path, tmp_path: Path) -> None:
    issue_worker(pki, "gpu-1", tmp_path / "gpu-1", YEAR)
    assert modes(pki) == {
        "pki": 0o700,
        "ca-key.pem": 0o600,
        "key.pem": 0o600,
        "ca.pem": 0o644,
        "cert.pem": 0o644,
        "workers": 0o700,
    }
    assert modes(tmp_path / "gpu-1") == {"gpu-1": 0o700, "key.pem": 0o600, "ca.pem": 0o644, "cert.pem": 0o644}


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """From now on so many files more find room."""

    def fill(n_left: int) -> None:
        sync, room = os.fsync, iter(range(n_left))

        def fsync(handle: int) -> None:
            if next(room, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(handle)

        monkeypatch.setattr(os, "fsync", fsync)

    return fill


@pytest.mark.parametrize(("n_left", "file"), list(enumerate(["ca-key.pem", "ca.pem", "key.pem", "cert.pem"])))
def test_a_full_disk_leaves_nothing_of_what_was_begun_and_names_the_file(
    tmp_path: Path, full_disk: Callable[[int], None], n_left: int, file: str
) -> None:
    full_disk(n_left)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/pki/{file}'"):
        init(tmp_path / "pki", NAMES, YEAR)
    assert contents(tmp_path) == {}


def test_a_worker_whose_files_found_no_room_can_be_issued_again(
    pki: Path, tmp_path: Path, full_disk: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(tmp_path)
    full_disk(3)
    with pytest.raises(OSError, match=r"workers/gpu-1\.pem"):
        issue_worker(pki, "gpu-1", tmp_path / "gpu-1", YEAR)
    assert contents(tmp_path) == before
    monkeypatch.undo()
    issue_worker(pki, "gpu-1", tmp_path / "gpu-1", YEAR)


def test_a_workers_key_is_in_its_own_folder_alone(pki: Path, tmp_path: Path) -> None:
    issue_worker(pki, "gpu-1", tmp_path / "gpu-1", YEAR)
    key = (tmp_path / "gpu-1" / "key.pem").read_bytes()
    assert key not in contents(pki).values()
    assert "ca-key.pem" not in contents(tmp_path / "gpu-1")


@pytest.mark.parametrize("name", ["ca.pem", "ca-key.pem", "cert.pem", "key.pem"])
def test_init_overwrites_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"{name} exists"):
        init(tmp_path, NAMES, YEAR)
    assert contents(tmp_path) == {name: b"mine"}


def test_a_worker_is_issued_once(pki: Path, tmp_path: Path) -> None:
    issue_worker(pki, "gpu-1", tmp_path / "gpu-1", YEAR)
    before = contents(tmp_path)
    for out in (tmp_path / "gpu-1", tmp_path / "elsewhere"):
        with pytest.raises(ConfigError, match="exists, and is not overwritten"):
            issue_worker(pki, "gpu-1", out, YEAR)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["", "..", "../gpu", "a/b", "-a", ".a", "a b", "a\n", "x" * 64, "é"])
def test_a_name_that_cannot_be_a_folder_is_refused(pki: Path, tmp_path: Path, name: str) -> None:
    before = contents(tmp_path)
    for command in (issue_worker, renew_worker):
        with pytest.raises(ConfigError, match="worker name is "):
            command(pki, name, tmp_path / "out", YEAR)
    assert contents(tmp_path) == before


def test_renewing_a_worker_replaces_its_certificate_and_keeps_its_key(pki: Path, tmp_path: Path) -> None:
    out = tmp_path / "gpu-1"
    issue_worker(pki, "gpu-1", out, YEAR)
    before = contents(out)
    renew_worker(pki, "gpu-1", out, Period(LATER, 365))
    after = contents(out)
    assert {name for name in after if after[name] != before[name]} == {"cert.pem"}
    diagnose(CertificateFiles.in_folder(out), Role.WORKER, LATER + timedelta(days=364))
    assert (pki / "workers" / "gpu-1.pem").read_bytes() == after["cert.pem"]


def test_a_worker_is_renewed_while_its_key_is_elsewhere(pki: Path, tmp_path: Path) -> None:
    issue_worker(pki, "gpu-1", tmp_path / "gpu-1", YEAR)
    renew_worker(pki, "gpu-1", tmp_path / "new", Period(LATER, 365))
    assert set(contents(tmp_path / "new")) == {"ca.pem", "cert.pem"}
    (tmp_path / "new" / "cert.pem").rename(tmp_path / "gpu-1" / "cert.pem")
    diagnose(CertificateFiles.in_folder(tmp_path / "gpu-1"), Role.WORKER, LATER)


def test_a_certificate_is_not_put_beside_another_key(pki: Path, tmp_path: Path) -> None:
    issue_worker(pki, "gpu-1", tmp_path / "gpu-1", YEAR)
    issue_worker(pki, "gpu-2", tmp_path / "gpu-2", YEAR)
    before = contents(tmp_path)
    with pytest.raises(CertificateFault, match="not the key of the certificate"):
        renew_worker(pki, "gpu-1", tmp_path / "gpu-2", YEAR)
    assert contents(tmp_path) == before


def test_a_worker_never_issued_is_not_renewed(pki: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gpu-1 has no certificate yet"):
        renew_worker(pki, "gpu-1", tmp_path / "gpu-1", YEAR)


def test_renewing_the_ingress_keeps_its_key_its_names_and_its_ca(pki: Path) -> None:
    before = contents(pki)
    renew_ingress(pki, None, Period(LATER, 365))
    after = contents(pki)
    assert {name for name in after if after[name] != before[name]} == {"cert.pem"}
    assert read_facts(pki / "cert.pem").names == ("ingress-a", "10.0.0.5")
    diagnose(CertificateFiles.in_folder(pki), Role.INGRESS, LATER + timedelta(days=364))


def test_the_ingress_is_renewed_for_other_names(pki: Path) -> None:
    renew_ingress(pki, parse_names("ingress-b"), YEAR)
    assert read_facts(pki / "cert.pem").names == ("ingress-b",)


def test_a_ca_that_would_end_first_is_renewed_and_keeps_what_it_signed(pki: Path, tmp_path: Path) -> None:
    near_its_end = NOON + timedelta(days=CA_DAYS - 100)
    issue_worker(pki, "gpu-1", tmp_path / "gpu-1", Period(NOON, CA_DAYS))
    with pytest.raises(ConfigError, match=r"ca\.pem ends on .* before 365 days are over"):
        issue_worker(pki, "gpu-2", tmp_path / "gpu-2", Period(near_its_end, 365))
    renew_ingress(pki, None, Period(near_its_end, 365))
    issue_worker(pki, "gpu-2", tmp_path / "gpu-2", Period(near_its_end, 365))
    diagnose(CertificateFiles.in_folder(pki), Role.INGRESS, near_its_end + timedelta(days=364))
    worker = CertificateFiles.in_folder(tmp_path / "gpu-1")
    diagnose(CertificateFiles(cert=worker.cert, key=worker.key, ca=pki / "ca.pem"), Role.WORKER, near_its_end)


def test_a_ca_key_that_does_not_fit_signs_nothing(pki: Path, tmp_path: Path) -> None:
    other = issue(tmp_path / "other", now=NOON).ingress
    (pki / "ca-key.pem").write_bytes((other.cert.parent / "ca-key.pem").read_bytes())
    with pytest.raises(CertificateFault, match=r"ca-key\.pem: not the key of the CA"):
        issue_worker(pki, "gpu-1", tmp_path / "gpu-1", YEAR)
    assert not (tmp_path / "gpu-1").exists()


def test_a_folder_that_cannot_be_written_leaves_nothing_half_written(pki: Path, tmp_path: Path) -> None:
    (tmp_path / "gpu-1" / "cert.pem").mkdir(parents=True)  # renaming a file onto it fails
    issue_worker(pki, "gpu-1", tmp_path / "elsewhere", YEAR)
    with pytest.raises(IsADirectoryError):
        renew_worker(pki, "gpu-1", tmp_path / "gpu-1", YEAR)
    assert {path.name for path in (tmp_path / "gpu-1").iterdir()} == {"ca.pem", "cert.pem"}


def test_all_certificates_of_a_folder_are_found(pki: Path, tmp_path: Path) -> None:
    for name in ("gpu-2", "gpu-1"):
        issue_worker(pki, name, tmp_path / name, YEAR)
    found = [str(path.relative_to(pki)) for path in certificates_in(pki)]
    assert found == ["ca.pem", "cert.pem", "workers/gpu-1.pem", "workers/gpu-2.pem"]
    assert certificates_in(tmp_path / "gpu-1") == [
        tmp_path / "gpu-1" / "ca.pem",
        tmp_path / "gpu-1" / "cert.pem",
    ]
