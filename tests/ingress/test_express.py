"""The short way of a stream's bytes, past hypercorn's events: taken when it can be, and never out of turn."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest

from llm_ingress.asgi import Call
from llm_ingress.gateway import Gateway, GatewayConfig
from llm_ingress.wire import Grant, Head
from tests.ingress.raw_h2 import RawH2
from tests.ingress.scripted import CHAT, STREAM_HEAD, ScriptedWorker, Server, chat, event, raw_post, serving

STREAM = json.dumps(chat(stream=True)).encode()
DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(Gateway(GatewayConfig(stall_timeout_s=30))) as server:
        yield server


@pytest.fixture
def worker(server: Server) -> ScriptedWorker:
    return ScriptedWorker(server.gateway)


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What goes the usual way, through hypercorn's events."""
    went: list[bytes] = []
    write = Call.write

    async def note(self: Call, data: bytes) -> None:
        went.append(data)
        await write(self, data)

    monkeypatch.setattr(Call, "write", note)
    return went


async def say_one_by_one(worker: ScriptedWorker, grant: Grant, events: list[bytes]) -> None:
    """Say each in a turn of its own, so that nothing is joined on the way."""
    for each in events:
        worker.say(grant, each)
        await asyncio.sleep(0.001)


def events_of(n_events: int, size: int = 1) -> list[bytes]:
    return [event(f"{n} " + "x" * size) for n in range(n_events)]


def unchunked(body: bytes) -> bytes:
    """The data of an HTTP/1.1 body in chunks."""
    data = b""
    while body:
        length, _, body = body.partition(b"\r\n")
        data += body[: int(length, 16)]
        assert body[int(length, 16) :].startswith(b"\r\n"), "a chunk has another length than it says"
        body = body[int(length, 16) + 2 :]
    return data


async def test_on_http_1_all_but_the_first_event_goes_the_short_way(
    server: Server, worker: ScriptedWorker, long_way: list[bytes]
) -> None:
    reader, writer = await raw_post(server, STREAM)
    grant = await worker.granted()
    worker.begin(grant)
    events = events_of(20)
    await say_one_by_one(worker, grant, events)
    worker.end(grant)
    body = (await reader.readuntil(LAST_CHUNK)).partition(b"\r\n\r\n")[2]
    assert unchunked(body) == b"".join(events)
    assert long_way == events[:1]
    writer.close()


async def test_on_http_2_all_but_the_first_event_goes_the_short_way(
    server: Server, worker: ScriptedWorker, long_way: list[bytes]
) -> None:
    client = await RawH2.connect(server)
    stream_id = await client.post()
    grant = await worker.granted()
    worker.begin(grant)
    events = events_of(20)
    await say_one_by_one(worker, grant, events)
    worker.end(grant)
    assert await client.until_ended(stream_id) == b"".join(events)
    assert long_way == events[:1]
    client.close()


async def test_a_client_that_reads_late_gets_every_byte_in_order(
    server: Server, worker: ScriptedWorker, long_way: list[bytes]
) -> None:
    connection = socket.create_connection((server.host, server.port))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader, writer = await asyncio.open_connection(sock=connection)
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(STREAM)}\r\n\r\n".encode() + STREAM
    )
    grant = await worker.granted()
    worker.begin(grant)
    events = events_of(60, size=10_000)  # the kernel and asyncio hold the first few
    await say_one_by_one(worker, grant, events)
    head_and_body = await reader.readuntil(b"\r\n\r\n") + await reader.read(300_000)
    more = events_of(20)
    await say_one_by_one(worker, grant, more)
    worker.end(grant)
    while not head_and_body.endswith(LAST_CHUNK):
        head_and_body += await reader.read(2**17)
    assert unchunked(head_and_body.partition(b"\r\n\r\n")[2]) == b"".join(events + more)
    assert len(long_way) > 1, "the client was never slow"
    writer.close()


