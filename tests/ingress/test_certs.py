"""What is read in a certificate, and what is refused with which words."""

import base64
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import example, given
from hypothesis import strategies as st

from llm_ingress.certs import (
    CertificateFiles,
    Role,
    check_ingress,
    diagnose,
    expiry_warning,
    identity_of,
    is_worker_name,
    read_facts,
)
from llm_ingress.errors import CertificateFault
from llm_ingress.pki import Authority, Period, certificate_pem, key_pem, new_key
from tests.certificates import TODAY, Issued, issue

CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
URI = x509.UniformResourceIdentifier
NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
KEY = ec.generate_private_key(ec.SECP256R1())


def certificate(
    names: list[x509.GeneralName] | None, usages: list[x509.ObjectIdentifier] | None
) -> x509.Certificate:
    """A self-signed certificate of any shape."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gpu-1")])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject)
    builder = builder.public_key(KEY.public_key()).serial_number(1)
    builder = builder.not_valid_before(TODAY).not_valid_after(TODAY + timedelta(days=1))
    if names is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if usages is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(KEY, hashes.SHA256())


def der(names: list[x509.GeneralName] | None, usages: list[x509.ObjectIdentifier] | None) -> bytes:
    return certificate(names, usages).public_bytes(Encoding.DER)


WORKER_DER = der([URI("llm-worker:gpu-1")], [CLIENT])


# --- identity --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpu-1", "a", "GPU_1.rack-2", "9", "x" * 63])
def test_a_worker_is_who_its_certificate_names(name: str) -> None:
    assert is_worker_name(name)
    assert identity_of(der([URI(f"llm-worker:{name}")], [CLIENT])) == name


@pytest.mark.parametrize(
    "names",
    [
        None,
        [x509.DNSName("gpu-1")],
        [URI("llm-worker:gpu-1"), URI("llm-worker:gpu-2")],
        [URI("llm-worker:gpu-1"), x509.DNSName("gpu-1")],
        [URI("llm-worker:")],
        [URI("llm-worker://gpu-1")],
        [URI("LLM-worker:gpu-1")],
        [URI("https://gpu-1")],
        [URI("llm-worker:gpu 1")],
        [URI("llm-worker:gpu-1\n")],
        [URI("llm-worker:-gpu")],
        [URI("llm-worker:../gpu")],
        [URI("llm-worker:" + "x" * 64)],
        [x509.RFC822Name("gpu@example.com")],
    ],
    ids=repr,
)
def test_any_other_name_is_refused(names: list[x509.GeneralName] | None) -> None:
    with pytest.raises(CertificateFault, match=r"^its names? (is|are) ") as caught:
        identity_of(der(names, [CLIENT]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "usages", [None, [SERVER], [CLIENT, SERVER], [ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE]]
)
def test_a_worker_may_be_a_client_and_nothing_else(usages: list[x509.ObjectIdentifier] | None) -> None:
    with pytest.raises(CertificateFault, match=r"^its extended key usage must be clientAuth alone$"):
        identity_of(der([URI("llm-worker:gpu-1")], usages))


@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(CertificateFault):
        identity_of(garbage)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")  # the library's, of what it will refuse one day
@given(st.integers(0, len(WORKER_DER) - 1), st.integers(0, 255))
@example(12, 90)  # its version
def test_a_damaged_certificate_is_read_or_refused_and_nothing_else(position: int, value: int) -> None:
    damaged = bytearray(WORKER_DER)
    damaged[position] = value
    try:
        name = identity_of(bytes(damaged))
    except CertificateFault:
        return
    assert is_worker_name(name)


def test_an_ingress_has_dns_names_and_addresses() -> None:
    check_ingress(der([x509.DNSName("ingress-a"), x509.IPAddress(ip_address("10.0.0.5"))], [SERVER]))


@pytest.mark.parametrize(
    ("names", "usages"),
    [
        (None, [SERVER]),
        ([URI("llm-worker:gpu-1")], [SERVER]),
        ([x509.DNSName("ingress-a"), URI("llm-worker:gpu-1")], [SERVER]),
        ([x509.DNSName("ingress-a")], [CLIENT]),
        ([x509.DNSName("ingress-a")], [SERVER, CLIENT]),
        ([x509.DNSName("ingress-a")], None),
    ],
)
def test_any_other_ingress_is_refused(
    names: list[x509.GeneralName] | None, usages: list[x509.ObjectIdentifier] | None
) -> None:
    with pytest.raises(CertificateFault, match=r"^its "):
        check_ingress(der(names, usages))


# --- diagnosis -------------------------------------------------------------------------------------------


@pytest.fixture
def ring(tmp_path: Path) -> Issued:
    return issue(tmp_path / "ring", now=NOON, days=30)


def fault(files: CertificateFiles, role: Role | None = Role.WORKER, now: datetime = NOON) -> str:
    with pytest.raises(CertificateFault) as caught:
        diagnose(files, role, now)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def signed_by(root: Authority, authority: Authority) -> bytes:
    """An authority's certificate as another one vouches for it."""
    own = authority.certificate
    builder = x509.CertificateBuilder().subject_name(own.subject).issuer_name(root.certificate.subject)
    builder = builder.public_key(authority.key.public_key()).serial_number(1)
    builder = builder.not_valid_before(own.not_valid_before_utc).not_valid_after(own.not_valid_after_utc)
    return certificate_pem(builder.sign(root.key, hashes.SHA256()))


