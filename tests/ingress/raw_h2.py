"""An HTTP/2 client for tests that does as it pleases with its window."""

import asyncio
import json

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings

from tests.ingress.scripted import CHAT, Server, chat

STREAM = json.dumps(chat(stream=True)).encode()


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
