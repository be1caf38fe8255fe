"""The light client at the far end of every stream: HTTP/1.1, the same in TLS, HTTP/2 in TLS.

A process of its own. It looks for the beginning of each event and for how many of them came in one write (an
HTTP/1.1 chunk, an HTTP/2 frame), and tells its parent when the warm-up is there ("warm"), and then how many
of both when everything is.
"""

import selectors
import socket
import ssl
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Protocol, TypeAlias

import h2.config
import h2.connection
import h2.events
import h2.settings

from bench.sources import BODY, WARM_UP_STEPS, Load

HOST = "localhost"
PATH = "/v1/chat/completions"
H1_REQUEST = (
    b"POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (PATH.encode(), HOST.encode(), len(BODY), BODY)
)
H2_STREAMS_PER_CONNECTION = 100
H2_WINDOW_BYTES = 2**30  # it never shuts, so nothing is said about it while events flow
EVENT = b"data: "
FIRST_OF_A_CHUNK = b"\r\ndata: "  # in HTTP/1.1, behind the length of the chunk
_READ_BYTES = 1 << 16

_Socket: TypeAlias = socket.socket | ssl.SSLSocket


class _Answers(Protocol):
    """What comes back on one connection."""

    def feed(self, data: bytes) -> tuple[int, int]:
        """Return how many events began, and how many writes that began with one."""


def read_streams(parent: Connection, transport: str, port: int, load: Load) -> None:
    """Open every stream and read each to its end."""
    n_warm = load.n_streams * WARM_UP_STEPS
    n_all = n_warm + load.n_streams * load.n_chunks
    n_events = n_writes = 0
    with selectors.DefaultSelector() as poll:
        for connection, answers in _OPEN[transport](port, load.n_streams):
            connection.setblocking(False)
            poll.register(connection, selectors.EVENT_READ, (connection, answers))
        while poll.get_map():
            for key, _ in poll.select():
                connection, answers = key.data
                more_events, more_writes = _read(poll, connection, answers)
                if n_events < n_warm <= n_events + more_events:
                    parent.send("warm")
                if n_events < n_all <= n_events + more_events:
                    parent.send((n_events + more_events, n_writes + more_writes))
                n_events += more_events
                n_writes += more_writes
    assert n_events >= n_all, f"{n_events} of {n_all} events came"


def _read(poll: selectors.BaseSelector, connection: _Socket, answers: _Answers) -> tuple[int, int]:
    """Take what is there."""
    n_events = n_writes = 0
    try:
        while data := connection.recv(_READ_BYTES):
            more_events, more_writes = answers.feed(data)
            n_events += more_events
            n_writes += more_writes
            if not isinstance(connection, ssl.SSLSocket):  # which may hold more than the socket shows
                return n_events, n_writes
    except (BlockingIOError, ssl.SSLWantReadError):
        return n_events, n_writes
    poll.unregister(connection)
    connection.close()
    return n_events, n_writes


class _H1Answer:
    """One HTTP/1.1 answer; an event may lie across two reads."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> tuple[int, int]:
        data = self._tail + data
        # One byte short of the pattern: what was counted is not counted again.
        n_events, n_writes = data[2:].count(EVENT), data.count(FIRST_OF_A_CHUNK)
        self._tail = data[1 - len(FIRST_OF_A_CHUNK) :]
        return n_events, n_writes


class _H2Answers:
    """Many HTTP/2 answers on one connection."""

    def __init__(self, connection: _Socket, n_streams: int) -> None:
        self._connection = connection
        self._n_open = n_streams
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        self._h2.local_settings = h2.settings.Settings(
            client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: H2_WINDOW_BYTES}
        )
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(H2_WINDOW_BYTES)
        for _ in range(n_streams):
            stream_id = self._h2.get_next_available_stream_id()
            pseudo = ((":method", "POST"), (":path", PATH), (":scheme", "https"), (":authority", HOST))
            self._h2.send_headers(stream_id, (*pseudo, ("content-type", "application/json")))
            self._h2.send_data(stream_id, BODY, end_stream=True)
        connection.sendall(self._h2.data_to_send())

    def feed(self, data: bytes) -> tuple[int, int]:
        n_events = n_writes = 0
        for event in self._h2.receive_data(data):
            if isinstance(event, h2.events.DataReceived):
                n_events += event.data.count(EVENT)
                n_writes += event.data.startswith(EVENT)
            elif isinstance(event, h2.events.StreamEnded):
                self._n_open -= 1
        if reply := self._h2.data_to_send():
            self._connection.sendall(reply)
        if not self._n_open:
            socket.socket.shutdown(self._connection, socket.SHUT_WR)  # below the TLS, which reads on
        return n_events, n_writes


def _open_http1(port: int, n_streams: int) -> Iterator[tuple[_Socket, _Answers]]:
    for _ in range(n_streams):
        connection = socket.create_connection((HOST, port))
        connection.sendall(H1_REQUEST)
        yield connection, _H1Answer()


def _open_tls(port: int, n_streams: int) -> Iterator[tuple[_Socket, _Answers]]:
    context = _client_context("http/1.1")
    for _ in range(n_streams):
        connection = context.wrap_socket(socket.create_connection((HOST, port)), server_hostname=HOST)
        connection.sendall(H1_REQUEST)
        yield connection, _H1Answer()


def _open_h2(port: int, n_streams: int) -> Iterator[tuple[_Socket, _Answers]]:
    context = _client_context("h2")
    for start in range(0, n_streams, H2_STREAMS_PER_CONNECTION):
        connection = context.wrap_socket(socket.create_connection((HOST, port)), server_hostname=HOST)
        yield connection, _H2Answers(connection, min(n_streams - start, H2_STREAMS_PER_CONNECTION))


def _client_context(protocol: str) -> ssl.SSLContext:
    """Who answers is known: this machine."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([protocol])
    return context


_OPEN = {"http1": _open_http1, "tls": _open_tls, "h2": _open_h2}
TRANSPORTS = tuple(_OPEN)
