"""What a frame of each kind carries: a message to the bytes of its payload, and back.

Small facts are JSON, in which unknown fields are ignored; what travels per token or is large is binary.
No I/O. Called by: `frames.py`, which cuts payloads into frames. docs/protocol.md describes each kind.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from llm_ingress.errors import UnknownVersion, WireError
from llm_ingress.labels import MAX_LABEL_CHARS, is_label
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

LENGTH = struct.Struct("!I")
_CREDIT = struct.Struct("!IQ")

NO_LANE = LaneRef(0, 0)  # what frames about the whole ring carry

# A worker may claim so much of itself, and no more.
MAX_ALIASES = 100
MAX_INFLIGHT = 65_536
# Counts are told on in JSON, and added up: no more than all its readers agree on. Source: RFC 8259 section 6.
MAX_COUNT = 2**53

# How the answer reaches the client is between that and the ingress. Source: RFC 9110, section 7.6.1.
_OF_THE_CONNECTION = frozenset(
    {"connection", "content-length", "keep-alive", "proxy-connection"}
    | {"te", "trailer", "transfer-encoding", "upgrade"}
)
# What HTTP allows in a head: anything else would break the client's connection.
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


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
    WORKING = 0x0A
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
OF_RING = frozenset(
    {Kind.HELLO, Kind.CREDIT, Kind.HEARTBEAT, Kind.DRAINING, Kind.WELCOME, Kind.REFUSED, Kind.DRAIN}
)

_SIGNALS: dict[Kind, LaneSignal | RingSignal] = {
    Kind.RELEASE: LaneSignal.RELEASE,
    Kind.WORKING: LaneSignal.WORKING,
    Kind.DRAINING: RingSignal.DRAINING,
    Kind.CANCEL: LaneSignal.CANCEL,
    Kind.PAUSE: LaneSignal.PAUSE,
    Kind.RESUME: LaneSignal.RESUME,
    Kind.DRAIN: RingSignal.DRAIN,
}
_KIND_OF_SIGNAL = {signal: kind for kind, signal in _SIGNALS.items()}
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
    """What the HELLO of every version has in common."""

    protocol: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _GrantHead:
    """What a LANE says before its progress and its body."""

    path: str
    request_id: str
    queued_ms: float
    remaining_s: float | None = None


_to_json = msgspec.json.Encoder().encode
_JSON: dict[Kind, "msgspec.json.Decoder[Any]"] = {
    kind: msgspec.json.Decoder(shape) for shape, kind in _KIND_OF_TYPE.items()
}
_VERSION_JSON = msgspec.json.Decoder(_Version)
_GRANT_JSON = msgspec.json.Decoder(_GrantHead)


class Packed(NamedTuple):
    """A message as the payload it is: its pieces in a row."""

    kind: Kind
    ref: LaneRef
    pieces: Sequence[bytes]


def pack_payload(message: Message) -> Packed:
    """Return a message as its payload, with nothing copied that is large."""
    match message:
        case OfLane(ref=ref, content=LaneSignal() as signal):
            return Packed(_KIND_OF_SIGNAL[signal], ref, ())
        case OfLane(ref=ref, content=content):
            return Packed(_KIND_OF_TYPE[type(content)], ref, (_to_json(content),))
        case Body(ref=ref, data=data, progress=progress):
            return Packed(Kind.BODY, ref, (LENGTH.pack(len(progress)), progress, data))
        case Grant():
            return Packed(Kind.LANE, message.ref, (_pack_before_body(message), message.body))
        case Credit():
            return Packed(Kind.CREDIT, NO_LANE, (_CREDIT.pack(*message),))
        case RingSignal():
            return Packed(_KIND_OF_SIGNAL[message], NO_LANE, ())
        case _:
            return Packed(_KIND_OF_TYPE[type(message)], NO_LANE, (_to_json(message),))


def unpack_payload(kind: Kind, ref: LaneRef, payload: bytes) -> Message:
    """Return the message a payload is. Raises: WireError, UnknownVersion."""
    if kind in _JSON:
        return _unpack_json(kind, ref, payload)
    if kind is Kind.BODY:
        progress, data_at = _part(kind, payload, 0)
        return Body(ref, payload[data_at:], progress)
    if kind is Kind.LANE:
        return _unpack_grant(ref, payload)
    if kind is Kind.CREDIT:
        return _unpack_credit(payload)
    if payload:
        raise WireError(f"{kind.name}: {len(payload)} bytes, must be empty")
    signal = _SIGNALS[kind]
    return OfLane(ref, signal) if isinstance(signal, LaneSignal) else signal


def _pack_before_body(grant: Grant) -> bytes:
    head = _to_json(
        _GrantHead(
            path=grant.path,
            request_id=grant.request_id,
            queued_ms=grant.queued_ms,
            remaining_s=grant.remaining_s,
        )
    )
    return b"".join((LENGTH.pack(len(head)), head, LENGTH.pack(len(grant.progress)), grant.progress))


def _unpack_grant(ref: LaneRef, payload: bytes) -> Grant:
    head_json, progress_at = _part(Kind.LANE, payload, 0)
    progress, body_at = _part(Kind.LANE, payload, progress_at)
    head: _GrantHead = _decode(Kind.LANE, _GRANT_JSON, head_json)
    return Grant(
        ref=ref,
        path=head.path,
        body=payload[body_at:],
        request_id=head.request_id,
        queued_ms=head.queued_ms,
        remaining_s=head.remaining_s,
        progress=progress,
    )


def _part(kind: Kind, payload: bytes, at: int) -> tuple[bytes, int]:
    """Return the part that follows its own length, and where it ends."""
    start = at + LENGTH.size
    end = start + LENGTH.unpack_from(payload, at)[0] if start <= len(payload) else start
    if end > len(payload):
        raise WireError(f"{kind.name}: truncated")
    return payload[start:end], end


def _unpack_credit(payload: bytes) -> Credit:
    if len(payload) != _CREDIT.size:
        raise WireError(f"CREDIT: {len(payload)} bytes, must be {_CREDIT.size}")
    return Credit(*_CREDIT.unpack(payload))


def _unpack_json(kind: Kind, ref: LaneRef, payload: bytes) -> Message:
    if kind is Kind.HELLO:
        _check_version(payload)
    message: Any = _decode(kind, _JSON[kind], payload)
    match message:
        case Head():
            _check_head(message)
        case Hello():
            _check_hello(message)
            _check_counts(kind, message.model)
    _check_counts(kind, message)
    return message if kind in OF_RING else OfLane(ref, message)


def _check_version(payload: bytes) -> None:
    """Before the rest: another version may have another shape."""
    protocol = _decode(Kind.HELLO, _VERSION_JSON, payload).protocol
    if protocol != PROTOCOL_VERSION:
        raise UnknownVersion(protocol)


def _check_hello(hello: Hello) -> None:
    """What a worker says of itself goes into logs, and into what clients are told."""
    model = hello.model
    labels = (hello.worker, hello.instance_id, model.name, model.file, model.fingerprint, *model.aliases)
    for text in labels:
        if not is_label(text):
            must = f"1 to {MAX_LABEL_CHARS} printable characters"
            raise WireError(f"HELLO: {text[:40]!r} is no name, which must be {must}")
    if len(model.aliases) > MAX_ALIASES:
        raise WireError(f"HELLO: {len(model.aliases)} aliases, must be at most {MAX_ALIASES}")
    if not 1 <= hello.max_inflight <= MAX_INFLIGHT:
        raise WireError(f"HELLO: max_inflight is {hello.max_inflight}, must be 1 to {MAX_INFLIGHT}")
    if model.n_ctx < 1:
        raise WireError(f"HELLO: n_ctx is {model.n_ctx}, must be at least 1")


def _check_counts(kind: Kind, facts: Any) -> None:
    """Check every integer; its value may be too long to be told."""
    for name in facts.__slots__:
        value = getattr(facts, name)
        if isinstance(value, int) and not 0 <= value <= MAX_COUNT:
            raise WireError(f"{kind.name}: {name} is out of range, must be 0 to {MAX_COUNT}")


def _check_head(head: Head) -> None:
    if not 200 <= head.status <= 599:
        raise WireError(f"HEAD: status {head.status}, must be 200 to 599")
    for name, value in head.headers:
        if _HEADER_NAME.fullmatch(name) is None or _HEADER_VALUE.fullmatch(value) is None:
            raise WireError(f"HEAD: not a header: {name[:40]!r}")
        if name.lower() in _OF_THE_CONNECTION:
            raise WireError(f"HEAD: {name.lower()} is not for the worker to say")


def _decode(kind: Kind, decoder: "msgspec.json.Decoder[Any]", payload: bytes) -> Any:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"{kind.name}: {error}") from error
