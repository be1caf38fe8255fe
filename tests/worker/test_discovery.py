"""Ingresses found by DNS: a real resolver, and a name server on loopback whose records the test changes."""

import asyncio
import logging

import dns.asyncresolver
import pytest

from llm_ingress.endpoint import Endpoint
from llm_worker.discovery import Discovery, Query, Target, find
from tests.name_server import name_server

NAME = "ring.test."


class Holder:
    """Notes which rings it pulls from; a ring is its target here."""

    def __init__(self) -> None:
        self.rings: set[Target] = set()

    def add_ring(self, ring: Target, /) -> None:
        assert ring not in self.rings
        self.rings.add(ring)

    def remove_ring(self, ring: Target, /) -> None:
        self.rings.remove(ring)


def discovery_of(query: Query, resolver: dns.asyncresolver.Resolver) -> tuple[Discovery[Target], Holder]:
    holder = Holder()
    return Discovery(query, resolver, dial=lambda target: target, holder=holder), holder


def target(host: str, port: int = 8444, name: str = NAME) -> Target:
    return Target(Endpoint(host, port), name)


def query(port: int | None = None) -> Query:
    return Query(name=NAME, port=port, default_port=8444)


async def test_every_address_of_a_name_is_an_ingress_with_that_name() -> None:
    async with name_server() as (server, resolver):
        server.records = {(NAME, "A"): ["10.0.0.1", "10.0.0.2"], (NAME, "AAAA"): ["fd00::1"]}
        found = await find(query(), resolver)
    assert found.targets == {target("10.0.0.1"), target("10.0.0.2"), target("fd00::1")}
    assert target("fd00::1").url == "https://[fd00::1]:8444"


async def test_a_port_that_is_given_is_dialled_and_srv_is_not_asked() -> None:
    async with name_server() as (server, resolver):
        server.records = {(NAME, "A"): ["10.0.0.1"], (NAME, "SRV"): ["0 0 1 elsewhere.test."]}
        found = await find(query(port=99), resolver)
        assert found.targets == {target("10.0.0.1", 99)}
        assert (NAME, "SRV") not in server.asked


async def test_srv_gives_ports_and_the_names_that_certificates_must_have() -> None:
    async with name_server() as (server, resolver):
        server.records = {
            (NAME, "SRV"): ["0 0 9001 a.test.", "10 5 9002 b.test."],
            (NAME, "A"): ["10.0.0.9"],
            ("a.test.", "A"): ["10.0.0.1"],
            ("b.test.", "A"): ["10.0.0.2"],
        }
        found = await find(query(), resolver)
    assert found.targets == {target("10.0.0.1", 9001, "a.test"), target("10.0.0.2", 9002, "b.test")}
    assert not found.faults


async def test_a_service_that_says_it_is_not_to_be_had_leads_nowhere() -> None:
    async with name_server() as (server, resolver):
        server.records = {(NAME, "SRV"): ["0 0 0 ."], (NAME, "A"): ["10.0.0.9"]}
        found = await find(query(), resolver)
    assert (found.targets, found.faults) == (frozenset(), ())


async def test_what_comes_is_added_once_and_what_goes_is_removed() -> None:
    async with name_server() as (server, resolver):
        discovery, holder = discovery_of(query(), resolver)
        server.records[NAME, "A"] = ["10.0.0.1", "10.0.0.2"]
        await discovery.look()
        await discovery.look()
        assert holder.rings == {target("10.0.0.1"), target("10.0.0.2")}
        server.records[NAME, "A"] = ["10.0.0.2", "10.0.0.3"]
        await discovery.look()
        assert holder.rings == {target("10.0.0.2"), target("10.0.0.3")}
        server.records.clear()
        await discovery.look()
        assert holder.rings == set()


async def test_a_look_up_that_fails_adds_what_is_seen_and_removes_nothing() -> None:
    async with name_server() as (server, resolver):
        discovery, holder = discovery_of(query(), resolver)
        server.records = {(NAME, "A"): ["10.0.0.1"], (NAME, "AAAA"): ["fd00::1"]}
        await discovery.look()
        server.broken = {"AAAA"}
        server.records[NAME, "A"] = ["10.0.0.2"]
        await discovery.look()
        assert holder.rings == {target("10.0.0.1"), target("10.0.0.2"), target("fd00::1")}
        server.broken = {"SRV"}
        await discovery.look()
        assert len(holder.rings) == 3
        server.broken = set()
        await discovery.look()
        assert holder.rings == {target("10.0.0.2"), target("fd00::1")}


async def test_each_change_of_state_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with name_server() as (server, resolver):
        discovery, _ = discovery_of(query(), resolver)
        for _ in range(2):
            await discovery.look()
        server.records[NAME, "A"] = ["10.0.0.1"]
        for _ in range(2):
            await discovery.look()
        server.broken = {"SRV"}
        for _ in range(2):
            await discovery.look()
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [
        ("WARNING", "discovery: ring.test. leads to no ingress"),
        ("INFO", "discovery: ring.test. leads to 10.0.0.1:8444 (ring.test.)"),
        (
            "WARNING",
            "discovery: ring.test. leads to 10.0.0.1:8444 (ring.test.);"
            " looking up SRV of ring.test. failed: NoNameservers",
        ),
    ]


async def test_it_looks_again_every_interval_whatever_happens() -> None:
    async with name_server() as (server, resolver):
        discovery, holder = discovery_of(query(), resolver)
        server.broken = {"A", "AAAA", "SRV"}
        running = asyncio.create_task(discovery.run(0.01))
        try:
            async with asyncio.timeout(10):
                while len(server.asked) < 3:  # noqa: ASYNC110 - no event tells it
                    await asyncio.sleep(0.01)
                server.broken = set()
                server.records[NAME, "A"] = ["10.0.0.1"]
                while not holder.rings:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            running.cancel()
