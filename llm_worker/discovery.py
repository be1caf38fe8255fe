"""Finding ingresses by DNS, and following what comes and goes.

A name with a port is looked up as A and AAAA; one without as SRV first, and what SRV names as A and AAAA.
Every address is an ingress of its own: it is dialled, and must prove to have the name. A look-up that fails
says nothing: what was known stays.

Owns: the rings of the addresses found. Called by: the command line, on the event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Never, Protocol, TypeVar

import dns.asyncresolver
import dns.exception
import dns.resolver
from dns.rdatatype import RdataType

from llm_ingress.endpoint import Endpoint
from llm_worker.errors import WorkerConfigError

logger = logging.getLogger(__name__)

LOOKUP_S = 5.0

R = TypeVar("R")
Held = TypeVar("Held", contravariant=True)


@dataclass(frozen=True, slots=True)
class Target:
    """An ingress to dial: where, and the name its certificate must have."""

    endpoint: Endpoint
    name: str

    @property
    def url(self) -> str:
        return f"https://{self.endpoint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What to look up. Without a `port` SRV is asked first; `default_port` is for plain addresses then."""

    name: str
    port: int | None = None
    default_port: int

    def __str__(self) -> str:
        return self.name if self.port is None else f"{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class Found:
    """What look-ups answered. It is complete if none of them failed; `faults` says how those did."""

    targets: frozenset[Target]
    faults: tuple[str, ...] = ()

    @classmethod
    def union(cls, parts: Iterable["Found"]) -> "Found":
        parts = tuple(parts)
        return cls(
            frozenset().union(*(part.targets for part in parts)),
            tuple(fault for part in parts for fault in part.faults),
        )


class RingHolder(Protocol[Held]):
    """Who pulls from the rings found: the worker."""

    def add_ring(self, ring: Held, /) -> None: ...

    def remove_ring(self, ring: Held, /) -> None: ...


class Discovery(Generic[R]):
    """Keeps a worker's rings in step with what a name leads to. `dial` makes the ring of a target."""

    def __init__(
        self,
        query: Query,
        resolver: dns.asyncresolver.Resolver,
        *,
        dial: Callable[[Target], R],
        holder: RingHolder[R],
    ) -> None:
        self.rings: dict[Target, R] = {}
        self._query = query
        self._resolver = resolver
        self._dial = dial
        self._holder = holder
        self._last_words: str | None = None

    async def run(self, interval_s: float) -> Never:
        """Look every `interval_s`, until cancelled."""
        while True:
            try:
                await self.look()
            except Exception:
                logger.exception("discovery of %s failed", self._query)
            await asyncio.sleep(interval_s)

    async def look(self) -> None:
        """Look once, and add and remove rings accordingly."""
        found = await find(self._query, self._resolver)
        for target in found.targets - self.rings.keys():
            self.rings[target] = ring = self._dial(target)
            self._holder.add_ring(ring)
        if not found.faults:
            for target in self.rings.keys() - found.targets:
                self._holder.remove_ring(self.rings.pop(target))
        self._note(found)

    def _note(self, found: Found) -> None:
        """Log a change of state, once."""
        known = (
            ", ".join(sorted(f"{target.endpoint} ({target.name})" for target in self.rings)) or "no ingress"
        )
        words = "; ".join((f"leads to {known}", *sorted(found.faults)))
        if words != self._last_words:
            self._last_words = words
            is_fine = self.rings and not found.faults
            logger.log(logging.INFO if is_fine else logging.WARNING, "discovery: %s %s", self._query, words)


def system_resolver() -> dns.asyncresolver.Resolver:
    """Return a resolver as this machine is set up. Raises: WorkerConfigError if it is not."""
    try:
        return dns.asyncresolver.Resolver()
    except dns.exception.DNSException as error:
        raise WorkerConfigError(f"--discovery-dns: no name server is known here: {error}") from error


async def find(query: Query, resolver: dns.asyncresolver.Resolver) -> Found:
    """Return the ingresses a name leads to now."""
    if query.port is not None:
        return await _hosts(query.name, query.port, resolver)
    try:
        services = await _ask(query.name, RdataType.SRV, resolver)
    except dns.exception.DNSException as error:
        return Found(frozenset(), (_fault(query.name, RdataType.SRV, error),))
    if not services:
        return await _hosts(query.name, query.default_port, resolver)
    hosts = [(record.target.to_text(omit_final_dot=True), record.port) for record in services]
    # "." as the only target is how a name says that the service is not to be had. Source: RFC 2782.
    lookups = [_hosts(name, port, resolver) for name, port in hosts if name != "."]
    return Found.union(await asyncio.gather(*lookups))


async def _hosts(name: str, port: int, resolver: dns.asyncresolver.Resolver) -> Found:
    kinds = (RdataType.A, RdataType.AAAA)
    return Found.union(await asyncio.gather(*(_addresses(name, port, kind, resolver) for kind in kinds)))


async def _addresses(name: str, port: int, kind: RdataType, resolver: dns.asyncresolver.Resolver) -> Found:
    try:
        records = await _ask(name, kind, resolver)
    except dns.exception.DNSException as error:
        return Found(frozenset(), (_fault(name, kind, error),))
    return Found(frozenset(Target(Endpoint(record.address, port), name) for record in records))


async def _ask(name: str, kind: RdataType, resolver: dns.asyncresolver.Resolver) -> list[Any]:
    """Return the records of a kind; none if the name, or the kind for it, is known not to exist.

    Raises: DNSException.
    """
    try:
        return list(await resolver.resolve(name, kind, search=True, lifetime=LOOKUP_S))
    except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
        return []


def _fault(name: str, kind: RdataType, error: dns.exception.DNSException) -> str:
    return f"looking up {kind.name} of {name} failed: {type(error).__name__}"
