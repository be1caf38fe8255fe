"""What is issued: names, periods, what each certificate allows."""

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from llm_ingress.certs import check_ingress, identity_of
from llm_ingress.errors import ConfigError
from llm_ingress.pki import CA_DAYS, Authority, Period, names_of, new_key, parse_names

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.new(NOON)


def ingress(authority: Authority, names: str = "ingress-a", days: int = 30) -> x509.Certificate:
    return authority.certify_ingress(new_key().public_key(), parse_names(names), Period(NOON, days))


def worker(authority: Authority, name: str = "gpu-1") -> x509.Certificate:
    return authority.certify_worker(new_key().public_key(), name, Period(NOON, 30))


def test_what_is_issued_is_what_is_read(authority: Authority) -> None:
    assert identity_of(worker(authority, "rack_2.gpu-1").public_bytes(Encoding.DER)) == "rack_2.gpu-1"
    check_ingress(ingress(authority).public_bytes(Encoding.DER))


def test_all_keys_are_p_256(authority: Authority) -> None:
    for certificate in (authority.certificate, ingress(authority), worker(authority)):
        key = certificate.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert isinstance(key.curve, ec.SECP256R1)


def test_a_period_begins_an_hour_ago_for_clocks_that_are_behind(authority: Authority) -> None:
    certificate = ingress(authority, days=30)
    assert certificate.not_valid_before_utc == NOON - timedelta(hours=1)
    assert certificate.not_valid_after_utc == NOON + timedelta(days=30)


@pytest.mark.parametrize("days", [0, -1, CA_DAYS + 1])
def test_a_period_out_of_range_is_refused(days: int) -> None:
    with pytest.raises(ConfigError, match=f"days is {days}, must be 1 to {CA_DAYS}"):
        Period(NOON, days)


def test_only_the_ca_may_sign_and_nothing_below_it(authority: Authority) -> None:
    extension = x509.BasicConstraints
    constraints = authority.certificate.extensions.get_extension_for_class(extension).value
    assert (constraints.ca, constraints.path_length) == (True, 0)
    for certificate in (ingress(authority), worker(authority)):
        assert not certificate.extensions.get_extension_for_class(extension).value.ca


def test_two_cas_differ_in_name(authority: Authority) -> None:
    assert Authority.new(NOON).certificate.subject != authority.certificate.subject


def test_a_renewed_ca_stands_for_what_it_signed_before(authority: Authority) -> None:
    later = NOON + timedelta(days=1000)
    renewed = authority.renewed(later)
    assert renewed.end == later + timedelta(days=CA_DAYS)
    ingress(authority).verify_directly_issued_by(renewed.certificate)
    ingress(renewed).verify_directly_issued_by(authority.certificate)


def test_names_are_dns_names_and_addresses_each_once(authority: Authority) -> None:
    names = names_of(ingress(authority, " ingress-a, 10.0.0.5,::1 ,*.ring.example,my_service,ingress-a"))
    assert names.get_values_for_type(x509.DNSName) == ["ingress-a", "*.ring.example", "my_service"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.5", "::1"]


WRONG_NAMES = """
a,,b|10.0.0.300|1.2.3|-a|a-|a..b|.a|a.|a b|a\tb|http://a|a:8444|[::1]|10.0.0.0/8|é|*|a.*|a_b.*.c
""".strip().split("|")


@pytest.mark.parametrize("text", ["", ",", *WRONG_NAMES, "x" * 64, "a." * 127 + "aa"])
def test_anything_else_is_no_name(text: str) -> None:
    with pytest.raises(ConfigError, match="is neither a DNS name nor an address"):
        parse_names(text)
