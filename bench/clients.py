"""Streaming clients that cost little: one connection a request, each read stamped, in a process of their own.

They stand for machines of their own, so the process is niced: on a shared machine they must not take the
cores from the server that is measured. A load is a coroutine that runs there and returns answers.
"""

import asyncio
import gc
import multiprocessing
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from bench.answers import Answer, Exchange
from bench.targets import Target

NICENESS = 10
READS_OF_A_FLOW = 20
SETTLE_S = 0.2  # from the start of the process to the first arrival

P = ParamSpec("P")
T = TypeVar("T")


def run_load(load: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a load in another process; it, its arguments and its result must be picklable."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, initializer=os.nice, initargs=(NICENESS,)) as pool:
        result: T = pool.apply(_run, (load, args, kwargs))
        return result


def _run(load: Callable[..., Coroutine[Any, Any, T]], args: Any, kwargs: Any) -> T:
    gc.disable()  # its pauses would be the server's
    return asyncio.run(load(*args, **kwargs))


class Client(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._flows = asyncio.Event()

    async def flows(self) -> None:
        """Wait until the answer is under way, or over."""
        await self._flows.wait()

    async def ended(self) -> None:
        """Wait for the end of the answer."""
        await self._ended

    def leave(self) -> None:
        """Hang up, as a client does that wants no more."""
        self.exchange.is_left = True
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self.exchange.sent)

    def data_received(self, data: bytes) -> None:
        self.exchange.reads.append((self._loop.time(), data))
        if len(self.exchange.reads) == READS_OF_A_FLOW:
            self._flows.set()

    def connection_lost(self, _error: Exception | None) -> None:
        if not self.exchange.is_left:
            self.exchange.reads.append((self._loop.time(), b""))
        self._flows.set()
        if not self._ended.done():  # as it is when its waiter was cancelled
            self._ended.set_result(None)


async def send(target: Target, body: Mapping[str, Any], due_at: float | None = None) -> Client:
    """Connect and send one request; its times count from now, or from when it was due."""
    loop = asyncio.get_running_loop()
    asked_at = loop.time() if due_at is None else due_at
    exchange = Exchange(target.host, target.path, {"model": target.model, **body}, asked_at)
    _, client = await loop.create_connection(
        lambda: Client(exchange), target.host, target.port, ssl=target.is_tls or None
    )
    return client


async def ask(target: Target, body: Mapping[str, Any], due_at: float | None = None) -> Exchange:
    """Send one request and read its answer to the end."""
    client = await send(target, body, due_at)
    await client.ended()
    return client.exchange


async def ask_all(target: Target, bodies: Iterable[Mapping[str, Any]]) -> list[Answer]:
    """Send all requests at once, none of which may be refused; return the answers in their order."""
    exchanges = await asyncio.gather(*(ask(target, body) for body in bodies))
    return [exchange.served() for exchange in exchanges]


async def ask_when_due(target: Target, arrivals: Iterable[tuple[float, Mapping[str, Any]]]) -> list[Answer]:
    """Send each request so many seconds from now, whatever became of the others.

    Times count from when a request was due, so a server that cannot keep up does not make its own arrivals
    rarer. Return the answers in the order of the arrivals.
    """
    loop = asyncio.get_running_loop()
    began_at = loop.time() + SETTLE_S

    async def wait_and_ask(at_s: float, body: Mapping[str, Any]) -> Exchange:
        await asyncio.sleep(began_at + at_s - loop.time())
        return await ask(target, body, began_at + at_s)

    exchanges = await asyncio.gather(*(wait_and_ask(*arrival) for arrival in arrivals))
    return [exchange.answer() for exchange in exchanges]
