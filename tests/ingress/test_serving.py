"""From the open socket to the end of the drain, over a real hypercorn on loopback."""

import asyncio
import gc
import json
import socket
import ssl
import struct
import subprocess
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from llm_ingress.errors import ConfigError
from llm_ingress.gateway import Gateway, GatewayConfig
from llm_ingress.h2_flow import ClosingConnection
from llm_ingress.serving import SEND_BUFFER_BYTES, ServingConfig, listen
from llm_ingress.tls_memory import READ_BUFFER_BYTES
from llm_ingress.wire import Grant
from tests.ingress.scripted import CHAT, ScriptedWorker, Server, chat, event, raw_post, serving

DONE = b"data: [DONE]\n\n"
STREAM = json.dumps(chat(stream=True)).encode()


@asynccontextmanager
async def draining(
    drain_timeout_s: float = 30.0,
) -> AsyncIterator[tuple[Server, ScriptedWorker, httpx.AsyncClient]]:
    """A server, to be drained by the test, and a client whose connection is open already."""
    config = ServingConfig(port=0, drain_timeout_s=drain_timeout_s)
    async with serving(config=config) as server, httpx.AsyncClient(base_url=server.url) as client:
        worker = ScriptedWorker(server.gateway)
        assert (await client.get("/ready")).status_code == 200
        yield server, worker, client


async def begin(
    server: Server, worker: ScriptedWorker
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Grant]:
    """A stream whose client has read its first event."""
    reader, writer = await raw_post(server, STREAM)
    grant = await worker.granted()
    worker.begin(grant)
    worker.say(grant, event("a"))
    await reader.readuntil(event("a"))
    return reader, writer, grant


async def ended(server: Server) -> None:
    async with asyncio.timeout(5):
        await server.task


async def test_it_says_where_it_serves(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as server, httpx.AsyncClient() as client:
        await client.get(server.url + "/health")
        assert server.port != 0
        assert capsys.readouterr().out == f"Serving on http://127.0.0.1:{server.port}\n"


async def test_running_answers_finish_and_new_ones_are_refused() -> None:
    async with draining() as (server, worker, client):
        reader, writer, grant = await begin(server, worker)
        server.drain.ask()
        while (ready := await client.get("/ready")).status_code == 200:
            pass
        refused = await client.post(CHAT, json=chat())
        health = await client.get("/health")
        assert (ready.status_code, ready.json()["error"]["reason"]) == (503, "draining")
        assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "draining")
        assert refused.headers["connection"] == "close"
        assert "retry-after" in refused.headers
        assert (health.status_code, health.json()["status"]) == (200, "draining")
        worker.say(grant, event("b") + DONE)
        worker.end(grant)
        rest = await reader.read()
        assert rest.endswith(DONE + b"\r\n0\r\n\r\n")
        writer.close()
        await ended(server)
        assert await server.counts() == (1, 1, 0, 0)


async def test_past_the_limit_an_open_stream_ends_with_an_error_event() -> None:
    async with draining(drain_timeout_s=0.05) as (server, worker, client):
        reader, writer, _ = await begin(server, worker)
        parked = asyncio.create_task(client.post(CHAT, json=chat()))
        await worker.granted()
        server.drain.ask()
        rest = await reader.read()
        error = json.loads(rest.partition(b"data: ")[2].partition(b"\n\n")[0])["error"]
        assert error["reason"] == "draining"
        assert rest.endswith(b"\r\n0\r\n\r\n")
        assert b"[DONE]" not in rest
        assert (await parked).status_code == 503
        writer.close()
        await ended(server)
        assert await server.counts() == (2, 0, 0, 2)


