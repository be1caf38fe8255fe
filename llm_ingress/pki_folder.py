"""The folder of a CA and its ingress, and those of its workers: what lies where, and how it is replaced.

    ca.pem, cert.pem, key.pem    all that an ingress or a worker needs, in the folder of either
    ca-key.pem                   signs the others; only issuing needs it, no ingress does
    workers/NAME.pem             each worker's certificate; its key is in the worker's own folder alone

To renew is to certify the same key anew: one file is replaced, in one rename, so that nobody ever reads a
pair that does not fit, and a worker's key need not come back to where the CA is. Called by: `certs_cli.py`.
"""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from llm_ingress.certs import CA_NAME, CERT_NAME, KEY_NAME, is_worker_name, load_chain, load_key
from llm_ingress.errors import CertificateFault, ConfigError
from llm_ingress.pki import Authority, Names, Period, PrivateKey, certificate_pem, key_pem, names_of, new_key

CA_KEY_NAME = "ca-key.pem"
WORKERS_NAME = "workers"
FOLDER_MODE, PRIVATE_MODE, PUBLIC_MODE = 0o700, 0o600, 0o644


class _File(NamedTuple):
    """What is to lie where."""

    path: Path
    data: bytes
    mode: int = PUBLIC_MODE


def init(folder: Path, names: Names, period: Period) -> None:
    """Make a CA, and with it the certificate of an ingress.

    Raises: ConfigError if one of the files is there already; OSError.
    """
    _refuse_to_overwrite(folder / name for name in (CA_NAME, CA_KEY_NAME, CERT_NAME, KEY_NAME))
    authority, key = Authority.new(period.now), new_key()
    certificate = authority.certify_ingress(key.public_key(), names, period)
    _make_folder(folder)
    _write(
        _File(folder / CA_KEY_NAME, key_pem(authority.key), PRIVATE_MODE),
        _File(folder / CA_NAME, certificate_pem(authority.certificate)),
        _File(folder / KEY_NAME, key_pem(key), PRIVATE_MODE),
        _File(folder / CERT_NAME, certificate_pem(certificate)),
    )


def renew_ingress(folder: Path, names: Names | None, period: Period) -> None:
    """Certify the ingress's key anew, for the names it had or for new ones; and the CA's if it ends earlier.

    Raises: CertificateFault if what is to be renewed cannot be read; OSError.
    """
    authority = _load_authority(folder)
    old = load_chain(folder / CERT_NAME)[0]
    renewed = []
    if authority.end < period.end:
        authority = authority.renewed(period.now)
        renewed.append(_File(folder / CA_NAME, certificate_pem(authority.certificate)))
    certificate = authority.certify_ingress(old.public_key(), names or names_of(old), period)
    _write(*renewed, _File(folder / CERT_NAME, certificate_pem(certificate)))


def issue_worker(folder: Path, name: str, out: Path, period: Period) -> None:
    """Make the folder `out` of a new worker.

    Raises: ConfigError for a name that cannot be, one issued already, or files in the way; OSError.
    """
    record = _record(folder, name)
    _refuse_to_overwrite((record, *(out / file for file in (CA_NAME, CERT_NAME, KEY_NAME))))
    authority, key = _load_lasting(folder, period), new_key()
    certificate = certificate_pem(authority.certify_worker(key.public_key(), name, period))
    _hand_out(certificate, authority, out, record, _File(out / KEY_NAME, key_pem(key), PRIVATE_MODE))


def renew_worker(folder: Path, name: str, out: Path, period: Period) -> None:
    """Certify a worker's key anew. `out` need not hold the key, which may be on the worker's machine only.

    Raises: ConfigError for a name never issued; CertificateFault if `out` holds another key; OSError.
    """
    record = _record(folder, name)
    if not record.exists():
        raise ConfigError(f"{name} has no certificate yet ({record}): issue one without --renew")
    authority, key = _load_lasting(folder, period), load_chain(record)[0].public_key()
    if (out / KEY_NAME).exists() and load_key(out / KEY_NAME).public_key() != key:
        raise CertificateFault(f"{out / KEY_NAME}: not the key of the certificate {record}")
    _hand_out(certificate_pem(authority.certify_worker(key, name, period)), authority, out, record)


def certificates_in(folder: Path) -> list[Path]:
    """Return the certificates there are in a folder of either kind."""
    paths = [folder / CA_NAME, folder / CERT_NAME, *sorted((folder / WORKERS_NAME).glob("*.pem"))]
    return [path for path in paths if path.exists()]


def _record(folder: Path, name: str) -> Path:
    if not is_worker_name(name):
        raise ConfigError(
            f"worker name is {name!r}, must be 1 to 63 letters, digits, '.', '_' or '-', no sign first"
        )
    return folder / WORKERS_NAME / f"{name}.pem"


def _hand_out(certificate: bytes, authority: Authority, out: Path, record: Path, *beside: _File) -> None:
    _make_folder(out)
    _make_folder(record.parent)
    _write(
        *beside,
        _File(out / CA_NAME, certificate_pem(authority.certificate)),
        _File(out / CERT_NAME, certificate),
        _File(record, certificate),
    )


def _load_authority(folder: Path) -> Authority:
    """Raises: CertificateFault that names the file at fault."""
    path = folder / CA_KEY_NAME
    certificate, key = load_chain(folder / CA_NAME)[0], load_key(path)
    if not isinstance(key, PrivateKey) or key.public_key() != certificate.public_key():
        raise CertificateFault(f"{path}: not the key of the CA {folder / CA_NAME}")
    return Authority(certificate, key)


def _load_lasting(folder: Path, period: Period) -> Authority:
    """Return a CA that lasts as long as what it is to sign. Raises: ConfigError, CertificateFault."""
    authority = _load_authority(folder)
    if authority.end < period.end:
        raise ConfigError(
            f"{folder / CA_NAME} ends on {authority.end:%Y-%m-%d}, before {period.days} days are over: "
            f"`llm-ingress certs init {folder} --renew` renews it"
        )
    return authority


def _refuse_to_overwrite(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} exists, and is not overwritten; --renew renews a certificate")


def _make_folder(folder: Path) -> None:
    """Make a folder for its owner alone; one that exists keeps its mode."""
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)


def _write(*files: _File) -> None:
    """Write all of these, or none: each is complete beside its place before the first is moved there.

    A reader finds the old one or the new one, and nothing between.

    Raises: OSError that names the file.
    """
    temporaries: list[str] = []
    try:
        for file in files:
            handle, temporary = tempfile.mkstemp(dir=file.path.parent, prefix=f".{file.path.name}.")
            temporaries.append(temporary)
            _fill(handle, file)
        for temporary, file in zip(temporaries, files, strict=True):
            os.replace(temporary, file.path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file.path)) from error
    finally:
        for temporary in temporaries:
            Path(temporary).unlink(missing_ok=True)


def _fill(handle: int, content: _File) -> None:
    """Write what is to be in a file that is open, and close it."""
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, content.mode)
        file.write(content.data)
        file.flush()
        os.fsync(handle)