async def test_a_small_window_gets_every_byte_in_order(
    server: Server, worker: ScriptedWorker, long_way: list[bytes]
) -> None:
    client = await RawH2.connect(server, window=3000)
    stream_id = await client.post()
    grant = await worker.granted()
    worker.begin(grant)
    events = [event("x" * size) for size in (10, 2000, 5000, 10, 20_000, 10, 40_000, 10)]
    n_bytes = len(b"".join(events))
    await say_one_by_one(worker, grant, events)
    worker.end(grant)
    while len(client.data.get(stream_id, b"")) < n_bytes:
        await client.open_window(stream_id, 7000)
        await client.receive()
    assert await client.until_ended(stream_id) == b"".join(events)
    assert 1 < len(long_way) < len(events)
    client.close()


@pytest.mark.parametrize("n_turns", range(8))
async def test_a_window_that_opens_just_before_an_event_changes_no_order(
    server: Server, worker: ScriptedWorker, n_turns: int
) -> None:
    client = await RawH2.connect(server, window=0)
    stream_id = await client.post()
    grant = await worker.granted()
    worker.begin(grant)
    events = events_of(60)
    for first, second in zip(events[::2], events[1::2], strict=True):
        await say_one_by_one(worker, grant, [first])  # it waits for a window
        await client.open_window(stream_id, len(first) + len(second))
        for _ in range(n_turns):
            await asyncio.sleep(0)
        worker.say(grant, second)
        await asyncio.sleep(0.001)
    worker.end(grant)
    assert await client.until_ended(stream_id) == b"".join(events)
    client.close()


async def test_streams_of_one_connection_do_not_mix(server: Server, worker: ScriptedWorker) -> None:
    client = await RawH2.connect(server, window=2**20)
    grants = {}
    for _ in range(3):
        stream_id = await client.post()
        grants[stream_id] = await worker.granted()
        worker.begin(grants[stream_id])
    for n in range(50):
        for stream_id, grant in grants.items():
            worker.say(grant, event(f"{stream_id} {n}"))
        await asyncio.sleep(0)
    for stream_id, grant in grants.items():
        worker.end(grant)
        heard = await client.until_ended(stream_id)
        assert heard == b"".join(event(f"{stream_id} {n}") for n in range(50))
    client.close()


@pytest.mark.parametrize(
    ("request_line", "head"),
    [
        (f"POST {CHAT} HTTP/1.0", STREAM_HEAD),
        (
            f"POST {CHAT} HTTP/1.1",
            Head(status=200, headers=(*STREAM_HEAD.headers, ("content-length", str(3 * len(event("x")))))),
        ),
    ],
    ids=["HTTP/1.0", "a length"],
)
async def test_a_body_that_is_not_in_chunks_gets_none(
    server: Server, worker: ScriptedWorker, request_line: str, head: Head
) -> None:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(f"{request_line}\r\nHost: x\r\nContent-Length: {len(STREAM)}\r\n\r\n".encode() + STREAM)
    grant = await worker.granted()
    worker.begin(grant, head)
    await say_one_by_one(worker, grant, [event("x")] * 3)
    worker.end(grant)
    await reader.readuntil(b"\r\n\r\n")
    assert await reader.readexactly(3 * len(event("x"))) == event("x") * 3
    writer.close()


async def test_a_stream_reset_by_its_client_harms_no_other(server: Server, worker: ScriptedWorker) -> None:
    client = await RawH2.connect(server, window=2**20)
    gone_id, other_id = await client.post(), await client.post()
    gone, other = await worker.granted(), await worker.granted()
    for grant in (gone, other):
        worker.begin(grant)
        worker.say(grant, event("a"))
    await client.receive()
    await client.reset(gone_id)
    for _ in range(20):
        worker.say(gone, event("b"))
        worker.say(other, event("b"))
        await asyncio.sleep(0)
    assert await worker.cancelled() == gone.ref
    worker.say(other, DONE)
    worker.end(other)
    assert (await client.until_ended(other_id)).endswith(event("b") + DONE)
    client.close()