async def test_a_request_whose_body_is_still_arriving_is_refused_at_once() -> None:
    async with draining(drain_timeout_s=600) as (server, _, _):
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode())
        while server.public.is_idle:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0)
        server.drain.ask()
        head, _, body = (await reader.readuntil(b"}}")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nx-request-id: " in head
        assert json.loads(body)["error"]["reason"] == "draining"
        writer.close()
        await ended(server)
        assert await server.counts() == (0, 0, 0, 0)


async def test_when_it_is_urgent_it_ends_at_once() -> None:
    async with draining(drain_timeout_s=600) as (server, worker, _):
        _, writer, _ = await begin(server, worker)
        server.drain.ask()
        server.drain.is_urgent.set()
        async with asyncio.timeout(2):
            await server.task
        writer.close()


async def test_after_a_fault_every_open_stream_gets_its_error_at_once_and_health_says_it() -> None:
    gateway = Gateway(GatewayConfig(response_buffer_bytes=64 * 1024))
    config = ServingConfig(port=0, drain_timeout_s=600)
    async with serving(gateway, config=config) as server, httpx.AsyncClient(base_url=server.url) as client:
        worker = ScriptedWorker(gateway)
        reader, writer, _ = await begin(server, worker)
        _, slow, grant = await begin(server, worker)
        while not worker.pause_heard.is_set():  # its client reads nothing, and is waited for
            worker.say(grant, event("x" * 8000))
            await asyncio.sleep(0)
        assert (await client.get("/health")).json()["status"] == "ok"
        server.drain.fail()
        rest = await reader.readuntil(b"\r\n0\r\n\r\n")
        error = json.loads(rest.partition(b"data: ")[2].partition(b"\n\n")[0])["error"]
        assert error["message"] == "The server has failed."
        assert (await client.get("/health")).json()["status"] == "failed"
        assert (await client.get("/ready")).status_code == 503
        for connection in (writer, slow):
            connection.close()
        await ended(server)


async def test_a_fault_during_a_drain_ends_the_wait() -> None:
    async with draining(drain_timeout_s=600) as (server, worker, _):
        reader, writer, _ = await begin(server, worker)
        server.drain.ask()
        server.drain.fail()
        assert b"The server has failed." in await reader.read()
        writer.close()
        await ended(server)


async def test_idle_connections_do_not_hold_up_the_end() -> None:
    async with draining() as (server, _, _):
        connections = [await asyncio.open_connection(server.host, server.port) for _ in range(5)]
        server.drain.ask()
        await ended(server)
        for _, writer in connections:
            writer.close()


async def test_a_connection_cut_short_at_the_end_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    async with draining(drain_timeout_s=600) as (server, _, _):
        reader, writer = await asyncio.open_connection(server.host, server.port)
        head = b"GET /health HTTP/1.1\r\nHost: x\r\n"
        # The second has a body where none belongs, which is waited for longer than the end takes.
        writer.write(head + b"\r\n" + head + b"Content-Length: 9\r\n\r\n{")
        await reader.readuntil(b"}")
        server.drain.ask()
        await ended(server)
        writer.close()
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_a_client_that_reads_nothing_does_not_hold_up_the_end() -> None:
    gateway = Gateway(GatewayConfig(response_buffer_bytes=64 * 1024))
    async with serving(gateway, config=ServingConfig(port=0, drain_timeout_s=0.05)) as server:
        worker = ScriptedWorker(gateway)
        _, writer, grant = await begin(server, worker)
        piece = event("x" * 8000)
        while not worker.pause_heard.is_set():
            worker.say(grant, piece)
            await asyncio.sleep(0)
        server.drain.ask()
        async with asyncio.timeout(10):
            await server.task
        writer.close()


@pytest.mark.parametrize("when", ["idle", "in an answer"])
async def test_a_connection_its_client_has_closed_is_closed_at_once(when: str) -> None:
    async with serving() as server:
        worker = ScriptedWorker(server.gateway)
        if when == "idle":
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"}]")
        else:
            reader, writer, _ = await begin(server, worker)
        writer.write_eof()
        async with asyncio.timeout(5):
            await reader.read()
        writer.close()


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
async def test_a_connection_that_has_ended_needs_no_garbage_collector(is_reset: bool) -> None:
    gc.collect()
    gc.disable()
    others = connections_alive()  # which earlier tests still hold
    try:
        async with draining() as (server, worker, _):
            before = connections_alive()
            _, writer, _ = await begin(server, worker)
            assert connections_alive() > before
            if is_reset:
                no_time = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_time)
            writer.transport.abort()
            await server.counts()
            await until_equal(connections_alive, before)
        await until_equal(connections_alive, others)
    finally:
        gc.enable()


def connections_alive() -> set[int]:
    return {id(each) for each in gc.get_objects() if isinstance(each, ClosingConnection)}


async def until_equal(look: Callable[[], set[int]], wanted: set[int]) -> None:
    async with asyncio.timeout(5):
        while look() != wanted:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.01)


async def test_the_socket_is_closed_after_it_served() -> None:
    async with serving() as server:
        pass
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(server.host, server.port)


def test_a_port_in_use_is_one_clear_line() -> None:
    listener = listen(ServingConfig(port=0))
    port = listener.socket.getsockname()[1]
    with pytest.raises(
        ConfigError, match=rf"cannot listen on 127\.0\.0\.1 port {port}: Address already in use"
    ):
        listen(ServingConfig(port=port))
    listener.close()


def test_a_host_that_is_none_is_one_clear_line() -> None:
    with pytest.raises(ConfigError, match="cannot listen on no such host port 0"):
        listen(ServingConfig(host="no such host", port=0))


def test_the_kernel_takes_little_for_a_client_that_does_not_read() -> None:
    listener = listen(ServingConfig(port=0))
    client = socket.create_connection(listener.socket.getsockname())
    accepted, _ = listener.socket.accept()
    # Linux doubles what is asked for, to have room for its own bookkeeping.
    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SEND_BUFFER_BYTES
    for connection in (accepted, client, listener):
        connection.close()


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"port": 65536},
        {"drain_timeout_s": -1},
        {"head_timeout_s": 0},
        {"tls_cert": Path("x")},
        {"tls_key": Path("x")},
    ],
)
def test_an_option_out_of_range_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ServingConfig(**options)  # type: ignore[arg-type]


# --- TLS ------------------------------------------------------------------------------------------------


