"""Whose request it is: lanes are shared out fairly among tenants.

A tenant is the client's address, or the user its request names. What a proxy says of the client before it is
believed only of proxies the operator trusts: anybody can send the header. Pure. Called by: `exchange.py`.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import TypeAlias

from llm_ingress.errors import ConfigError

# A longer name is known by its digest: what tenants have is bounded by how many things, not by their names.
NAME_MAX_CHARS = 256

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


class TenantBy(StrEnum):
    """What tells tenants apart."""

    ADDRESS = "address"
    USER = "user"  # of the request's body; the address where it names none


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenancy:
    """Which tenant a request belongs to."""

    by: TenantBy = TenantBy.ADDRESS
    trusted: tuple[Network, ...] = ()

    def tenant_of(self, peer: str, forwarded: Sequence[str], user: str | None) -> str:
        """Return the tenant of a request that came from `peer` with these X-Forwarded-For headers."""
        if self.by is TenantBy.USER and user:
            return _tenant_named(user)
        return self._client(peer, forwarded)

    def _client(self, peer: str, forwarded: Sequence[str]) -> str:
        """Follow the chain of proxies back as long as each that names the next is trusted.

        Each proxy appends the address it was called from, so what the client itself wrote comes first.
        """
        client = _address(peer)
        hops = [hop for header in forwarded for hop in header.split(",")]
        while client is not None and hops and self._trusts(client):
            earlier = _address(hops.pop())
            if earlier is None:
                break
            client = earlier
        return peer if client is None else str(client)

    def _trusts(self, address: Address) -> bool:
        return any(address in network for network in self.trusted)


def _tenant_named(user: str) -> str:
    if len(user) <= NAME_MAX_CHARS:
        return f"user {user}"
    return f"digest {blake2b(user.encode(), digest_size=16).hexdigest()}"


def parse_proxies(texts: Iterable[str]) -> tuple[Network, ...]:
    """Return the networks of proxies, each given as an address or in CIDR form. Raises: ConfigError."""
    return tuple(_network(text) for text in texts)


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigError(f"trusted proxy {text!r} is not an address or a CIDR range: {error}") from error


def _address(text: str) -> Address | None:
    """Return the address a hop is written as, some with a port behind it; None if it is none.

    A listener on both families sees IPv4 clients under mapped addresses.
    """
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped
