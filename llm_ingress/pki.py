"""Certificates as they are issued: by a private CA, to an ingress, to each worker.

Pure but for the random numbers: no files, no clock; `pki_folder.py` keeps what is made here, `certs.py` reads
it. Time is a parameter, an aware datetime.
"""

import re
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_address
from typing import TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from llm_ingress.certs import WORKER_SCHEME
from llm_ingress.errors import CertificateFault, ConfigError

CA_DAYS = 3650
# The clocks of other machines may be a little behind; what is issued now should serve now.
BACKDATED = timedelta(hours=1)

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"  # Compose's service names have underscores
# A last label of digits alone is an address with a slip in it.
_DNS_NAME = re.compile(rf"(?=.{{1,253}}\Z)(?:\*\.)?(?:{_LABEL}\.)*(?!\d+\Z){_LABEL}")

Names: TypeAlias = x509.SubjectAlternativeName
PublicKey: TypeAlias = CertificatePublicKeyTypes
PrivateKey: TypeAlias = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Period:
    """How long a certificate is valid: for `days` from `now` on."""

    now: datetime
    days: int

    def __post_init__(self) -> None:
        if not 1 <= self.days <= CA_DAYS:
            raise ConfigError(f"days is {self.days}, must be 1 to {CA_DAYS}")

    @property
    def begin(self) -> datetime:
        return self.now - BACKDATED

    @property
    def end(self) -> datetime:
        return self.now + timedelta(days=self.days)


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA, with the key that signs for it."""

    certificate: x509.Certificate
    key: PrivateKey

    @classmethod
    def new(cls, now: datetime) -> "Authority":
        # Two CAs of one name would differ in their signatures only, and the wrong one look like a forgery.
        name = _name(f"llm-ring CA {secrets.token_hex(4)}")
        key = new_key()
        return cls(_certify_authority(name, key, now), key)

    @property
    def end(self) -> datetime:
        return self.certificate.not_valid_after_utc

    def renewed(self, now: datetime) -> "Authority":
        """Return it with a later end; what it signed stays valid, as its name and key stay the same."""
        return Authority(_certify_authority(self.certificate.subject, self.key, now), self.key)

    def certify_ingress(self, key: PublicKey, names: Names, period: Period) -> x509.Certificate:
        leaf = _leaf(self, _name("llm-ingress"), key, period)
        return _sign(self, leaf, names, ExtendedKeyUsageOID.SERVER_AUTH)

    def certify_worker(self, key: PublicKey, name: str, period: Period) -> x509.Certificate:
        """`name` is one that `certs.is_worker_name` allows."""
        leaf = _leaf(self, _name(name), key, period)
        names = Names([x509.UniformResourceIdentifier(WORKER_SCHEME + name)])
        return _sign(self, leaf, names, ExtendedKeyUsageOID.CLIENT_AUTH)


def new_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def parse_names(text: str) -> Names:
    """Return the DNS names and addresses of an ingress, separated by commas in `text`.

    Raises: ConfigError that quotes what is neither.
    """
    entries = dict.fromkeys(entry.strip() for entry in text.split(","))
    return Names([_parse_name(entry) for entry in entries])


def names_of(certificate: x509.Certificate) -> Names:
    """Return the names a certificate was issued for. Raises: CertificateFault if there are none."""
    try:
        return certificate.extensions.get_extension_for_class(Names).value
    except x509.ExtensionNotFound as error:
        raise CertificateFault("the old certificate has no names to renew: give them") from error


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def key_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _parse_name(entry: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(entry))
    except ValueError:
        if _DNS_NAME.fullmatch(entry) is None:
            raise ConfigError(f"{entry!r} is neither a DNS name nor an address") from None
        return x509.DNSName(entry)


def _certify_authority(name: x509.Name, key: PrivateKey, now: datetime) -> x509.Certificate:
    return (
        _builder(name, name, key.public_key(), Period(now, CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(is_ca=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def _leaf(
    authority: Authority, subject: x509.Name, key: PublicKey, period: Period
) -> x509.CertificateBuilder:
    return (
        _builder(subject, authority.certificate.subject, key, period)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(is_ca=False), critical=True)
    )


def _sign(
    authority: Authority, leaf: x509.CertificateBuilder, names: Names, usage: ObjectIdentifier
) -> x509.Certificate:
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    return (
        leaf.add_extension(names, critical=False)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, period: Period
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(period.begin)
        .not_valid_after(period.end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
