"""Contexts of both ends in real handshakes on loopback, and how they follow their files."""

import asyncio
import logging
import os
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from llm_ingress import tls
from llm_ingress.certs import CertificateFiles, identity_of
from llm_ingress.errors import CertificateFault
from llm_ingress.pki import Period
from llm_ingress.pki_folder import renew_ingress, renew_worker
from llm_ingress.tls import Build, LiveContext, control_context, explain, public_context, worker_context
from tests.certificates import TODAY, TOMORROW, Issued, issue

HOST = "127.0.0.1"
LONG_AGO = TODAY - timedelta(days=90)


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return issue(tmp_path_factory.mktemp("ring"))


@pytest.fixture
def old_ring(tmp_path: Path) -> Issued:
    """Its CA goes on; what that signed has expired."""
    return issue(tmp_path, now=LONG_AGO, days=30)


@asynccontextmanager
async def listening(context: ssl.SSLContext) -> AsyncIterator[int]:
    """A port on which each worker hears its own name, then its own lines."""

    answering: set[asyncio.Task[None] | None] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(asyncio.current_task())
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.write(f"{identity_of(der) if der else 'nobody'}\n".encode())
        try:
            while line := await reader.readline():
                writer.write(line)
        finally:
            writer.close()

    async with await asyncio.start_server(answer, HOST, 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]
    await asyncio.gather(*filter(None, answering), return_exceptions=True)


@asynccontextmanager
async def dialled(
    port: int, context: ssl.SSLContext, name: str = "localhost"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(HOST, port, ssl=context, server_hostname=name)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def greeting(port: int, context: ssl.SSLContext, name: str = "localhost") -> bytes:
    """What the listener says first; empty if it hung up, as it does on a worker it refuses."""
    async with dialled(port, context, name) as (reader, _):
        try:
            return await reader.readline()
        except ConnectionError:
            return b""


async def server_certificate(port: int, context: ssl.SSLContext) -> bytes:
    async with dialled(port, context) as (_, writer):
        der: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return der


async def refusal(port: int, context: ssl.SSLContext, name: str = "localhost") -> str:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - what it says is what the tests look at
        await greeting(port, context, name)
    return explain(caught.value)


# --- both ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["localhost", HOST])
async def test_a_worker_is_known_by_its_certificate(ring: Issued, name: str) -> None:
    async with listening(control_context(ring.ingress, TODAY)) as port:
        assert await greeting(port, worker_context(ring.worker, TODAY), name) == b"gpu-1\n"


async def test_the_control_listener_speaks_tls_1_3_only(ring: Issued) -> None:
    async with listening(control_context(ring.ingress, TODAY)) as port:
        context = worker_context(ring.worker, TODAY)
        async with dialled(port, context) as (_, writer):
            assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await greeting(port, context)


async def test_a_client_without_a_certificate_is_refused(ring: Issued) -> None:
    async with listening(control_context(ring.ingress, TODAY)) as port:
        assert await greeting(port, ssl.create_default_context(cafile=ring.worker.ca)) == b""


async def test_a_worker_of_another_ca_is_refused(ring: Issued, tmp_path: Path) -> None:
    stranger = issue(tmp_path).worker
    context = ssl.create_default_context(cafile=ring.worker.ca)
    context.load_cert_chain(stranger.cert, stranger.key)
    async with listening(control_context(ring.ingress, TODAY)) as port:
        assert await greeting(port, context) == b""


async def test_an_expired_worker_is_refused(old_ring: Issued) -> None:
    renew_ingress(old_ring.ingress.cert.parent, None, Period(TODAY, 30))
    context = worker_context(old_ring.worker, LONG_AGO)
    async with listening(control_context(old_ring.ingress, TODAY)) as port:
        assert await greeting(port, context) == b""
        renew_worker(old_ring.ingress.cert.parent, "gpu-1", old_ring.worker.cert.parent, Period(TODAY, 30))
        assert await greeting(port, worker_context(old_ring.worker, TODAY)) == b"gpu-1\n"


async def test_no_session_is_resumed_past_the_client_certificate(ring: Issued) -> None:
    context = worker_context(ring.worker, TODAY)
    async with (
        listening(control_context(ring.ingress, TODAY)) as port,
        dialled(port, context) as (reader, writer),
    ):
        await reader.readline()
        assert not writer.get_extra_info("ssl_object").session.has_ticket


# --- what a dial meets -----------------------------------------------------------------------------------


async def test_an_ingress_of_another_ca_is_told(ring: Issued, tmp_path: Path) -> None:
    async with listening(control_context(issue(tmp_path).ingress, TODAY)) as port:
        told = await refusal(port, worker_context(ring.worker, TODAY))
        assert told == "its certificate is of another CA than the one given here"


@pytest.mark.parametrize("name", ["localhost", HOST])
async def test_an_ingress_of_another_name_is_told(tmp_path: Path, name: str) -> None:
    elsewhere = issue(tmp_path, names="elsewhere.example,10.0.0.5")
    async with listening(control_context(elsewhere.ingress, TODAY)) as port:
        told = await refusal(port, worker_context(elsewhere.worker, TODAY), name)
        assert told.startswith("its certificate is for another name")
        assert repr(name) in told


@pytest.mark.parametrize(("valid_from", "words"), [(LONG_AGO, "has expired"), (TOMORROW, "is not yet valid")])
async def test_an_ingress_certificate_out_of_its_time_is_told(
    old_ring: Issued, valid_from: datetime, words: str
) -> None:
    pki = old_ring.ingress.cert.parent
    renew_ingress(pki, None, Period(valid_from, 30))
    renew_worker(pki, "gpu-1", old_ring.worker.cert.parent, Period(TODAY, 30))
    async with listening(control_context(old_ring.ingress, valid_from)) as port:
        assert words in await refusal(port, worker_context(old_ring.worker, TODAY))


async def test_a_worker_in_the_place_of_an_ingress_is_told(ring: Issued) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ring.worker.cert, ring.worker.key)
    async with listening(context) as port:
        told = await refusal(port, worker_context(ring.worker, TODAY))
        assert told == "its certificate is not that of an ingress"


