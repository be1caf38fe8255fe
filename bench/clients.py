"""Streaming clients that cost little: raw sockets and a look at each read, in a process of their own.

They stand for machines of their own, so the process is niced: on a shared machine they must not take the
cores from the server that is measured.
"""

import json
import multiprocessing
import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NICENESS = 10
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One answer as its client saw it. Units: seconds since the clients started, tokens."""

    first_s: float  # the first byte of the body
    last_s: float
    n_tokens: int


@dataclass(slots=True, eq=False)
class _Client:
    connection: socket.socket
    received: bytearray
    first_s: float | None = None


def ask_all(host: str, port: int, requests: Sequence[dict[str, Any]]) -> list[Served]:
    """Send every request at once, from another process; return the answers in the order of the requests."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, initializer=os.nice, initargs=(NICENESS,)) as pool:
        return pool.apply(_ask_all, (host, port, list(requests)))


def _ask_all(host: str, port: int, requests: Sequence[dict[str, Any]]) -> list[Served]:
    started = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        clients = [_connect(host, port, request) for request in requests]
        for client in clients:
            selector.register(client.connection, selectors.EVENT_READ, client)
        served: dict[int, Served] = {}
        while len(served) < len(clients):
            for key, _ in selector.select():
                client = key.data
                if not _read(client, started):
                    selector.unregister(client.connection)
                    client.connection.close()
                    served[clients.index(client)] = _served(client, time.perf_counter() - started)
    return [served[i] for i in range(len(clients))]


def _connect(host: str, port: int, request: dict[str, Any]) -> _Client:
    body = json.dumps({**request, "stream": True, "stream_options": {"include_usage": True}}).encode()
    connection = socket.create_connection((host, port))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    return _Client(connection, bytearray())


def _read(client: _Client, started: float) -> bool:
    """Take what is there; False at the end of the answer."""
    data = client.connection.recv(_READ_BYTES)
    if client.first_s is None and b"data: " in data:
        client.first_s = time.perf_counter() - started
    client.received += data
    return bool(data)


def _served(client: _Client, ended_s: float) -> Served:
    """Read the usage chunk. Raises: RuntimeError for an answer that is not a complete stream."""
    text = client.received.decode("utf-8", "replace")
    if not text.startswith("HTTP/1.1 200") or "data: [DONE]" not in text:
        raise RuntimeError(f"a request failed: {text[:300]}")
    line = next(part for part in reversed(text.split("data: ")) if '"usage":{' in part)
    usage = json.loads(line[: line.rindex("}") + 1])["usage"]
    return Served(first_s=client.first_s or ended_s, last_s=ended_s, n_tokens=usage["completion_tokens"])
