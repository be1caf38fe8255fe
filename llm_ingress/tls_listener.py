"""A TLS listener that says whom it turned away.

asyncio's own server keeps a failed handshake to itself, and with TLS 1.3 a refused peer may not learn the
reason either: it is logged here, not more often than somebody can read it.

Owns: the listening sockets, and the handshakes under way on them. Called by: `control.py`, on the event loop.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Never

from llm_ingress.tls import explain_refusal

logger = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
BACKLOG = 1024  # a whole fleet comes back at once after an outage
NO_DESCRIPTOR_S = 1.0  # until the next attempt to accept, when a first one failed
COMPLAINT_EVERY_S = 300.0  # about one host, for one reason
MAX_COMPLAINTS = 1000  # remembered; beyond it nothing is said of further hosts


class TlsListener:
    """Sockets on which peers are accepted, each for a protocol of its own. Thread: event loop."""

    def __init__(self, protocol: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext) -> None:
        self._protocol = protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._complaints = Complaints(COMPLAINT_EVERY_S, MAX_COMPLAINTS)

    async def open(self, host: str, port: int) -> None:
        """Listen at every address of `host`; `::` takes IPv4 too.

        Raises: OSError, and listens nowhere then.
        """
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, address in dict.fromkeys((family, address) for family, *_, address in found):
                takes_both = family is socket.AF_INET6 and socket.has_dualstack_ipv6()
                self._sockets.append(
                    socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=takes_both)
                )
        except OSError:
            self.close()
            raise
        for listener in self._sockets:
            listener.setblocking(False)
            self._start(self._accept(listener))

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Accept nobody any more; those accepted are not touched. Idempotent."""
        for task in self._tasks:
            task.cancel()
        while self._sockets:
            listener = self._sockets.pop()
            self._loop.remove_reader(listener.fileno())
            listener.close()

    def _start(self, activity: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(activity)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> Never:
        while True:
            try:
                connection, address = await self._loop.sock_accept(listener)
            except OSError as error:
                # No descriptor is left, say. Who dials meanwhile waits in the kernel's backlog.
                logger.warning("cannot accept connections: %s", error)
                await asyncio.sleep(NO_DESCRIPTOR_S)
            else:
                self._start(self._shake_hands(connection, address[0]))

    async def _shake_hands(self, connection: socket.socket, host: str) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._protocol, connection, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S
            )
        except ssl.SSLError as error:
            self._complain(host, explain_refusal(error))
        except ConnectionAbortedError:
            self._complain(host, f"no TLS handshake within {HANDSHAKE_S:g} s")
        except OSError:
            pass  # it left, as what only probes the port does

    def _complain(self, host: str, reason: str) -> None:
        if self._complaints.is_due(host, reason, self._loop.time()):
            logger.warning("a connection from %s is turned away: %s", host, reason)


class Complaints:
    """What was complained of lately. Pure."""

    def __init__(self, every_s: float, n_most: int) -> None:
        self._every_s = every_s
        self._n_most = n_most
        self._said: dict[tuple[str, str], float] = {}

    def is_due(self, host: str, reason: str, now: float) -> bool:
        """Whether to complain of a host for this reason now; if so, not soon again."""
        self._said = {what: at for what, at in self._said.items() if now - at < self._every_s}
        if (host, reason) in self._said or len(self._said) >= self._n_most:
            return False
        self._said[host, reason] = now
        return True