def test_good_files_pass(ring: Issued) -> None:
    diagnose(ring.worker, Role.WORKER, NOON)
    diagnose(ring.ingress, Role.INGRESS, NOON)


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
def test_a_file_that_cannot_be_read_is_named(ring: Issued, name: str) -> None:
    path: Path = getattr(ring.worker, name)
    path.unlink()
    assert fault(ring.worker) == f"{path}: No such file or directory"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cert", "not a certificate in PEM form"),
        ("key", "not an unencrypted private key in PEM form"),
        ("ca", "not a certificate in PEM form"),
    ],
)
@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_file_that_is_something_else_is_named(ring: Issued, name: str, words: str, content: bytes) -> None:
    path: Path = getattr(ring.worker, name)
    path.write_bytes(content)
    assert fault(ring.worker) == f"{path}: {words}"


def test_a_certificate_whose_key_is_damaged_is_named(ring: Issued) -> None:
    der = x509.load_pem_x509_certificate(ring.worker.cert.read_bytes()).public_bytes(Encoding.DER)
    curve = bytes.fromhex("06082a8648ce3d030107")
    unknown = base64.encodebytes(der.replace(curve, curve[:-1] + b"\x63")).decode()
    ring.worker.cert.write_text(f"-----BEGIN CERTIFICATE-----\n{unknown}-----END CERTIFICATE-----\n")
    assert fault(ring.worker) == f"{ring.worker.cert}: not a certificate in PEM form"


def test_a_key_behind_a_password_is_named(ring: Issued) -> None:
    locked = KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    ring.worker.key.write_bytes(locked)
    assert fault(ring.worker) == f"{ring.worker.key}: not an unencrypted private key in PEM form"


def test_a_key_that_does_not_fit_is_named(ring: Issued) -> None:
    ring.worker.key.write_bytes(key_pem(KEY))
    assert fault(ring.worker) == f"{ring.worker.key}: not the key of the certificate {ring.worker.cert}"


def test_a_certificate_is_good_until_the_second_it_expires(ring: Issued) -> None:
    end = NOON + timedelta(days=30)
    diagnose(ring.worker, Role.WORKER, end - timedelta(seconds=1))
    assert fault(ring.worker, now=end) == f"{ring.worker.cert}: expired on 2030-03-02 12:00 UTC"


def test_a_certificate_that_is_not_yet_valid_is_told_with_this_machines_clock(ring: Issued) -> None:
    told = fault(ring.worker, now=NOON - timedelta(days=1))
    assert told.startswith(f"{ring.worker.cert}: not yet valid, only from 2030-01-31 11:00 UTC on")
    assert "2030-01-30 12:00 UTC" in told


def test_a_certificate_of_another_ca_is_told(ring: Issued, tmp_path: Path) -> None:
    other = issue(tmp_path / "other", now=NOON).worker
    files = CertificateFiles(cert=ring.worker.cert, key=ring.worker.key, ca=other.ca)
    assert fault(files) == f"{files.cert}: not signed by the CA {other.ca}"


