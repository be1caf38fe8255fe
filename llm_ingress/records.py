"""Progress as a sequence of records: the bytes that let another worker continue an answer.

    kind (high) and choice (low half of one byte) | payload bytes as LEB128 | payload     (little endian)

START comes first and once: what the first worker decided. TOKENS are generated token ids. TEXT is what those
tokens read as, written only where no client has it yet: in answers that are not streamed. FINISH says that
the answer's last byte went along with this record, so nothing but the END is missing.
There is no version number: a lane with progress only ever goes to a worker of equal fingerprint.

An ingress hands progress on and decides nothing by it; of an answer that has no END it counts the tokens.
Called by: `lanes.py`, which counts; the worker's `progress.py`, which packs and unpacks. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from llm_ingress.errors import WireError

TOKEN_BYTES = 4
LENGTH_BYTES_MAX = 5


class RecordKind(IntEnum):
    """What a record's payload is."""

    START = 1  # JSON; `n_prompt` is in it
    TOKENS = 2  # token ids, u32 each
    TEXT = 3  # UTF-8
    FINISH = 4  # JSON


class _Opening(msgspec.Struct):
    """What an ingress reads of a START."""

    n_prompt: int


@dataclass(frozen=True, slots=True)
class Tally:
    """Tokens of an answer: of its prompt, None before its START, and generated."""

    n_prompt: int | None = None
    n_generated: int = 0

    def __add__(self, later: "Tally") -> "Tally":
        n_prompt = self.n_prompt if later.n_prompt is None else later.n_prompt
        return Tally(n_prompt, self.n_generated + later.n_generated)


_to_opening = msgspec.json.Decoder(_Opening).decode


def pack_record(kind: RecordKind, choice: int, payload: bytes) -> bytes:
    """One record."""
    length = bytearray()
    left = len(payload)
    while left > 0x7F:
        length.append(left & 0x7F | 0x80)
        left >>= 7
    length.append(left)
    return bytes((kind << 4 | choice,)) + length + payload


def records(data: bytes) -> Iterator[tuple[RecordKind, int, bytes]]:
    """Yield kind, choice and payload of each record.

    Raises: WireError where they end within one, or one is of no known kind.
    """
    position = 0
    while position < len(data):
        tag = data[position]
        n_bytes, position = _read_length(data, position + 1)
        payload = data[position : position + n_bytes]
        if len(payload) < n_bytes:
            raise WireError(f"progress of {len(data)} bytes ends inside a record")
        position += n_bytes
        yield _kind(tag >> 4), tag & 0xF, payload


def tally(data: bytes) -> Tally:
    """Count what records say, as far as they can be read."""
    n_prompt, n_generated = None, 0
    try:
        for kind, _, payload in records(data):
            if kind is RecordKind.TOKENS:
                n_generated += len(payload) // TOKEN_BYTES
            elif kind is RecordKind.START:
                n_prompt = _to_opening(payload).n_prompt
    except (WireError, msgspec.MsgspecError, ValueError):
        pass  # whoever continues from it will say so
    return Tally(n_prompt, n_generated)


def _read_length(data: bytes, position: int) -> tuple[int, int]:
    """A LEB128 number and the position after it."""
    length = shift = 0
    for i in range(position, min(position + LENGTH_BYTES_MAX, len(data))):
        length |= (data[i] & 0x7F) << shift
        shift += 7
        if data[i] <= 0x7F:
            return length, i + 1
    raise WireError(f"progress of {len(data)} bytes has a length that does not end")


def _kind(number: int) -> RecordKind:
    try:
        return RecordKind(number)
    except ValueError as error:
        raise WireError(f"progress has an unknown record kind {number}") from error