def openssl(*args: str | Path) -> None:
    subprocess.run(("openssl", *args), check=True, capture_output=True)


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for loopback, and its key."""
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
        *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-keyout", key, "-out", cert),
    )
    return cert, key


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"), "server")


async def test_it_serves_https(tls: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = tls
    config = ServingConfig(port=0, tls_cert=cert, tls_key=key, drain_timeout_s=0)
    async with serving(config=config) as server:
        worker = ScriptedWorker(server.gateway)
        trust = ssl.create_default_context(cafile=cert)
        async with httpx.AsyncClient(base_url=server.url, verify=trust) as client:
            asking = asyncio.create_task(client.post(CHAT, json=chat(stream=True)))
            worker.answer(await worker.granted(), "a")
            assert (await asking).content == event("a") + DONE
        assert f"Serving on https://127.0.0.1:{server.port}" in capsys.readouterr().out


async def test_a_tls_connection_holds_a_small_read_buffer_and_a_large_body_comes_through_it(
    tls: tuple[Path, Path],
) -> None:
    cert, key = tls
    config = ServingConfig(port=0, tls_cert=cert, tls_key=key, drain_timeout_s=0)
    async with serving(config=config) as server:
        worker = ScriptedWorker(server.gateway)
        trust = ssl.create_default_context(cafile=cert)
        text = "x" * (8 * READ_BUFFER_BYTES)
        async with httpx.AsyncClient(base_url=server.url, verify=trust) as client:
            gc.collect()
            asking = asyncio.create_task(client.post(CHAT, json=chat(text, stream=True)))
            grant = await worker.granted()
            assert text.encode() in grant.body
            served = [
                each for each in gc.get_objects() if isinstance(each, SSLProtocol) and each._server_side
            ]
            assert [len(vars(each)["_ssl_buffer"]) for each in served] == [READ_BUFFER_BYTES]
            worker.answer(grant, text)
            assert (await asking).content == event(text) + DONE


async def test_a_renewed_certificate_is_served_and_cuts_no_stream(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    config = ServingConfig(port=0, tls_cert=cert, tls_key=key, drain_timeout_s=0)
    async with serving(config=config) as server:
        worker = ScriptedWorker(server.gateway)
        before = ssl.create_default_context(cafile=cert)
        async with httpx.AsyncClient(base_url=server.url, verify=before) as client:
            asking = asyncio.create_task(client.post(CHAT, json=chat(stream=True)))
            grant = await worker.granted()
            worker.begin(grant)
            certificate(tmp_path, "server")
            assert server.tls is not None
            server.tls.poll(datetime.now(UTC))
            async with httpx.AsyncClient(verify=before) as newcomer:
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await newcomer.get(server.url + "/health")
            async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=cert)) as newcomer:
                assert (await newcomer.get(server.url + "/health")).is_success
            worker.say(grant, event("a") + DONE)
            worker.end(grant)
            assert (await asking).content == event("a") + DONE


async def test_old_tls_is_refused(tls: tuple[Path, Path]) -> None:
    cert, key = tls
    config = ServingConfig(port=0, tls_cert=cert, tls_key=key, drain_timeout_s=0)
    async with serving(config=config) as server:
        curl = await asyncio.create_subprocess_exec(
            *("curl", "-sk", "--tls-max", "1.1", server.url + "/health"),
            stdout=asyncio.subprocess.DEVNULL,
        )
        assert await curl.wait() != 0


async def test_http_2_is_offered_over_tls(tls: tuple[Path, Path]) -> None:
    cert, key = tls
    config = ServingConfig(port=0, tls_cert=cert, tls_key=key, drain_timeout_s=0)
    async with serving(config=config) as server:
        curl = await asyncio.create_subprocess_exec(
            *("curl", "-s", "--cacert", cert, "-o", "/dev/null", "-w", "%{http_version} %{http_code}"),
            server.url + "/health",
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await curl.communicate()
        assert out == b"2 200"


def refusal(cert: Path, key: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        listen(ServingConfig(port=0, tls_cert=cert, tls_key=key))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_tls_file_that_cannot_be_read_is_named(tls: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = tls
    missing = tmp_path / "missing.pem"
    assert refusal(missing, key) == f"{missing}: No such file or directory"
    assert refusal(cert, missing) == f"{missing}: No such file or directory"
    assert refusal(tmp_path, key) == f"{tmp_path}: Is a directory"


def test_a_tls_file_that_is_something_else_is_named(tls: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = tls
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("nothing of the kind")
    assert refusal(garbage, key) == f"{garbage}: not a certificate in PEM form"
    assert refusal(key, key) == f"{key}: not a certificate in PEM form"
    assert refusal(cert, garbage) == f"{garbage}: not an unencrypted private key in PEM form"
    assert refusal(cert, cert) == f"{cert}: not an unencrypted private key in PEM form"


def test_a_key_of_another_certificate_is_named(tls: tuple[Path, Path], tmp_path: Path) -> None:
    cert, _ = tls
    _, other = certificate(tmp_path, "other")
    assert refusal(cert, other) == f"{other}: not the key of the certificate {cert}"


def test_an_encrypted_key_is_named_and_nobody_is_asked_for_a_password(
    tls: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = tls
    locked = tmp_path / "locked.key"
    openssl("ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked)
    assert refusal(cert, locked) == f"{locked}: not an unencrypted private key in PEM form"
