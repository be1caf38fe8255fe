"""The TLS listener: whom it turns away it says, once, with the reason; everybody else is let in."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from llm_ingress.pki import Period
from llm_ingress.pki_folder import renew_ingress
from llm_ingress.tls import control_context, worker_context
from llm_ingress.tls_listener import Complaints, TlsListener
from tests.certificates import TODAY, Issued, issue

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return issue(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    """What another CA issued."""
    return issue(tmp_path_factory.mktemp("foreign"))


class Echo(asyncio.Protocol):
    """Says again what it hears."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


@asynccontextmanager
async def listening(issued: Issued, host: str = HOST) -> AsyncIterator[TlsListener]:
    listener = TlsListener(Echo, control_context(issued.ingress, datetime.now(UTC)))
    with closing(listener):
        await listener.open(host, 0)
        yield listener


async def echoed(listener: TlsListener, tls: ssl.SSLContext | None, data: bytes = b"hi") -> bytes:
    """What comes back over a connection of its own; nothing if it is turned away."""
    return await asyncio.to_thread(_echoed, listener.port, tls, data)


def _echoed(port: int, tls: ssl.SSLContext | None, data: bytes) -> bytes:
    """Over a plain socket: asyncio's own client says nothing when it does not accept a certificate."""
    with suppress(OSError), socket.create_connection((HOST, port), timeout=10) as connection:
        if tls is not None:
            connection = tls.wrap_socket(connection, server_hostname="localhost")
        with closing(connection):
            connection.sendall(data)
            return connection.recv(len(data))
    return b""


def client(trusted: Issued, own: Issued | None = None) -> ssl.SSLContext:
    """A client that trusts an ingress, with or without a certificate of its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(trusted.worker.ca)
    if own is not None:
        context.load_cert_chain(own.worker.cert, own.worker.key)
    return context


async def said(caplog: pytest.LogCaptureFixture) -> str:
    """The one line that is logged."""
    async with asyncio.timeout(10):
        while not caplog.messages:  # noqa: ASYNC110 - the log has no event to wait for
            await asyncio.sleep(0.002)
    (message,) = caplog.messages
    return message


async def test_a_worker_of_the_ca_is_let_in_without_a_word(
    issued: Issued, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(issued) as listener:
        assert await echoed(listener, worker_context(issued.worker, datetime.now(UTC))) == b"hi"
    assert not caplog.messages


async def test_every_address_of_ipv6_is_every_address_of_ipv4_too(issued: Issued) -> None:
    async with listening(issued, "::") as listener:
        for host in (HOST, "::1"):
            reader, writer = await asyncio.open_connection(
                host, listener.port, ssl=client(issued, issued), server_hostname="localhost"
            )
            with closing(writer):
                writer.write(b"hi")
                assert await reader.read(2) == b"hi"


def with_the_certificate_of_the_ingress(issued: Issued, _foreign: Issued) -> ssl.SSLContext:
    context = client(issued)
    context.load_cert_chain(issued.ingress.cert, issued.ingress.key)
    return context


def with_tls_1_2(issued: Issued, _foreign: Issued) -> ssl.SSLContext:
    context = client(issued, issued)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


@pytest.mark.parametrize(
    ("dial", "reason"),
    [
        (lambda issued, foreign: client(issued, foreign), "its certificate is of another CA"),
        (lambda issued, _: client(issued), "peer did not return a certificate"),
        (with_the_certificate_of_the_ingress, "its certificate is not that of a worker"),
        (lambda _, foreign: client(foreign, foreign), "does not accept this ingress's certificate"),
        (with_tls_1_2, "it does not speak TLS 1.3"),
        (lambda *_: None, "it does not speak TLS 1.3"),
    ],
    ids=["another CA", "no certificate", "no worker's", "not trusted", "TLS 1.2", "plain"],
)
async def test_whoever_is_turned_away_is_one_line_with_address_and_reason(
    issued: Issued,
    foreign: Issued,
    caplog: pytest.LogCaptureFixture,
    dial: Callable[[Issued, Issued], ssl.SSLContext | None],
    reason: str,
) -> None:
    async with listening(issued) as listener:
        for _ in range(3):
            assert await echoed(listener, dial(issued, foreign), b"GET / HTTP/1.1\r\n\r\n") == b""
        line = await said(caplog)
    assert line.startswith(f"a connection from {HOST} is turned away: ")
    assert reason in line


async def test_an_expired_worker_is_told_from_one_of_another_ca(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    issued = issue(tmp_path, now=TODAY - timedelta(days=90))
    renew_ingress(tmp_path / "pki", None, Period(TODAY, 60))
    async with listening(issued) as listener:
        assert await echoed(listener, client(issued, issued)) == b""
        assert "its certificate has expired" in await said(caplog)


async def test_what_only_probes_the_port_is_not_worth_a_line(
    issued: Issued, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(issued) as listener:
        for _ in range(3):
            _, writer = await asyncio.open_connection(HOST, listener.port)
            writer.close()
            await writer.wait_closed()
        assert await echoed(listener, client(issued, issued)) == b"hi"
    assert not caplog.messages


async def test_a_silent_handshake_holds_nobody_up_and_ends_with_a_line(
    issued: Issued, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("llm_ingress.tls_listener.HANDSHAKE_S", 0.1)
    async with listening(issued) as listener:
        reader, writer = await asyncio.open_connection(HOST, listener.port)
        with closing(writer):
            assert await echoed(listener, client(issued, issued)) == b"hi"
            async with asyncio.timeout(10):
                with suppress(ConnectionError):
                    assert await reader.read() == b""
        assert f"a connection from {HOST} is turned away: no TLS handshake within 0.1 s" == await said(caplog)


async def test_a_closed_listener_accepts_nobody_and_keeps_whom_it_has(issued: Issued) -> None:
    async with listening(issued) as listener:
        port = listener.port
        reader, writer = await asyncio.open_connection(
            HOST, port, ssl=client(issued, issued), server_hostname="localhost"
        )
        with closing(writer):
            writer.write(b"hi")
            assert await reader.read(2) == b"hi"
            listener.close()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(HOST, port)
            writer.write(b"hi")
            assert await reader.read(2) == b"hi"


def test_a_complaint_is_repeated_after_a_while_and_others_have_their_own() -> None:
    complaints = Complaints(every_s=10.0, n_most=3)
    assert complaints.is_due("a", "expired", 0.0)
    assert not complaints.is_due("a", "expired", 9.9)
    assert complaints.is_due("a", "another CA", 9.9)
    assert complaints.is_due("b", "expired", 9.9)
    assert not complaints.is_due("c", "expired", 9.9)  # too many to be read
    assert complaints.is_due("a", "expired", 10.0)
