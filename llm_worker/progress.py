"""The progress of an answer: what a worker says of how far it came, and what another continues from.

A worker sends it beside the answer's own bytes, the ingress appends it to the lane, and the next worker reads
it all. Its form, a sequence of records, is `llm_ingress/records.py`.

Called by: `answer.py`, which packs; `preparation.py`, which unpacks. Pure.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import orjson

from llm_engine.generation import StopReason
from llm_ingress.errors import WireError
from llm_ingress.records import TOKEN_BYTES, RecordKind, pack_record, records
from llm_worker.compaction import Compaction
from llm_worker.errors import ProgressError

T = TypeVar("T")

_ONE_TOKEN = struct.Struct("<BBI")  # the record of nearly every step, in one call


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the first worker decided; a continuation keeps to it."""

    id: str
    created: int  # unix seconds
    seed: int
    max_tokens: int
    fingerprint: str
    n_prompt: int
    compaction: Compaction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How a choice ended whose last byte is out."""

    reason: StopReason
    n_cached: int


@dataclass(slots=True)
class ChoiceProgress:
    """How far one choice came. `pieces` of text are empty for a streamed answer: its client has them."""

    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Everything an answer's records say."""

    start: Start
    choices: dict[int, ChoiceProgress]

    def choice(self, index: int) -> ChoiceProgress:
        """Progress of one choice; an empty one if it has not begun."""
        return self.choices.get(index) or ChoiceProgress()


def pack_start(start: Start) -> bytes:
    """The record that opens an answer."""
    return pack_record(RecordKind.START, 0, orjson.dumps(start))


def pack_tokens(tokens: tuple[int, ...], choice: int = 0) -> bytes:
    """The record of newly generated tokens; nothing if there are none."""
    if len(tokens) == 1:
        return _ONE_TOKEN.pack(RecordKind.TOKENS << 4 | choice, TOKEN_BYTES, tokens[0])
    if not tokens:
        return b""
    return pack_record(RecordKind.TOKENS, choice, struct.pack(f"<{len(tokens)}I", *tokens))


def pack_text(text: str, choice: int = 0) -> bytes:
    """The record of new text no client has; nothing if it is empty."""
    return pack_record(RecordKind.TEXT, choice, text.encode()) if text else b""


def pack_finish(finish: Finish, choice: int = 0) -> bytes:
    """The record that goes with a choice's last byte."""
    return pack_record(RecordKind.FINISH, choice, orjson.dumps(finish))


def unpack(data: bytes) -> Progress:
    """Read an answer's progress.

    Raises: ProgressError if it is empty, cut short, or anything but records that begin with one START.
    """
    start: Start | None = None
    choices: dict[int, ChoiceProgress] = {}
    for kind, choice, payload in _read_records(data):
        if (kind is RecordKind.START) is not (start is None):
            raise ProgressError("progress does not begin with its one START")
        if kind is RecordKind.START:
            start = _decode(payload, Start)
        else:
            _apply(choices.setdefault(choice, ChoiceProgress()), kind, payload)
    if start is None:
        raise ProgressError("progress is empty")
    return Progress(start, choices)


def _read_records(data: bytes) -> Iterator[tuple[RecordKind, int, bytes]]:
    try:
        yield from records(data)
    except WireError as error:
        raise ProgressError(str(error)) from error


def _apply(progress: ChoiceProgress, kind: RecordKind, payload: bytes) -> None:
    """Add one record that is not the START to its choice."""
    if kind is RecordKind.TOKENS:
        progress.tokens.extend(_unpack_tokens(payload))
    elif kind is RecordKind.TEXT:
        progress.pieces.append(_unpack_text(payload))
    else:
        progress.finish = _decode(payload, Finish)


def _unpack_tokens(payload: bytes) -> tuple[int, ...]:
    n_tokens, rest = divmod(len(payload), TOKEN_BYTES)
    if rest:
        raise ProgressError(f"a TOKENS record of {len(payload)} bytes is not whole tokens")
    return struct.unpack(f"<{n_tokens}I", payload)


def _unpack_text(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise ProgressError("a TEXT record is not UTF-8") from error


def _decode(payload: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(payload, type=kind)
    except msgspec.MsgspecError as error:
        raise ProgressError(f"a {kind.__name__} record cannot be read: {error}") from error
