"""Certificates for tests: a CA with an ingress on loopback and one worker, valid whenever a test wants."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from llm_ingress.certs import CertificateFiles
from llm_ingress.pki import Period, parse_names
from llm_ingress.pki_folder import init, issue_worker

TODAY = datetime.now(UTC).replace(microsecond=0)
YESTERDAY, TOMORROW = TODAY - timedelta(days=1), TODAY + timedelta(days=1)
LOOPBACK_NAMES = "localhost,127.0.0.1"


@dataclass(frozen=True, slots=True)
class Issued:
    """Where the certificates of both ends lie."""

    ingress: CertificateFiles
    worker: CertificateFiles


def issue(
    folder: Path, *, now: datetime = TODAY, days: int = 60, names: str = LOOPBACK_NAMES, worker: str = "gpu-1"
) -> Issued:
    """Make a CA in `folder`/pki with one ingress, and one worker beside it."""
    period = Period(now, days)
    init(folder / "pki", parse_names(names), period)
    issue_worker(folder / "pki", worker, folder / worker, period)
    return Issued(
        ingress=CertificateFiles.in_folder(folder / "pki"), worker=CertificateFiles.in_folder(folder / worker)
    )
