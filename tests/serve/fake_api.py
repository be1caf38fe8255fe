"""A small OpenAI-shaped server whose every answer is laid down beforehand.

It shows the chat page and load.sh what the real server cannot be made to show on demand: refusals, streams
that break, text from a hostile model, an answer that waits for the test's word. It serves the page too, and
counts requests in flight for /health and clients that left in the middle of an answer.
Owns: the listening socket and one thread per connection, from `with FakeApi(...)` until its end.
Called by: test_page.py and test_load.py.
"""

import json
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self, TypeAlias

PAGE = Path(__file__).parents[2] / "examples" / "serve" / "ui" / "index.html"
HOLD_POLL_S = 0.02
PATIENCE_S = 20


class Ending(StrEnum):
    """How a stream ends."""

    DONE = "done"
    WITHOUT_DONE = "without_done"
    BROKEN = "broken"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A streamed answer: its pieces, one chunk each, and its end.

    Until `hold` is set, only the first piece comes. `n_tokens` is what the usage says: the pieces, if None.
    """

    pieces: tuple[str, ...]
    finish: str = "stop"
    ending: Ending = Ending.DONE
    hold: threading.Event | None = None
    n_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request answered with an error and nothing else."""

    status: int
    error: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


Reply: TypeAlias = Answer | Refusal


class FakeApi:
    """The server and what it saw. Replies are given in order; the last one stands for all that follow."""

    def __init__(self, *replies: Reply, models: tuple[str, ...] = ("tiny", "small")) -> None:
        self.models = models
        self.bodies: list[dict[str, Any]] = []
        self.arrivals: list[float] = []
        self.n_inflight = 0
        self.n_left = 0
        self.n_health = 0
        self._replies = deque(replies)
        self._changed = threading.Condition()
        self._server = _Server(("127.0.0.1", 0), _handler_of(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(HOLD_POLL_S,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def then(self, *replies: Reply) -> None:
        """Lay down what comes next, in place of what was laid down before."""
        with self._changed:
            self._replies = deque(replies)

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Return as soon as what the server noted makes `holds` true."""
        with self._changed:
            assert self._changed.wait_for(holds, PATIENCE_S), f"waited {PATIENCE_S} s in vain"

    def take(self, body: dict[str, Any]) -> Reply:
        with self._noting():
            self.bodies.append(body)
            self.arrivals.append(time.monotonic())
            return self._replies[0] if len(self._replies) == 1 else self._replies.popleft()

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        with self._noting():
            self.n_inflight += 1
        try:
            yield
        finally:
            with self._noting():
                self.n_inflight -= 1

    def note_left(self) -> None:
        with self._noting():
            self.n_left += 1

    def note_health(self) -> int:
        """Count one question for the health; what is in flight is the answer."""
        with self._noting():
            self.n_health += 1
            return self.n_inflight

    @contextmanager
    def _noting(self) -> Iterator[None]:
        with self._changed:
            yield
            self._changed.notify_all()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Ends its connections when it is closed: a browser keeps some for later, and then nobody must answer."""

    daemon_threads = False  # so that closing waits for the handlers

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._connections: set[Any] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        for connection in tuple(self._connections):
            with suppress(OSError):  # it may end by itself just now
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()


class ClientLeft(Exception):
    """The connection was closed from the other side while an answer was being written."""


def _handler_of(api: FakeApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def do_GET(self) -> None:
            match self.path:
                case "/":
                    self._whole(200, "text/html; charset=utf-8", PAGE.read_bytes())
                case "/v1/models":
                    data = [
                        {"id": name, "object": "model", "created": 0, "owned_by": "test"}
                        for name in api.models
                    ]
                    self._json(200, {"object": "list", "data": data})
                case "/health":
                    self._json(200, {"status": "ok", "inflight": api.note_health(), "max_inflight": 4})
                case _:
                    self._json(404, {"error": {"message": "Not found.", "type": "invalid_request_error"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            reply = api.take(body)
            if isinstance(reply, Refusal):
                self._json(reply.status, {"error": reply.error}, reply.headers)
                return
            try:
                with api.in_flight():
                    self._stream(reply, body)
            except (ClientLeft, OSError):
                api.note_left()

        def _json(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
            self._whole(status, "application/json", json.dumps(value).encode(), headers)

        def _whole(self, status: int, kind: str, data: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {
                "content-type": kind,
                "content-length": str(len(data)),
                **(headers or {}),
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, answer: Answer, body: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.send_header("connection", "close")
            self.end_headers()
            self._chunk(body, {"role": "assistant", "content": ""})
            for i, piece in enumerate(answer.pieces):
                if i == 1:
                    self._wait(answer.hold)
                self._chunk(body, {"content": piece})
            if len(answer.pieces) < 2:
                self._wait(answer.hold)
            self._end(answer, body)

        def _end(self, answer: Answer, body: dict[str, Any]) -> None:
            if answer.ending is Ending.BROKEN:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if answer.ending is Ending.ERROR:
                self._event(
                    json.dumps({"error": {"message": "The worker was lost.", "type": "server_error"}})
                )
            if answer.ending is Ending.DONE:
                self._chunk(body, {}, answer.finish)
                n = len(answer.pieces) if answer.n_tokens is None else answer.n_tokens
                usage = {"prompt_tokens": 7, "completion_tokens": n, "total_tokens": 7 + n}
                if (body.get("stream_options") or {}).get("include_usage"):
                    self._event(json.dumps({**self._frame(body), "choices": [], "usage": usage}))
                self._event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")

        def _frame(self, body: dict[str, Any]) -> dict[str, Any]:
            return {
                "id": "chatcmpl-1",
                "object": "chat.completion.chunk",
                "created": 0,
                "model": body["model"],
            }

        def _chunk(self, body: dict[str, Any], delta: dict[str, str], finish: str | None = None) -> None:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            self._event(json.dumps({**self._frame(body), "choices": [choice]}))

        def _event(self, data: str) -> None:
            event = f"data: {data}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))

        def _wait(self, hold: threading.Event | None) -> None:
            while hold is not None and not hold.is_set():
                readable, _, _ = select.select([self.connection], [], [], HOLD_POLL_S)
                if readable and self.connection.recv(1, socket.MSG_PEEK) == b"":
                    raise ClientLeft

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing: the test looks at what the server noted."""

    return Handler