async def test_an_ingress_that_is_not_there_is_told(ring: Issued) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))  # and nobody listens
        told = await refusal(taken.getsockname()[1], worker_context(ring.worker, TODAY))
        assert told == "unreachable: Connection refused"


async def test_a_name_that_does_not_resolve_is_told() -> None:
    with pytest.raises(socket.gaierror) as caught:
        await asyncio.open_connection("no-such-host.invalid", 1)
    assert explain(caught.value).startswith("unreachable: ")


async def test_a_port_that_speaks_something_else_is_told(ring: Issued) -> None:
    async def speak_http(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(speak_http, HOST, 0) as server:
        told = await refusal(server.sockets[0].getsockname()[1], worker_context(ring.worker, TODAY))
        assert told.startswith("it does not speak TLS 1.3: ")


async def test_a_port_that_hangs_up_is_told(ring: Issued) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, HOST, 0) as server:
        told = await refusal(server.sockets[0].getsockname()[1], worker_context(ring.worker, TODAY))
        assert told.startswith("it closed the connection instead of answering")


@pytest.mark.parametrize("alert", ["TLSV1_ALERT_UNKNOWN_CA", "SSLV3_ALERT_CERTIFICATE_EXPIRED"])
def test_a_refusal_that_gets_through_is_told(alert: str) -> None:
    error = ssl.SSLError(1, f"[SSL: {alert}]")
    error.reason = alert
    assert (
        explain(error) == f"it refused this worker: {alert.partition('_ALERT_')[2].replace('_', ' ').lower()}"
    )


def test_the_error_behind_a_client_librarys_own_is_told() -> None:
    error = RuntimeError("cannot connect")
    error.__cause__ = ConnectionRefusedError(111, "Connect call failed")
    assert explain(error) == "unreachable: Connection refused"


def test_a_dial_without_an_answer_is_told() -> None:
    assert explain(TimeoutError()) == "unreachable: no answer in time"


# --- renewal ---------------------------------------------------------------------------------------------


async def test_a_listener_uses_a_renewed_certificate_and_cuts_no_stream(tmp_path: Path) -> None:
    ring = issue(tmp_path)
    live = LiveContext(control_context, ring.ingress, TODAY)
    async with listening(live.for_listener()) as port:
        context = worker_context(ring.worker, TODAY)
        async with dialled(port, context) as (reader, writer):
            assert await reader.readline() == b"gpu-1\n"
            before = await server_certificate(port, context)
            renew_ingress(ring.ingress.cert.parent, None, Period(TODAY, 90))
            assert await server_certificate(port, context) == before
            live.poll(TODAY)
            assert await server_certificate(port, context) != before
            writer.write(b"still here\n")
            assert await reader.readline() == b"still here\n"


async def test_a_listener_follows_a_change_of_its_ca(tmp_path: Path) -> None:
    ring, other = issue(tmp_path / "ring"), issue(tmp_path / "other", worker="gpu-9")
    live = LiveContext(control_context, ring.ingress, TODAY)
    async with listening(live.for_listener()) as port:
        replace(ring.ingress, other.ingress)
        live.reload(TODAY)
        assert await greeting(port, worker_context(other.worker, TODAY)) == b"gpu-9\n"
        of_old_ca = ssl.create_default_context(cafile=other.worker.ca)
        of_old_ca.load_cert_chain(ring.worker.cert, ring.worker.key)
        assert await greeting(port, of_old_ca) == b""
        assert await greeting(port, ssl.create_default_context(cafile=other.worker.ca)) == b""


async def test_a_dial_uses_a_renewed_certificate(tmp_path: Path) -> None:
    ring = issue(tmp_path)
    live = LiveContext(worker_context, ring.worker, TODAY)
    before = live.current
    renew_worker(ring.ingress.cert.parent, "gpu-1", ring.worker.cert.parent, Period(TODAY, 90))
    live.poll(TODAY)
    assert live.current is not before
    async with listening(control_context(ring.ingress, TODAY)) as port:
        assert await greeting(port, live.current) == b"gpu-1\n"


