"""Clients that do not wait for each other: each request is sent when its time has come.

Times count from when a request was due, so a server that cannot keep up does not make its own arrivals rarer.
They run in a process of their own; a connection each.
"""

import asyncio
import json
import multiprocessing
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.timed import MODEL

SETTLE_S = 0.2  # from the start of the process to the first arrival


class Arrival(NamedTuple):
    """A request of a tenant, so many seconds after the first could come; `user` is what it says it is."""

    at_s: float
    tenant: str
    user: str


@dataclass(frozen=True, slots=True)
class Asked:
    """What became of one arrival. Units: seconds since it was due."""

    tenant: str
    status: int
    first_s: float  # to the first byte of the answer
    last_s: float


def poisson(rate: float, seconds: float, seed: str) -> Iterator[float]:
    """Times of arrivals that know nothing of each other, `rate` a second on average."""
    chance = random.Random(seed)
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(rate)) < seconds:
        yield at_s


def evenly(rate: float, seconds: float) -> Iterator[float]:
    """Times of arrivals at equal distances."""
    return (n / rate for n in range(int(rate * seconds)))


def ask_all(port: int, arrivals: Sequence[Arrival]) -> list[Asked]:
    """Send every request when it is due, from another process; return what became of each."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_ask_all, (port, list(arrivals)))


def _ask_all(port: int, arrivals: Sequence[Arrival]) -> list[Asked]:
    return asyncio.run(_send_when_due(port, sorted(arrivals)))


async def _send_when_due(port: int, arrivals: Sequence[Arrival]) -> list[Asked]:
    loop = asyncio.get_running_loop()
    began_at = loop.time() + SETTLE_S
    tasks = []
    for arrival in arrivals:
        due_at = began_at + arrival.at_s
        await asyncio.sleep(max(0.0, due_at - loop.time()))
        tasks.append(asyncio.create_task(_ask(port, arrival, due_at)))
    return await asyncio.gather(*tasks)


async def _ask(port: int, arrival: Arrival, due_at: float) -> Asked:
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(user=arrival.user))
    first = await reader.read(1 << 16)
    first_at = loop.time()
    rest = await reader.read()
    writer.close()
    status = int(first.split(b" ", 2)[1])
    if status == 200 and b"data: [DONE]" not in first + rest:
        raise RuntimeError(f"an answer was cut short: {(first + rest)[-300:]!r}")
    return Asked(arrival.tenant, status, first_at - due_at, loop.time() - due_at)


def request(*, user: str, text: str = "hi") -> bytes:
    """A streaming request as bytes, the last of its connection."""
    messages = [{"role": "user", "content": text}]
    body = json.dumps({"model": MODEL, "stream": True, "user": user, "messages": messages}).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
