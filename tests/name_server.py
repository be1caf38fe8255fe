"""A name server on loopback whose records a test changes, and a resolver that asks no other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import dns.asyncresolver
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

LOOPBACK = "127.0.0.1"


class NameServer(asyncio.DatagramProtocol):
    """Answers from `records` (name and kind to texts), and fails for the kinds in `broken`."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.broken: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No subclass, in spite of its methods.
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self._transport is not None
        self._transport.sendto(self._answer(dns.message.from_wire(data)).to_wire(), addr)

    def _answer(self, query: dns.message.Message) -> dns.message.Message:
        (question,) = query.question
        name, kind = question.name.to_text(), dns.rdatatype.to_text(question.rdtype)
        self.asked.append((name, kind))
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.AA | dns.flags.RA
        if kind in self.broken:
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif texts := self.records.get((name, kind)):
            answer.answer.append(dns.rrset.from_text_list(name, 1, "IN", kind, texts))
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        return answer


@asynccontextmanager
async def name_server() -> AsyncIterator[tuple[NameServer, dns.asyncresolver.Resolver]]:
    """A name server, and a resolver that asks no other."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, local_addr=(LOOPBACK, 0))
    try:
        yield server, resolver_at(transport.get_extra_info("sockname")[1])
    finally:
        transport.close()


def resolver_at(port: int) -> dns.asyncresolver.Resolver:
    """A resolver that asks the name server at that port of loopback."""
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers = [LOOPBACK]
    resolver.port = port
    return resolver
