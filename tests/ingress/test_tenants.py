"""Whose request it is, and which proxies are believed about it."""

import pytest

from llm_ingress.errors import ConfigError
from llm_ingress.tenants import Tenancy, TenantBy, parse_proxies

BY_ADDRESS = Tenancy(trusted=parse_proxies(["10.0.0.0/8", "::1"]))


def test_without_trusted_proxies_the_header_says_nothing() -> None:
    assert Tenancy().tenant_of("10.0.0.1", ["1.2.3.4"], None) == "10.0.0.1"


def test_a_stranger_is_not_believed() -> None:
    assert BY_ADDRESS.tenant_of("8.8.8.8", ["1.2.3.4"], None) == "8.8.8.8"


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        (["1.2.3.4"], "1.2.3.4"),
        (["6.6.6.6, 1.2.3.4"], "1.2.3.4"),  # what the client itself wrote comes first
        (["6.6.6.6", "1.2.3.4"], "1.2.3.4"),
        (["1.2.3.4, 10.9.9.9"], "1.2.3.4"),  # a second proxy, trusted too
        (["6.6.6.6, 10.9.9.9, 1.2.3.4, 10.1.1.1"], "1.2.3.4"),
        (["10.9.9.9"], "10.9.9.9"),
        (["1.2.3.4:5678"], "1.2.3.4"),
        (["[fd00::5]:5678"], "fd00::5"),
        (["fd00::5"], "fd00::5"),
        (["::ffff:1.2.3.4"], "1.2.3.4"),
        (["1.2.3.4, unknown"], "10.0.0.1"),
        (["unknown, 10.9.9.9"], "10.9.9.9"),
        ([""], "10.0.0.1"),
        ([], "10.0.0.1"),
    ],
)
def test_the_first_address_that_is_no_trusted_proxy_is_the_client(forwarded: list[str], client: str) -> None:
    assert BY_ADDRESS.tenant_of("10.0.0.1", forwarded, None) == client


def test_a_proxy_is_known_by_its_mapped_address_too() -> None:
    assert BY_ADDRESS.tenant_of("::ffff:10.0.0.1", ["1.2.3.4"], None) == "1.2.3.4"


def test_a_client_without_an_address_is_a_tenant_all_the_same() -> None:
    assert BY_ADDRESS.tenant_of("", ["1.2.3.4"], None) == ""


def test_by_user_the_request_says_it_and_the_address_where_it_does_not() -> None:
    by_user = Tenancy(by=TenantBy.USER)
    assert by_user.tenant_of("1.2.3.4", [], "anna") == by_user.tenant_of("5.6.7.8", [], "anna")
    assert by_user.tenant_of("1.2.3.4", [], None) == "1.2.3.4"
    assert by_user.tenant_of("1.2.3.4", [], "5.6.7.8") != by_user.tenant_of("5.6.7.8", [], None)
    assert BY_ADDRESS.tenant_of("1.2.3.4", [], "anna") == "1.2.3.4"


@pytest.mark.parametrize("text", ["proxy.example", "10.0.0.1/8", "10.0.0.0/33", ""])
def test_what_is_no_network_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"trusted proxy '{text}'"):
        parse_proxies([text])


def test_a_name_of_any_length_is_one_tenant_and_takes_little() -> None:
    tenancy = Tenancy(by=TenantBy.USER)
    names = ["u" * 256, "u" * 257, "u" * 10**6, "u" * 10**6 + "v"]
    tenants = [tenancy.tenant_of("10.0.0.1", [], name) for name in names]
    assert tenants == [tenancy.tenant_of("10.0.0.2", [], name) for name in names]
    assert len(set(tenants)) == len(names)
    assert max(map(len, tenants)) < 300
    assert tenancy.tenant_of("10.0.0.1", [], tenants[1]) != tenants[1]  # nobody can say to be that one
