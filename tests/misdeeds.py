"""What a worker may do wrong that ends its connection, and what the ingress then says of it.

Used against a listener within the test, and against an ingress that is a process of its own.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from llm_ingress.frames import HEADER, pack
from llm_ingress.outbox import MAX_MESSAGE_BYTES
from llm_ingress.payloads import Kind
from llm_ingress.wire import Body, Credit, LaneRef, LaneSignal, OfLane
from tests.ring_network import HEARTBEAT, HELLO, RawWorker


@dataclass(frozen=True, slots=True)
class Misdeed:
    """`commit` is done by a worker that was granted a lane and has said nothing of it."""

    commit: Callable[[RawWorker, LaneRef], Awaitable[object]]
    reason: str


async def _flood(worker: RawWorker, _ref: LaneRef) -> None:
    many = pack(HEARTBEAT) * 500  # at once: it is to be faster than the ingress
    with suppress(ConnectionError, aiohttp.ClientError):
        for _ in range(300):
            await worker.send(many)


MISDEEDS: Mapping[str, Misdeed] = {
    "garbage": Misdeed(lambda worker, _: worker.send(b"\xde\xad\xbe\xef" * 100), "no such frame: kind 0xde"),
    "unknown kind": Misdeed(lambda worker, _: worker.send(HEADER.pack(0x30, 0, 0, 0, 0)), "kind 0x30"),
    "a frame of the ingress": Misdeed(
        lambda worker, ref: worker.say(OfLane(ref, LaneSignal.CANCEL)), "no such frame: kind 0x44"
    ),
    "oversized frame": Misdeed(
        lambda worker, ref: worker.send(HEADER.pack(Kind.BODY, 0, ref.claim, ref.lane_id, 65_537)),
        "65537 bytes in a frame",
    ),
    "oversized message": Misdeed(
        lambda worker, _: worker.send(b"\x04" * (MAX_MESSAGE_BYTES + 1)), "exceeds limit"
    ),
    "text": Misdeed(lambda worker, _: worker.ws.send_str("hello"), "a text message"),
    "bad JSON": Misdeed(
        lambda worker, _: worker.send(HEADER.pack(Kind.HEARTBEAT, 0, 0, 0, 1) + b"{"), "HEARTBEAT: "
    ),
    "a second HELLO": Misdeed(lambda worker, _: worker.say(HELLO), "a second HELLO"),
    "too much credit": Misdeed(
        lambda worker, _: worker.say(Credit(1, 99)), "credit of 1 beyond 99 lanes seen"
    ),
    "bytes before the head": Misdeed(lambda worker, ref: worker.say(Body(ref, b"x", b"")), "before the head"),
    "flood": Misdeed(_flood, "that move nothing"),
}
