"""The ring protocol's frames: messages to bytes, and bytes from anywhere to messages or one fault.

    kind 1 byte | more 1 byte | claim 4 | lane id 8 | length 4 | payload, at most 64 KiB      (big-endian)

A message is one frame, or several of the same kind, lane and claim; all but its last say that more follow.
Between them frames of other lanes may come. No I/O. Used by both ends; docs/protocol.md describes each kind,
and the golden files of the tests pin the bytes.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeAlias, cast

import msgspec

from llm_ingress.errors import UnknownVersion, WireError
from llm_ingress.wire import (
    PROTOCOL_VERSION,
    Body,
    Credit,
    End,
    Fail,
    Grant,
    Head,
    Heartbeat,
    Hello,
    LaneRef,
    LaneSignal,
    Message,
    OfLane,
    Refusal,
    RingSignal,
    Welcome,
)

MAX_PAYLOAD_BYTES: Final = 64 * 1024
MAX_CARRIED_BYTES: Final = 2**32 - 1  # of the progress or head before the last part of a payload

HEADER = struct.Struct("!BBIQI")
_LENGTH = struct.Struct("!I")
_CREDIT = struct.Struct("!IQ")
_BODY = struct.Struct("!BBIQII")  # header and the length of the progress

NO_LANE = LaneRef(0, 0)
# What an unfinished message costs beside its bytes.
OPEN_MESSAGE_BYTES = 512

# What HTTP allows in a head: anything else would break the client's connection.
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")

Piece: TypeAlias = bytes | memoryview


class Kind(IntEnum):
    """The first byte of a frame."""

    # from a worker
    HELLO = 0x01
    CREDIT = 0x02
    HEAD = 0x03
    BODY = 0x04
    END = 0x05
    FAIL = 0x06
    RELEASE = 0x07
    HEARTBEAT = 0x08
    DRAINING = 0x09
    # from an ingress
    WELCOME = 0x41
    REFUSED = 0x42
    LANE = 0x43
    CANCEL = 0x44
    PAUSE = 0x45
    RESUME = 0x46
    DRAIN = 0x47


FROM_INGRESS = frozenset(kind for kind in Kind if kind >= Kind.WELCOME)
FROM_WORKER = frozenset(Kind) - FROM_INGRESS

_OF_LANE = {
    Kind.HEAD,
    Kind.BODY,
    Kind.END,
    Kind.FAIL,
    Kind.RELEASE,
    Kind.LANE,
    Kind.CANCEL,
    Kind.PAUSE,
    Kind.RESUME,
}
_LANE_SIGNALS = {
    Kind.RELEASE: LaneSignal.RELEASE,
    Kind.CANCEL: LaneSignal.CANCEL,
    Kind.PAUSE: LaneSignal.PAUSE,
    Kind.RESUME: LaneSignal.RESUME,
}
_RING_SIGNALS = {Kind.DRAINING: RingSignal.DRAINING, Kind.DRAIN: RingSignal.DRAIN}
_KIND_OF_SIGNAL = {signal: kind for kind, signal in (*_LANE_SIGNALS.items(), *_RING_SIGNALS.items())}
_KIND_OF_TYPE: dict[type, Kind] = {
    Hello: Kind.HELLO,
    Head: Kind.HEAD,
    End: Kind.END,
    Fail: Kind.FAIL,
    Heartbeat: Kind.HEARTBEAT,
    Welcome: Kind.WELCOME,
    Refusal: Kind.REFUSED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """What every version of a HELLO has in common."""

    protocol: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _GrantHead:
    """What a LANE says before its progress and its body."""

    path: str
    request_id: str
    queued_ms: float
    remaining_s: float | None = None


_to_json = msgspec.json.Encoder().encode
_JSON = {kind: msgspec.json.Decoder(shape) for shape, kind in _KIND_OF_TYPE.items()}
_VERSION_JSON = msgspec.json.Decoder(_Version)
_GRANT_JSON = msgspec.json.Decoder(_GrantHead)


# --- packing ---------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """A message before it is cut into frames. `pieces` in a row are its payload."""

    kind: Kind
    ref: LaneRef
    pieces: Sequence[bytes]

    @property
    def n_bytes(self) -> int:
        """The size of the payload."""
        return sum(map(len, self.pieces))


def pack_body(ref: LaneRef, data: bytes, progress: bytes) -> bytes:
    """Return a BODY of one frame; whoever calls knows that it fits."""
    lane_id, claim = ref
    n_progress = len(progress)
    length = 4 + n_progress + len(data)
    return _BODY.pack(0x04, 0, claim, lane_id, length, n_progress) + progress + data


def pack_payload(message: Message) -> Packed:
    """Return a message as the payload it is, however long, nothing copied that is large."""
    if isinstance(message, OfLane):
        content = message.content
        if isinstance(content, LaneSignal):
            return Packed(_KIND_OF_SIGNAL[content], message.ref, ())
        return Packed(_KIND_OF_TYPE[type(content)], message.ref, (_to_json(content),))
    match message:
        case Body(ref=ref, data=data, progress=progress):
            return Packed(Kind.BODY, ref, (_LENGTH.pack(len(progress)), progress, data))
        case Grant():
            return Packed(Kind.LANE, message.ref, _pack_grant(message))
        case Credit(n_lanes=n_lanes, n_seen=n_seen):
            return Packed(Kind.CREDIT, NO_LANE, (_CREDIT.pack(n_lanes, n_seen),))
        case RingSignal():
            return Packed(_KIND_OF_SIGNAL[message], NO_LANE, ())
        case _:
            return Packed(_KIND_OF_TYPE[type(message)], NO_LANE, (_to_json(message),))


def cut(packed: Packed) -> list[tuple[bytes, Piece]]:
    """Return the frames of a message, each a header and its payload."""
    kind, (lane_id, claim), pieces = packed
    if packed.n_bytes <= MAX_PAYLOAD_BYTES:
        return [_frame(kind, 0, LaneRef(lane_id, claim), b"".join(pieces))]
    slices = [
        memoryview(piece)[start : start + MAX_PAYLOAD_BYTES]
        for piece in pieces
        for start in range(0, len(piece), MAX_PAYLOAD_BYTES)
    ]
    last = len(slices) - 1
    return [_frame(kind, int(place < last), packed.ref, part) for place, part in enumerate(slices)]


def pack(message: Message) -> bytes:
    """Return a message as all its frames in a row."""
    return b"".join(part for frame in cut(pack_payload(message)) for part in frame)


def _frame(kind: Kind, more: int, ref: LaneRef, payload: Piece) -> tuple[bytes, Piece]:
    return HEADER.pack(kind, more, ref.claim, ref.lane_id, len(payload)), payload


def _pack_grant(grant: Grant) -> tuple[bytes, ...]:
    head = _to_json(
        _GrantHead(
            path=grant.path,
            request_id=grant.request_id,
            queued_ms=grant.queued_ms,
            remaining_s=grant.remaining_s,
        )
    )
    before_body = (_LENGTH.pack(len(head)), head, _LENGTH.pack(len(grant.progress)), grant.progress)
    return b"".join(before_body), grant.body


# --- unpacking -------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _OpenMessage:
    """A message of which more frames are to come."""

    kind: Kind
    claim: int
    pieces: list[bytes] = field(default_factory=list)
    n_bytes: int = OPEN_MESSAGE_BYTES


class FrameReader:
    """The messages in one direction of one connection, from bytes split anywhere."""

    def __init__(self, kinds: frozenset[Kind], *, max_open_bytes: int) -> None:
        """Accept these kinds; hold at most so many bytes of messages that are not complete."""
        self._kinds = {int(kind): kind for kind in kinds}
        self._max_open_bytes = max_open_bytes
        self._takes_bodies = Kind.BODY in kinds
        self._open: dict[int, _OpenMessage] = {}  # by lane id
        self._n_open_bytes = 0
        self._tail = b""

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that are complete now; to be exhausted before it is called again.

        Raises: WireError at the first byte that cannot be right; what came before it has been yielded.
        """
        if self._tail:
            data = self._tail + data
            self._tail = b""
        start, n_bytes = 0, len(data)
        unpack, unpack_length, new = HEADER.unpack_from, _LENGTH.unpack_from, tuple.__new__
        while n_bytes - start >= 18:
            kind, more, claim, lane_id, length = unpack(data, start)
            at = start + 18
            end = at + length
            # The usual frame, one for every token, needs none of what may be true of the others.
            if kind == 0x04 and not more and not self._open and self._takes_bodies and length >= 4:
                if length > MAX_PAYLOAD_BYTES or not lane_id or not claim:
                    raise _header_fault(kind, claim, lane_id, length)
                if end > n_bytes:
                    break
                data_at = at + 4 + unpack_length(data, at)[0]
                if data_at > end:
                    raise WireError("BODY: its progress is longer than its payload")
                ref = new(LaneRef, (lane_id, claim))
                yield cast("Body", new(Body, (ref, data[data_at:end], data[at + 4 : data_at])))
            else:
                self._check_header(kind, more, claim, lane_id, length)
                if end > n_bytes:
                    break
                message = self._take(self._kinds[kind], more, LaneRef(lane_id, claim), data[at:end])
                if message is not None:
                    yield message
            start = end
        self._tail = data[start:]

    def close(self) -> None:
        """Note that no more comes. Raises: WireError if a message is not complete."""
        if self._tail or self._open:
            raise WireError("the connection ended within a message")

    def _check_header(self, kind: int, more: int, claim: int, lane_id: int, length: int) -> None:
        if kind not in self._kinds or more > 1:
            raise WireError(f"unknown kind of frame: {kind:#04x}, more={more}")
        of_lane = self._kinds[kind] in _OF_LANE
        if length > MAX_PAYLOAD_BYTES or of_lane != bool(lane_id) or of_lane != bool(claim):
            raise _header_fault(kind, claim, lane_id, length)
        opened = self._open.get(lane_id)
        if opened is not None and (opened.kind != kind or opened.claim != claim):
            raise WireError(f"{Kind(kind).name} within a {opened.kind.name} of lane {lane_id}")

    def _take(self, kind: Kind, more: int, ref: LaneRef, payload: bytes) -> Message | None:
        """Return the message a frame completes, if it does."""
        opened = self._open.get(ref.lane_id)
        if opened is None and not more:
            return _unpack(kind, ref, payload)
        if opened is None:
            opened = self._open[ref.lane_id] = _OpenMessage(kind, ref.claim)
            self._n_open_bytes += OPEN_MESSAGE_BYTES
        opened.pieces.append(payload)
        opened.n_bytes += len(payload)
        self._n_open_bytes += len(payload)
        if self._n_open_bytes > self._max_open_bytes:
            raise WireError(f"more than {self._max_open_bytes} bytes of messages that are not complete")
        if more:
            return None
        del self._open[ref.lane_id]
        self._n_open_bytes -= opened.n_bytes
        return _unpack(kind, ref, b"".join(opened.pieces))


