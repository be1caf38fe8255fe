"""What is mended in hypercorn, with a raw HTTP/2 client that does as it pleases with its window."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from llm_ingress.gateway import Gateway, GatewayConfig
from llm_ingress.public import PublicConfig
from llm_ingress.wire import Grant
from tests.ingress.raw_h2 import RawH2
from tests.ingress.scripted import CHAT, ScriptedWorker, Server, event, serving

BUFFER_BYTES = 64 * 1024


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    bounds = GatewayConfig(response_buffer_bytes=BUFFER_BYTES, stall_timeout_s=0.3)
    async with serving(Gateway(bounds), public=PublicConfig(max_request_bytes=100_000)) as server:
        yield server


@pytest.fixture
def worker(server: Server) -> ScriptedWorker:
    return ScriptedWorker(server.gateway)


async def flood(worker: ScriptedWorker, grant: Grant) -> int:
    """Say as much as the gateway lets a worker say; returns how many bytes that was."""
    worker.begin(grant)
    piece = event("x" * 8000)
    n_bytes = 0
    async with asyncio.timeout(5):
        while not worker.pause_heard.is_set():
            worker.say(grant, piece)
            n_bytes += len(piece)
            assert n_bytes < 2_000_000, "nothing holds the worker back"
            await asyncio.sleep(0)
    return n_bytes


async def test_a_stream_passes_whole(server: Server, worker: ScriptedWorker) -> None:
    client = await RawH2.connect(server)
    stream_id = await client.post()
    worker.answer(await worker.granted(), "a", "b")
    assert await client.until_ended(stream_id) == event("a") + event("b") + b"data: [DONE]\n\n"
    client.close()
    assert await server.counts() == (1, 1, 0, 0)


async def test_a_client_that_never_opens_its_window_is_paused_then_reset(
    server: Server, worker: ScriptedWorker
) -> None:
    client = await RawH2.connect(server, window=0)
    stream_id = await client.post()
    grant = await worker.granted()
    n_bytes = await flood(worker, grant)
    assert worker.paused == [grant.ref]
    assert n_bytes < 4 * BUFFER_BYTES
    assert await worker.cancelled() == grant.ref
    while stream_id not in client.resets:
        await client.receive()
    client.close()
    assert await server.counts() == (1, 0, 1, 0)


async def test_a_window_opened_late_lets_everything_through(server: Server, worker: ScriptedWorker) -> None:
    client = await RawH2.connect(server, window=0)
    stream_id = await client.post()
    grant = await worker.granted()
    n_bytes = await flood(worker, grant)
    await client.open_window(stream_id, 1_000_000)
    while len(client.data.get(stream_id, b"")) < n_bytes:
        await client.receive()
    worker.say(grant, b"data: [DONE]\n\n")
    worker.end(grant)
    assert len(await client.until_ended(stream_id)) == n_bytes + len(b"data: [DONE]\n\n")
    assert worker.resumed == [grant.ref]
    client.close()
    assert await server.counts() == (1, 1, 0, 0)


async def test_a_shut_window_holds_up_no_other_stream(server: Server, worker: ScriptedWorker) -> None:
    client = await RawH2.connect(server, window=0)
    await client.post()
    await flood(worker, await worker.granted())
    other = await client.post()
    await client.open_window(other, 10_000)
    worker.answer(await worker.granted(), "b")
    assert await client.until_ended(other) == event("b") + b"data: [DONE]\n\n"
    client.close()


@pytest.mark.parametrize("window", [0, 2**16 - 1])
async def test_a_reset_stream_ends_its_work(server: Server, worker: ScriptedWorker, window: int) -> None:
    client = await RawH2.connect(server, window=window)
    stream_id = await client.post()
    grant = await worker.granted()
    await flood(worker, grant)
    await client.reset(stream_id)
    assert await worker.cancelled() == grant.ref
    assert await server.counts() == (1, 0, 1, 0)
    other = await client.request("GET", "/health")
    await client.open_window(other, 10_000)
    assert json.loads(await client.until_ended(other))["cancelled"] == 1
    client.close()


async def test_a_lost_connection_lets_go_of_every_stream(server: Server, worker: ScriptedWorker) -> None:
    client = await RawH2.connect(server, window=0)
    grants = []
    for _ in range(3):
        await client.post()
        grants.append(await worker.granted())
    await flood(worker, grants[0])
    client.close()
    cancelled = {await worker.cancelled() for _ in grants}
    assert cancelled == {grant.ref for grant in grants}
    assert await server.counts() == (3, 0, 3, 0)


async def test_an_upload_refused_midway_does_not_break_its_siblings(
    server: Server, worker: ScriptedWorker
) -> None:
    client = await RawH2.connect(server)
    stream_id = await client.post()
    grant = await worker.granted()
    worker.begin(grant)
    worker.say(grant, event("a"))
    upload = await client.request("POST", CHAT, b" " * 1000, is_whole=False)
    await client.send(upload, b" " * 200_000)
    while upload not in client.statuses:
        await client.receive()
    assert client.statuses[upload] == 413
    await client.until_ended(upload)
    await client.send(upload, b" " * 200_000)  # late, and nobody reads it any more
    worker.say(grant, event("b"))
    worker.end(grant)
    assert await client.until_ended(stream_id) == event("a") + event("b")
    client.close()
    assert await server.counts() == (1, 1, 0, 0)


async def test_a_stream_that_fails_ends_cleanly_with_its_error_event(
    server: Server, worker: ScriptedWorker
) -> None:
    client = await RawH2.connect(server)
    stream_id = await client.post()
    grant = await worker.granted()
    worker.begin(grant)
    worker.say(grant, event("a"))
    while stream_id not in client.data:
        await client.receive()
    worker.fail(grant)
    heard = await client.until_ended(stream_id)
    assert json.loads(heard.removeprefix(event("a") + b"data: "))["error"]["type"] == "server_error"
    assert client.resets == {}
    client.close()
