"""A turn of a conversation as it travels: to a worker behind the turns before it, and back as a record.

    body of the lane    request | limit | record | record ...  each behind its length
    record in the END   what it does (1 byte) | closing, behind its length | content

What is in a request is the client's, what is in a record the worker's. An ingress keeps the contents in order
and hands them on, unread; all it acts on is whether a record follows those before it or takes their place.
The limit is how many bytes of a conversation are to be kept: the worker shortens one that is longer.
`closing` is the last of the answer: the client gets it once the turn is kept.
Called by: `conversations.py`; the worker's `conversation.py`. Pure.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from llm_ingress.errors import WireError

_LENGTH = struct.Struct("!I")
_LIMIT = struct.Struct("!Q")
LENGTH_BYTES = _LENGTH.size


class Does(IntEnum):
    """What a record does to the history."""

    FOLLOWS = 1
    REPLACES = 2  # everything before it


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """What a worker leaves of a turn that it answered."""

    does: Does = Does.FOLLOWS
    closing: bytes
    content: bytes


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """A request, and what the turns before it left, oldest first."""

    request: bytes
    limit_bytes: int
    history: tuple[bytes, ...]

    @property
    def n_bytes(self) -> int:
        """What the conversation takes with this request."""
        return len(self.request) + sum(LENGTH_BYTES + len(record) for record in self.history)


def pack_asked(request: bytes, history: Iterable[bytes], *, limit_bytes: int) -> bytes:
    """The body of a turn's lane."""
    parts = (request, _LIMIT.pack(limit_bytes), *history)
    return b"".join(piece for part in parts for piece in (_LENGTH.pack(len(part)), part))


def unpack_asked(body: bytes) -> AskedTurn:
    """What the body of a turn's lane holds. Raises: WireError."""
    parts = tuple(_parts(body))
    if len(parts) < 2 or len(parts[1]) != _LIMIT.size:
        raise WireError("a turn without its request, or without its limit")
    return AskedTurn(parts[0], _LIMIT.unpack(parts[1])[0], parts[2:])


def pack_turn(record: TurnRecord) -> bytes:
    """The record of a turn as END carries it."""
    return b"".join(
        (bytes((record.does,)), _LENGTH.pack(len(record.closing)), record.closing, record.content)
    )


def unpack_turn(data: bytes) -> TurnRecord:
    """The record of a turn. Raises: WireError."""
    if not data or data[0] not in tuple(Does):
        raise WireError(f"not the record of a turn: {data[:1]!r}")
    closing, content_at = _part(data, 1)
    return TurnRecord(does=Does(data[0]), closing=closing, content=data[content_at:])


def _parts(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        part, at = _part(data, at)
        yield part


def _part(data: bytes, at: int) -> tuple[bytes, int]:
    """Return the part that follows its own length, and where it ends."""
    start = at + LENGTH_BYTES
    end = start + _LENGTH.unpack_from(data, at)[0] if start <= len(data) else start
    if end > len(data):
        raise WireError(f"a turn of {len(data)} bytes is cut short")
    return data[start:end], end