@pytest.mark.parametrize(("role", "other"), [(Role.WORKER, "ingress"), (Role.INGRESS, "worker")])
def test_a_certificate_for_the_other_end_is_told(ring: Issued, role: Role, other: str) -> None:
    files: CertificateFiles = getattr(ring, other)
    assert fault(files, role).startswith(f"{files.cert}: not the certificate of ")
    assert role in fault(files, role)


def test_a_ca_that_has_expired_is_told_as_such(ring: Issued) -> None:
    authority, key = Authority.new(NOON - timedelta(days=3700)), new_key()
    assert ring.worker.ca is not None
    ring.worker.ca.write_bytes(certificate_pem(authority.certificate))
    ring.worker.cert.write_bytes(
        certificate_pem(authority.certify_worker(key.public_key(), "gpu-1", Period(NOON, 30)))
    )
    ring.worker.key.write_bytes(key_pem(key))
    assert fault(ring.worker).startswith(f"{ring.worker.ca}: expired on ")


def test_one_of_several_cas_is_enough(ring: Issued, tmp_path: Path) -> None:
    other = issue(tmp_path / "other", now=NOON).worker
    assert ring.worker.ca is not None
    assert other.ca is not None
    ring.worker.ca.write_bytes(other.ca.read_bytes() + ring.worker.ca.read_bytes())
    diagnose(ring.worker, Role.WORKER, NOON)


def test_a_renewed_ca_beside_its_expired_self_is_good(tmp_path: Path) -> None:
    old, key = Authority.new(NOON - timedelta(days=3700)), new_key()
    ca, files = tmp_path / "ca.pem", CertificateFiles.in_folder(tmp_path)
    files.cert.write_bytes(certificate_pem(old.certify_worker(key.public_key(), "gpu-1", Period(NOON, 30))))
    files.key.write_bytes(key_pem(key))
    ca.write_bytes(certificate_pem(old.certificate) + certificate_pem(old.renewed(NOON).certificate))
    diagnose(files, Role.WORKER, NOON)


def test_a_chain_through_an_authority_between_is_followed(tmp_path: Path) -> None:
    root, between, key = Authority.new(NOON), Authority.new(NOON), new_key()
    files = CertificateFiles.in_folder(tmp_path)
    leaf = certificate_pem(between.certify_worker(key.public_key(), "gpu-1", Period(NOON, 30)))
    (tmp_path / "ca.pem").write_bytes(certificate_pem(root.certificate))
    files.key.write_bytes(key_pem(key))
    files.cert.write_bytes(leaf + signed_by(root, between))
    diagnose(files, Role.WORKER, NOON)
    files.cert.write_bytes(leaf + signed_by(root, Authority.new(NOON)))
    assert "not signed by the CA" in fault(files)


def test_a_public_certificate_is_only_asked_to_fit_its_key(ring: Issued) -> None:
    files = CertificateFiles(cert=ring.worker.cert, key=ring.worker.key)
    diagnose(files, None, NOON + timedelta(days=1000))
    ring.worker.key.write_bytes(key_pem(KEY))
    assert "not the key of" in fault(files, None)


# --- what a human should know ----------------------------------------------------------------------------


def test_facts_are_the_names_and_the_dates(ring: Issued) -> None:
    facts = read_facts(ring.ingress.cert)
    assert facts.names == ("localhost", "127.0.0.1")
    assert (facts.not_before, facts.not_after) == (NOON - timedelta(hours=1), NOON + timedelta(days=30))
    assert read_facts(ring.worker.cert).names == ("llm-worker:gpu-1",)


@pytest.mark.parametrize(
    ("days_before", "words"),
    [
        (30.5, None),
        (30, "expires in 30 days, on 2030-03-02 12:00 UTC"),
        (0.5, "expires in 0 days, on 2030-03-02 12:00 UTC"),
        (0, "expired on 2030-03-02 12:00 UTC"),
        (-5, "expired on 2030-03-02 12:00 UTC"),
    ],
)
def test_the_end_is_told_30_days_ahead(ring: Issued, days_before: float, words: str | None) -> None:
    now = NOON + timedelta(days=30) - timedelta(days=days_before)
    expected = None if words is None else f"{ring.worker.cert}: {words}"
    assert expiry_warning(ring.worker.cert, now) == expected
