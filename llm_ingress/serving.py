"""Serving the public surface: one hypercorn in this process, from the open socket to the end of the drain.

Lanes are in memory, so there is one process. Called by: the command lines that serve; they own the signals
and tell `Drain` about them.
"""

import asyncio
import logging
import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import hypercorn.asyncio
from hypercorn.config import Config as HypercornConfig

from llm_ingress import express, h2_flow, tls_memory
from llm_ingress.certs import CertificateFiles
from llm_ingress.draining import Drain
from llm_ingress.errors import ConfigError
from llm_ingress.gateway import Gateway
from llm_ingress.h1_head import HeadSettings
from llm_ingress.public import Public
from llm_ingress.tls import LiveContext, follow, public_context

logger = logging.getLogger(__name__)

TICK_S = 0.1
BACKLOG = 4096  # hundreds of clients may connect at once; the kernel holds them until they are accepted
# Accepted sockets inherit it. The kernel would otherwise take megabytes for a client that reads nothing, and
# the lane behind it would never be paused.
SEND_BUFFER_BYTES = 64 * 1024
KEEP_ALIVE_S = 75  # well beyond the few seconds after which clients drop a pooled connection
H2_STREAMS_PER_CONNECTION = 512  # hypercorn's priority tree ends at 1000
UNLIMITED = 10**9
FLUSH_S = 2.0  # for the last events of streams that the drain cut short
SHUTDOWN_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Where to listen, how long a request's headers may take, and a drain. Port 0 is any free port."""

    host: str = "127.0.0.1"
    port: int = 8080
    tls_cert: Path | None = None
    tls_key: Path | None = None
    head_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}, must be 0 to 65535")
        if not self.head_timeout_s > 0:
            raise ConfigError(f"head_timeout_s is {self.head_timeout_s}, must be more than 0")
        if not self.drain_timeout_s >= 0:
            raise ConfigError(f"drain_timeout_s is {self.drain_timeout_s}, must not be negative")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key go together: give both or neither")


@dataclass(frozen=True, slots=True)
class Listener:
    """The open public socket, and what its TLS handshakes use: None where it speaks plain HTTP."""

    socket: socket.socket
    tls: LiveContext | None

    @property
    def url(self) -> str:
        host, port = self.socket.getsockname()[:2]
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def close(self) -> None:
        """Close the socket, unless `serve` took it over."""
        self.socket.close()


def listen(config: ServingConfig) -> Listener:
    """Open the public socket. Whoever connects before `serve` is reached waits in the kernel's backlog.

    Raises: ConfigError if the address cannot be had; CertificateFault if the TLS files cannot be used.
    """
    tls = None
    if config.tls_cert is not None and config.tls_key is not None:
        files = CertificateFiles(cert=config.tls_cert, key=config.tls_key)
        tls = LiveContext(public_context, files, datetime.now(UTC))
    return Listener(_open_socket(config), tls)


def _open_socket(config: ServingConfig) -> socket.socket:
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if family is socket.AF_INET6:  # `::` takes IPv4 too, whatever the system's habit
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(f"cannot listen on {config.host} port {config.port}: {error.strerror}") from error
    return listener


async def serve(
    app: Public, gateway: Gateway, listener: Listener, config: ServingConfig, drain: Drain
) -> None:
    """Serve on an open socket until the drain is over. Takes the socket over, and follows its certificate."""
    h2_flow.install()
    tls_memory.install()
    express.install()
    print(f"Serving on {listener.url}", flush=True)
    stop = asyncio.Event()
    settings = _hypercorn_settings(listener, config.head_timeout_s)
    server = asyncio.create_task(hypercorn.asyncio.serve(app, settings, shutdown_trigger=stop.wait))  # type: ignore[arg-type]
    ticker = asyncio.create_task(_tick(app, gateway))
    follower = asyncio.create_task(follow([] if listener.tls is None else [listener.tls]))
    try:
        await _first_of(server, drain.begun)
        if not server.done():
            await _drain(app, gateway, config.drain_timeout_s, drain)
        stop.set()
        await _end(server)
    finally:
        ticker.cancel()
        follower.cancel()
        server.cancel()


async def _drain(app: Public, gateway: Gateway, timeout_s: float, drain: Drain) -> None:
    """Finish what runs, within `timeout_s`; end what is left with an error its client can read."""
    logger.info("draining: %d lanes open, at most %g s", gateway.snapshot().open, timeout_s)
    app.drain()
    gateway.drain()
    await _until_idle(app, timeout_s, drain.is_urgent, drain.has_failed)
    if not app.is_idle:
        logger.warning("drain ended with %d lanes open", gateway.snapshot().open)
    why = "the server is shutting down"
    if drain.has_failed.is_set():
        app.fail()
        why = "the server has failed"
    gateway.fail_open_lanes(why)
    await _until_idle(app, FLUSH_S, drain.is_urgent)


async def _until_idle(app: Public, timeout_s: float, *ends: asyncio.Event) -> None:
    """Wait until every request is answered, the time is over, or one of `ends` has come."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while (left_s := deadline - loop.time()) > 0:
        if app.is_idle or any(end.is_set() for end in ends):
            return
        await asyncio.sleep(min(left_s, TICK_S))  # no event tells that the last request is answered


async def _end(server: asyncio.Task[None]) -> None:
    """Let hypercorn close its connections, for a moment; from Python 3.12 on it would wait without end.

    Raises: whatever ended hypercorn, if it ended by itself.
    """
    await asyncio.wait({server}, timeout=SHUTDOWN_S)
    if not server.done():
        server.cancel()
        await asyncio.wait({server}, timeout=TICK_S)
    elif not server.cancelled():
        server.result()


async def _first_of(server: asyncio.Task[None], event: asyncio.Event) -> None:
    waiter = asyncio.create_task(event.wait())
    await asyncio.wait({server, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()


async def _tick(app: Public, gateway: Gateway) -> None:
    while True:
        await asyncio.sleep(TICK_S / gateway.n_tick_parts)
        for tick in (gateway.tick, app.tick):
            try:
                tick()
            except Exception:
                logger.exception("a tick failed")


class _Settings(HeadSettings):
    """Hypercorn's configuration with our TLS context; its own would keep the first certificate."""

    tls: LiveContext | None = None

    @property
    def ssl_enabled(self) -> bool:
        return self.tls is not None

    def create_ssl_context(self) -> ssl.SSLContext | None:
        return None if self.tls is None else self.tls.for_listener()


def _hypercorn_settings(listener: Listener, head_timeout_s: float) -> HypercornConfig:
    settings = _Settings()
    settings.tls = listener.tls
    settings.bind = [f"fd://{listener.socket.detach()}"]
    settings.backlog = BACKLOG
    settings.errorlog = None  # the application logs its own faults
    settings.include_server_header = False
    settings.keep_alive_timeout = KEEP_ALIVE_S
    settings.head_timeout_s = head_timeout_s
    # Reached on HTTP/2, it would cut the streams in flight.
    settings.keep_alive_max_requests = UNLIMITED
    settings.h2_max_concurrent_streams = H2_STREAMS_PER_CONNECTION
    settings.graceful_timeout = 1.0  # everything worth waiting for has ended by then
    return settings
