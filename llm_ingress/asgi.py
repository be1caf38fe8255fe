"""One HTTP request and the way to answer it, in plain ASGI: the token path has no framework in it.

Owns: what every answer carries, whoever writes it: the request id, and on HTTP/1.1 whether it is the
connection's last. Made by: `public.py`.
"""

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol, TypeAlias

from llm_ingress.api.errors import ApiError

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Headers: TypeAlias = Iterable[tuple[str, str]]

# A refused upload is read on for a moment: closed at once, the client would meet a reset, not the answer.
LINGER_S = 1.0

# A proxy in front passes each chunk on as it comes, and keeps none of it.
UNBUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))

EXPRESS = "llm_ingress.express"  # the extension of a scope that is an `Express`

_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}\Z")


class ClientLeft(Exception):
    """The client is gone; there is nobody to answer."""


class Express(Protocol):
    """A short way to the client for bytes of an answer under way, where the server has one."""

    def takes(self, n_bytes: int) -> bool:
        """Whether so many bytes would leave at once, behind all that was sent before."""

    def write(self, data: bytes) -> None:
        """Send bytes of the body that it takes."""


class Call:
    """One request. `is_last` asks the client to open a new connection for its next."""

    __slots__ = ("has_started", "is_last", "receive", "request_id", "scope", "send")

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, is_last: bool) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.is_last = is_last
        self.has_started = False
        self.request_id = self._request_id()

    @property
    def method(self) -> str:
        """The method, in capitals."""
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        """The path, percent signs decoded."""
        return str(self.scope["path"])

    @property
    def express(self) -> Express | None:
        """The short way for the body, once the head is sent."""
        extensions: MutableMapping[str, Any] = self.scope.get("extensions") or {}
        return extensions.get(EXPRESS)

    @property
    def client_host(self) -> str:
        """The address the request came from."""
        client = self.scope.get("client")
        return str(client[0]) if client else ""

    def header(self, name: bytes) -> str | None:
        """Return a request header by its name in small letters."""
        return next(iter(self.headers(name)), None)

    def headers(self, name: bytes) -> list[str]:
        """Return all request headers of a name in small letters."""
        return [value.decode("latin-1") for key, value in self.scope["headers"] if key == name]

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head of the answer."""
        self.has_started = True
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        encoded.extend(self.common_headers())
        await self.send({"type": "http.response.start", "status": status, "headers": encoded})

    def common_headers(self) -> list[tuple[bytes, bytes]]:
        """Return what every answer carries."""
        headers = [(b"x-request-id", self.request_id.encode("latin-1")), *UNBUFFERED]
        if self.is_last and self.scope["http_version"] in ("1.0", "1.1"):
            headers.append((b"connection", b"close"))
        return headers

    async def write(self, data: bytes) -> None:
        """Send bytes of the body; returns when the connection has room for more."""
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """Send the last bytes of the body."""
        await self.send({"type": "http.response.body", "body": data, "more_body": False})

    async def refuse(self, error: ApiError, headers: Headers = ()) -> None:
        """Answer with an error, the request having been read."""
        await self._start_refusal(error, headers)
        await self.finish(error.body())

    async def refuse_unread(self, error: ApiError) -> None:
        """Answer with an error before the request was read; the connection is of no further use."""
        self.is_last = True
        await self._start_refusal(error, ())
        await self.write(error.body())
        await self.discard()
        await self.finish()

    async def discard(self) -> bool:
        """Read what is left of the request, for a moment, and forget it; return whether that was all."""
        try:
            async with asyncio.timeout(LINGER_S):
                while (message := await self.receive())["type"] == "http.request":
                    if not message.get("more_body", False):
                        return True
        except TimeoutError:
            pass
        return False

    async def _start_refusal(self, error: ApiError, headers: Headers) -> None:
        length = ("content-length", str(len(error.body())))
        await self.start(
            error.status, (("content-type", "application/json"), length, *error.headers, *headers)
        )

    def _request_id(self) -> str:
        """Return the client's own id for the request if it is one, else a new one."""
        own = self.header(b"x-request-id")
        return own if own is not None and _REQUEST_ID.match(own) else uuid.uuid4().hex