def _header_fault(kind: int, claim: int, lane_id: int, length: int) -> WireError:
    name = Kind(kind).name
    if length > MAX_PAYLOAD_BYTES:
        return WireError(f"{name}: {length} bytes in one frame, {MAX_PAYLOAD_BYTES} at most")
    return WireError(f"{name}: lane {lane_id} with claim {claim}")


def _unpack(kind: Kind, ref: LaneRef, payload: bytes) -> Message:
    """Return the message a payload is. Raises: WireError."""
    if kind in _JSON:
        message = _unpack_json(kind, payload)
        return OfLane(ref, message) if isinstance(message, Head | End | Fail) else message
    if kind is Kind.BODY:
        progress, data = _split(kind, payload)
        return Body(ref, data, progress)
    if kind is Kind.LANE:
        return _unpack_grant(ref, payload)
    if kind is Kind.CREDIT:
        return _unpack_credit(payload)
    if payload:
        raise WireError(f"{kind.name}: {len(payload)} bytes, must be empty")
    return OfLane(ref, _LANE_SIGNALS[kind]) if kind in _LANE_SIGNALS else _RING_SIGNALS[kind]


def _unpack_json(kind: Kind, payload: bytes) -> Any:
    if kind is Kind.HELLO:
        _check_version(payload)
    message = _decode(kind, _JSON[kind], payload)
    if isinstance(message, Head):
        _check_head(message)
    return message


