"""The ring protocol's frames: messages to bytes, and bytes split anywhere to messages or one fault.

    kind 1 byte | more 1 | claim 4 | lane id 8 | length 4 | payload, at most 64 KiB        (all big-endian)

A message is one frame, or several of the same kind, lane and claim, of which all but the last say that
more follow; frames of other lanes may come between. No I/O. Used by both ends: what they send goes through
`outbox.py`.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from llm_ingress.errors import WireError
from llm_ingress.payloads import LENGTH, OF_RING, Kind, Packed, pack_payload, unpack_payload
from llm_ingress.wire import Body, LaneRef, Message

MAX_PAYLOAD_BYTES: Final = 64 * 1024
# A LANE at most: its request's body, and its progress. Workers hold so much of each that is under way.
MAX_LANE_BYTES: Final = 64 * 1024 * 1024
HEADER = struct.Struct("!BBIQI")
HEADER_BYTES: Final = HEADER.size
OPEN_MESSAGE_BYTES = 512  # what an unfinished message costs beside its payload

Frame: TypeAlias = tuple[bytes, bytes | memoryview]  # header, payload

# A BODY is packed and unpacked for every token; what it needs is looked up once.
_BODY: Final = int(Kind.BODY)
_BODY_START = struct.Struct("!BBIQII")  # the header, and the length of the progress
_new: Any = tuple.__new__  # a NamedTuple's own constructor takes three times as long


def pack_body(ref: LaneRef, data: bytes, progress: bytes) -> bytes:
    """Return a BODY as one frame; whoever calls knows that it fits."""
    n_progress = len(progress)
    return (
        _BODY_START.pack(_BODY, 0, ref[1], ref[0], 4 + n_progress + len(data), n_progress) + progress + data
    )


def pack(message: Message) -> bytes:
    """Return a message as all its frames in a row."""
    return b"".join(part for frame in cut(pack_payload(message)) for part in frame)


def cut(packed: Packed) -> list[Frame]:
    """Return the frames of a message, nothing copied that is large."""
    kind, (lane_id, claim), pieces = packed
    if sum(map(len, pieces)) <= MAX_PAYLOAD_BYTES:
        pieces = (b"".join(pieces),)
    payloads = [
        memoryview(piece)[start : start + MAX_PAYLOAD_BYTES]
        for piece in pieces
        for start in range(0, len(piece), MAX_PAYLOAD_BYTES)
    ] or [memoryview(b"")]
    n_after = len(payloads)
    frames: list[Frame] = []
    for payload in payloads:
        n_after -= 1
        frames.append((HEADER.pack(kind, n_after > 0, claim, lane_id, len(payload)), payload))
    return frames


@dataclass(slots=True, eq=False)
class _OpenMessage:
    """A message of which more frames are to come."""

    kind: Kind
    claim: int
    payloads: list[bytes] = field(default_factory=list)
    n_bytes: int = OPEN_MESSAGE_BYTES


class FrameReader:
    """One direction of one connection."""

    def __init__(self, kinds: frozenset[Kind], *, max_open_bytes: int) -> None:
        """Accept these kinds; hold at most so many bytes of messages that are not complete."""
        self._kinds = {int(kind): kind for kind in kinds}
        self._max_open_bytes = max_open_bytes
        self._n_open_bytes = 0
        self._open: dict[int, _OpenMessage] = {}  # by lane id
        self._tail = b""

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that are complete now; to be exhausted before the next call.

        Raises: WireError at the first frame that cannot be right; those before it have been yielded.
        """
        if self._tail:
            data = self._tail + data
        start, n_bytes = 0, len(data)
        while n_bytes - start >= HEADER_BYTES:
            kind, more, claim, lane_id, length = HEADER.unpack_from(data, start)
            payload_at = start + HEADER_BYTES
            end = payload_at + length
            if kind != _BODY or more or self._open:
                self._check(kind, more, claim, lane_id, length)
                if end > n_bytes:
                    break
                message = self._take(self._kinds[kind], more, LaneRef(lane_id, claim), data[payload_at:end])
                if message is not None:
                    yield message
            else:
                if not (4 <= length <= MAX_PAYLOAD_BYTES and lane_id and claim and _BODY in self._kinds):
                    self._check(kind, more, claim, lane_id, length)
                    raise WireError("BODY: truncated")
                if end > n_bytes:
                    break
                data_at = payload_at + 4 + LENGTH.unpack_from(data, payload_at)[0]
                if data_at > end:
                    raise WireError("BODY: truncated")
                ref = _new(LaneRef, (lane_id, claim))
                yield _new(Body, (ref, data[data_at:end], data[payload_at + 4 : data_at]))
            start = end
        self._tail = data[start:]

    def close(self) -> None:
        """Note that no more comes. Raises: WireError if that is within a message."""
        if self._tail or self._open:
            raise WireError("the connection ended within a message")

    def _check(self, kind: int, more: int, claim: int, lane_id: int, length: int) -> None:
        """Check a header. Raises: WireError."""
        if kind not in self._kinds or more > 1:
            raise WireError(f"no such frame: kind {kind:#04x}, more {more}")
        name = self._kinds[kind].name
        if length > MAX_PAYLOAD_BYTES:
            raise WireError(f"{name}: {length} bytes in a frame, must be at most {MAX_PAYLOAD_BYTES}")
        if more and not length:
            raise WireError(f"{name}: an empty frame with more to follow")
        if {bool(lane_id), bool(claim)} != {kind not in OF_RING}:
            raise WireError(f"{name}: lane {lane_id}, claim {claim}")
        opened = self._open.get(lane_id)
        if opened is not None and (opened.kind, opened.claim) != (kind, claim):
            raise WireError(f"{name} of lane {lane_id} within its {opened.kind.name}")

    def _take(self, kind: Kind, more: int, ref: LaneRef, payload: bytes) -> Message | None:
        """Return the message a frame completes, if it does."""
        opened = self._open.get(ref.lane_id)
        if opened is None:
            if not more:
                return unpack_payload(kind, ref, payload)
            opened = self._open[ref.lane_id] = _OpenMessage(kind, ref.claim)
            self._n_open_bytes += opened.n_bytes
        opened.payloads.append(payload)
        opened.n_bytes += len(payload)
        self._n_open_bytes += len(payload)
        if self._n_open_bytes > self._max_open_bytes:
            raise WireError(f"{kind.name}: over {self._max_open_bytes} bytes in messages not complete")
        if more:
            return None
        del self._open[ref.lane_id]
        self._n_open_bytes -= opened.n_bytes
        return unpack_payload(kind, ref, b"".join(opened.payloads))
