"""Certificates as they are read: whose they are, what they allow, how long they last.

Bytes and files in, facts or a `CertificateFault` out; `pki.py` issues what is read here, `tls.py` makes
contexts of it. Called by: both ends of the control listener, before a handshake and after it; the public
listener; `certs_cli.py`. Time is a parameter, an aware datetime.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from llm_ingress.errors import CertificateFault

WORKER_SCHEME = "llm-worker:"
WARN_AHEAD = timedelta(days=30)
CA_NAME, CERT_NAME, KEY_NAME = "ca.pem", "cert.pem", "key.pem"

# It is a folder's name, and stands in logs and metrics.
_WORKER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# What the library raises for bytes it cannot take. A `CertificateFault` is a ValueError too: never one `try`.
_UNREADABLE = (
    ValueError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)

Extension = TypeVar("Extension", bound=x509.ExtensionType)
Stamp: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class Role(StrEnum):
    """Which end of the control listener a certificate is for."""

    INGRESS = "ingress"
    WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """Where a certificate chain, its key and the CA of the other side lie; no CA where nobody is asked."""

    cert: Path
    key: Path
    ca: Path | None = None

    @classmethod
    def in_folder(cls, folder: Path) -> "CertificateFiles":
        """Return the three files as `llm-ingress certs` lays them out."""
        return cls(cert=folder / CERT_NAME, key=folder / KEY_NAME, ca=folder / CA_NAME)

    def paths(self) -> tuple[Path, ...]:
        return (self.cert, self.key) if self.ca is None else (self.cert, self.key, self.ca)

    def stamp(self) -> Stamp:
        """Return what changes when a file does; None stands for one that is not there."""
        return tuple(_stamp(path) for path in self.paths())


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFacts:
    """What a certificate says of itself."""

    names: tuple[str, ...]
    not_before: datetime
    not_after: datetime

    def is_valid_at(self, now: datetime) -> bool:
        return self.not_before <= now < self.not_after


def is_worker_name(name: str) -> bool:
    """Whether a worker may have that name: letters, digits, `.`, `_`, `-`; 63 at most; no sign first."""
    return _WORKER_NAME.fullmatch(name) is not None


def identity_of(der: bytes) -> str:
    """Return the name of the worker a certificate was issued to; its chain is verified by the handshake.

    Raises: CertificateFault unless it has the shape of a worker's: one alternative name in all, the URI
    `llm-worker:<name>`, and nothing allowed but client authentication.
    """
    return _worker_name(_parse(der))


def check_ingress(der: bytes) -> None:
    """Check the shape of an ingress certificate; its chain and name are verified by the handshake.

    Raises: CertificateFault unless its alternative names are DNS names and addresses, and nothing but server
    authentication is allowed.
    """
    _check_ingress(_parse(der))


def read_facts(path: Path) -> CertificateFacts:
    """Return what the first certificate of a file says. Raises: CertificateFault that names the file."""
    certificate = load_chain(path)[0]
    try:
        names = _alternative_names(certificate)
    except CertificateFault as fault:
        raise CertificateFault(f"{path}: {fault}") from fault
    return CertificateFacts(
        names=tuple(_text_of(name) for name in names),
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
    )


def diagnose(files: CertificateFiles, role: Role | None, now: datetime) -> None:
    """Find what would make a handshake fail, while it can still be said which file is at fault.

    `role` None is a public listener's certificate: shape and dates are then between it and its clients.

    Raises: CertificateFault, one line that names the file: unreadable, a key that does not fit, expired, not
    yet valid, the wrong shape, or not signed by the CA.
    """
    chain = load_chain(files.cert)
    if load_key(files.key).public_key() != chain[0].public_key():
        raise CertificateFault(f"{files.key}: not the key of the certificate {files.cert}")
    if role is not None:
        _check_dates(files.cert, chain[0], now)
        _check_shape(files.cert, chain[0], role)
    if files.ca is not None:
        _check_issuer(files.cert, chain, files.ca, now)


def check_end(path: Path, not_after: datetime, now: datetime) -> None:
    """Raises: CertificateFault that names the file, once its certificate has expired."""
    if not_after <= now:
        raise CertificateFault(f"{path}: expired on {_when(not_after)}")


def expiry_warning(path: Path, now: datetime) -> str | None:
    """Return what a human should know of the end of a certificate; None while that is over 30 days away.

    Raises: CertificateFault if the file cannot be read.
    """
    not_after = read_facts(path).not_after
    if not_after <= now:
        return f"{path}: expired on {_when(not_after)}"
    if not_after - now <= WARN_AHEAD:
        return f"{path}: expires in {(not_after - now).days} days, on {_when(not_after)}"
    return None


# --- shapes ----------------------------------------------------------------------------------------------


def _worker_name(certificate: x509.Certificate) -> str:
    names = _alternative_names(certificate)
    if len(names) != 1 or not isinstance(names[0], x509.UniformResourceIdentifier):
        raise CertificateFault(f"its names are {_listed(names)}, must be one URI {WORKER_SCHEME}<name>")
    scheme, name = names[0].value[: len(WORKER_SCHEME)], names[0].value[len(WORKER_SCHEME) :]
    if scheme != WORKER_SCHEME or not is_worker_name(name):
        raise CertificateFault(f"its name is {_listed(names)}, must be {WORKER_SCHEME}<name>")
    _check_usage(certificate, ExtendedKeyUsageOID.CLIENT_AUTH, "clientAuth")
    return name


def _check_ingress(certificate: x509.Certificate) -> None:
    names = _alternative_names(certificate)
    if not names or not all(isinstance(name, (x509.DNSName, x509.IPAddress)) for name in names):
        raise CertificateFault(f"its names are {_listed(names)}, must be DNS names and addresses")
    _check_usage(certificate, ExtendedKeyUsageOID.SERVER_AUTH, "serverAuth")


def _check_usage(certificate: x509.Certificate, usage: x509.ObjectIdentifier, name: str) -> None:
    """Nothing else may be allowed: a certificate for both ends could play either."""
    if list(_extension(certificate, x509.ExtendedKeyUsage) or ()) != [usage]:
        raise CertificateFault(f"its extended key usage must be {name} alone")


def _alternative_names(certificate: x509.Certificate) -> list[x509.GeneralName]:
    return list(_extension(certificate, x509.SubjectAlternativeName) or ())


def _extension(certificate: x509.Certificate, kind: type[Extension]) -> Extension | None:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None
    except _UNREADABLE as error:
        raise CertificateFault("its extensions cannot be read") from error


def _parse(der: bytes) -> x509.Certificate:
    try:
        return x509.load_der_x509_certificate(der)
    except _UNREADABLE as error:
        raise CertificateFault("not a certificate") from error


def _listed(names: Iterable[x509.GeneralName]) -> str:
    """Return names from a certificate for a log line: whoever asked for it chose them."""
    return ", ".join(repr(_text_of(name)) for name in names) or "none"


def _text_of(name: x509.GeneralName) -> str:
    return str(name.value)


# --- files -----------------------------------------------------------------------------------------------


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateFault(f"{path}: {error.strerror}") from error


def load_chain(path: Path) -> list[x509.Certificate]:
    """Raises: CertificateFault that names the file."""
    data = _read(path)
    try:
        chain = x509.load_pem_x509_certificates(data)
        for certificate in chain:
            certificate.public_key()  # else decoded when it is first asked for, far from here
    except _UNREADABLE as error:
        raise CertificateFault(f"{path}: not a certificate in PEM form") from error
    return chain


def load_key(path: Path) -> PrivateKeyTypes:
    """Raises: CertificateFault that names the file."""
    data = _read(path)
    try:
        return load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it needs a password
        raise CertificateFault(f"{path}: not an unencrypted private key in PEM form") from error


def _check_dates(path: Path, certificate: x509.Certificate, now: datetime) -> None:
    check_end(path, certificate.not_valid_after_utc, now)
    if now < certificate.not_valid_before_utc:
        raise CertificateFault(
            f"{path}: not yet valid, only from {_when(certificate.not_valid_before_utc)} on "
            f"(this machine's clock says {_when(now)})"
        )


def _check_shape(path: Path, certificate: x509.Certificate, role: Role) -> None:
    try:
        if role is Role.WORKER:
            _worker_name(certificate)
        else:
            _check_ingress(certificate)
    except CertificateFault as fault:
        raise CertificateFault(f"{path}: not the certificate of the {role}: {fault}") from fault


def _check_issuer(path: Path, chain: Sequence[x509.Certificate], ca: Path, now: datetime) -> None:
    root = _root_of(chain, load_chain(ca))
    if root is None:
        raise CertificateFault(f"{path}: not signed by the CA {ca}")
    _check_dates(ca, root, now)


def _root_of(chain: Sequence[x509.Certificate], roots: Sequence[x509.Certificate]) -> x509.Certificate | None:
    """Return the root the chain leads to: each certificate signed by the next, until a root signed one.

    A renewed CA stands beside the old one for a while, with the same key; the one that lasts longer counts.
    """
    latest_first = sorted(roots, key=lambda root: root.not_valid_after_utc, reverse=True)
    for position, certificate in enumerate(chain):
        if position and not _is_issued_by(chain[position - 1], certificate):
            return None
        for root in latest_first:
            if _is_issued_by(certificate, root):
                return root
    return None


def _is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (*_UNREADABLE, TypeError, InvalidSignature):
        return False
    return True


def _when(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