@pytest.mark.parametrize("damage", ["half_written", "mismatched", "gone", "expired"])
async def test_files_that_cannot_be_used_leave_the_last_good_ones_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    ring, other = issue(tmp_path / "ring"), issue(tmp_path / "other")
    good = ring.ingress.cert.read_bytes()
    live = LiveContext(control_context, ring.ingress, TODAY)
    async with listening(live.for_listener()) as port:
        context = worker_context(ring.worker, TODAY)
        before = await server_certificate(port, context)
        match damage:
            case "half_written":
                ring.ingress.cert.write_bytes(good[: len(good) // 2])
            case "mismatched":
                shutil.copy(other.ingress.cert, ring.ingress.cert)
            case "gone":
                ring.ingress.key.unlink()
            case "expired":
                renew_ingress(ring.ingress.cert.parent, None, Period(LONG_AGO, 30))
        for _ in range(3):
            live.poll(TODAY)
            live.reload(TODAY)
        assert await server_certificate(port, context) == before
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(ring.ingress.cert.parent) in caplog.text


def test_a_second_kind_of_damage_is_said_too_and_so_is_one_that_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = issue(tmp_path)
    good = ring.ingress.cert.read_bytes()
    live = LiveContext(control_context, ring.ingress, TODAY)
    caplog.set_level(logging.WARNING, logger="llm_ingress.tls")
    for content in (b"nothing", None, good, None):
        if content is None:
            ring.ingress.cert.unlink()
        else:
            ring.ingress.cert.write_bytes(content)
        live.poll(TODAY)
    assert len(caplog.records) == 3


def test_a_process_that_runs_as_one_worker_does_not_become_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = issue(tmp_path / "1"), issue(tmp_path / "2", worker="gpu-2")
    live = LiveContext(worker_context, first.worker, TODAY, keeps_names=True)
    before = live.current
    replace(first.worker, other.worker)
    caplog.set_level(logging.WARNING, logger="llm_ingress.tls")
    live.poll(TODAY)
    assert live.current is before
    assert [record.getMessage() for record in caplog.records] == [
        f"the last good certificate stays in use: {first.worker.cert}: is llm-worker:gpu-2, "
        "and this process runs as llm-worker:gpu-1"
    ]


def test_files_that_do_not_change_are_not_read_again(tmp_path: Path) -> None:
    live = LiveContext(control_context, issue(tmp_path).ingress, TODAY)
    before = live.current
    live.poll(TODAY)
    assert live.current is before
    live.reload(TODAY)
    assert live.current is not before


def test_a_file_written_between_two_polls_is_seen_though_its_size_is_the_same(tmp_path: Path) -> None:
    ring = issue(tmp_path)
    live = LiveContext(control_context, ring.ingress, TODAY)
    before = live.current
    status = ring.ingress.cert.stat()
    os.utime(ring.ingress.cert, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    live.poll(TODAY)
    assert live.current is not before


async def test_renewed_files_are_found_without_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "POLL_S", 0)
    ring = issue(tmp_path)
    live = LiveContext(control_context, ring.ingress, TODAY)
    before = live.current
    following = asyncio.create_task(tls.follow([live]))
    renew_ingress(ring.ingress.cert.parent, None, Period(TODAY, 90))
    async with asyncio.timeout(5):
        while live.current is before:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0)
    following.cancel()


def test_renewed_files_are_found_within_a_minute() -> None:
    assert tls.POLL_S <= 60


@pytest.mark.parametrize("build", [control_context, worker_context])
def test_what_expires_within_30_days_is_said_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, build: Build
) -> None:
    ring = issue(tmp_path, days=31)
    files = ring.ingress if build is control_context else ring.worker
    LiveContext(build, files, TODAY)
    assert not caplog.records
    LiveContext(build, files, TOMORROW)
    assert [record.getMessage() for record in caplog.records] == [
        f"{files.cert}: expires in 30 days, on {TODAY + timedelta(days=31):%Y-%m-%d %H:%M} UTC"
    ]


def test_files_that_cannot_be_used_are_refused_at_the_start(ring: Issued) -> None:
    with pytest.raises(CertificateFault):
        LiveContext(worker_context, ring.ingress, TODAY)


# --- the public listener ---------------------------------------------------------------------------------


async def test_the_public_listener_asks_for_no_certificate_and_offers_http_2(ring: Issued) -> None:
    files = CertificateFiles(cert=ring.ingress.cert, key=ring.ingress.key)
    client = ssl.create_default_context(cafile=ring.ingress.ca)
    client.set_alpn_protocols(["h2", "http/1.1"])
    async with listening(LiveContext(public_context, files, TODAY).for_listener()) as port:
        async with dialled(port, client) as (reader, writer):
            assert await reader.readline() == b"nobody\n"
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        client.maximum_version = ssl.TLSVersion.TLSv1_2
        assert await greeting(port, client) == b"nobody\n"


def replace(files: CertificateFiles, others: CertificateFiles) -> None:
    for path, other in zip(files.paths(), others.paths(), strict=True):
        shutil.copy(other, path)