def _check_version(payload: bytes) -> None:
    """Before the rest: another version may have another shape."""
    protocol = _decode(Kind.HELLO, _VERSION_JSON, payload).protocol
    if protocol != PROTOCOL_VERSION:
        raise UnknownVersion(protocol)


def _check_head(head: Head) -> None:
    if not 200 <= head.status <= 599:
        raise WireError(f"HEAD: status {head.status}, must be 200 to 599")
    for name, value in head.headers:
        if _HEADER_NAME.fullmatch(name) is None or _HEADER_VALUE.fullmatch(value) is None:
            raise WireError(f"HEAD: not a header: {name[:40]!r}")


def _unpack_grant(ref: LaneRef, payload: bytes) -> Grant:
    head_json, rest = _split(Kind.LANE, payload)
    progress, body = _split(Kind.LANE, rest)
    head: _GrantHead = _decode(Kind.LANE, _GRANT_JSON, head_json)
    return Grant(
        ref=ref,
        path=head.path,
        body=body,
        request_id=head.request_id,
        queued_ms=head.queued_ms,
        remaining_s=head.remaining_s,
        progress=progress,
    )


def _unpack_credit(payload: bytes) -> Credit:
    if len(payload) != _CREDIT.size:
        raise WireError(f"CREDIT: {len(payload)} bytes, must be {_CREDIT.size}")
    return Credit(*_CREDIT.unpack(payload))


def _split(kind: Kind, payload: bytes) -> tuple[bytes, bytes]:
    """Return the part whose length stands before it, and what is behind it."""
    if len(payload) < 4:
        raise WireError(f"{kind.name}: truncated")
    end = 4 + _LENGTH.unpack_from(payload)[0]
    if end > len(payload):
        raise WireError(f"{kind.name}: truncated")
    return payload[4:end], payload[end:]


def _decode(kind: Kind, decoder: "msgspec.json.Decoder[Any]", payload: bytes) -> Any:
    try:
        return decoder.decode(payload)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{kind.name}: {error}") from error
