"""What is mended in hypercorn, with a raw HTTP/2 client that does as it pleases with its window."""

import asyncio
import json
from collections.abc import AsyncIterator

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest

from llm_ingress.gateway import Gateway, GatewayConfig
from llm_ingress.public import PublicConfig
from llm_ingress.wire import Grant
from tests.ingress.scripted import CHAT, ScriptedWorker, Server, chat, event, serving

STREAM = json.dumps(chat(stream=True)).encode()
BUFFER_BYTES = 64 * 1024


class RawH2:
    """An HTTP/2 client. It gives its peer no more window than it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.data: dict[int, bytes] = {}
        self.statuses: dict[int, int] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}

    @classmethod
    async def connect(cls, server: Server, *, window: int = 2**16 - 1) -> "RawH2":
        client = cls(*await asyncio.open_connection(server.host, server.port))
        client._h2.local_settings = h2.settings.Settings(
            client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        )
        client._h2.initiate_connection()
        await client._flush()
        return client

    async def request(self, method: str, path: str, body: bytes = b"", *, is_whole: bool = True) -> int:
        stream_id = self._h2.get_next_available_stream_id()
        pseudo = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "x")]
        is_last = is_whole and not body
        self._h2.send_headers(stream_id, [*pseudo, ("content-type", "application/json")], is_last)
        if body:
            self._h2.send_data(stream_id, body, end_stream=is_whole)
        await self._flush()
        return stream_id

    async def send(self, stream_id: int, data: bytes) -> None:
        """Send body data, waiting for the server's window as needed."""
        while data:
            room = min(self._h2.local_flow_control_window(stream_id), 2**14)
            if room <= 0:
                await self.receive()
                continue
            self._h2.send_data(stream_id, data[:room])
            data = data[room:]
            await self._flush()

    async def post(self) -> int:
        return await self.request("POST", CHAT, STREAM)

    async def open_window(self, stream_id: int, n_bytes: int) -> None:
        self._h2.increment_flow_control_window(n_bytes, stream_id)
        self._h2.increment_flow_control_window(n_bytes)
        await self._flush()

    async def reset(self, stream_id: int) -> None:
        self._h2.reset_stream(stream_id, h2.errors.ErrorCodes.CANCEL)
        await self._flush()

    async def receive(self) -> None:
        """Take in what the server sends next."""
        async with asyncio.timeout(5):
            data = await self._reader.read(2**16)
        assert data, "the server closed the connection"
        for received in self._h2.receive_data(data):
            match received:
                case h2.events.ResponseReceived():
                    self.statuses[received.stream_id] = int(received.headers[0][1])
                case h2.events.DataReceived():
                    heard = self.data.get(received.stream_id, b"")
                    self.data[received.stream_id] = heard + received.data
                case h2.events.StreamEnded():
                    self.ended.add(received.stream_id)
                case h2.events.StreamReset():
                    self.resets[received.stream_id] = received.error_code
        await self._flush()

    async def until_ended(self, stream_id: int) -> bytes:
        while stream_id not in self.ended:
            await self.receive()
        return self.data.get(stream_id, b"")

    def close(self) -> None:
        self._writer.close()

    async def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())
        await self._writer.drain()


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
