"""Records: what a worker packs is counted, and no bytes do any harm to whoever counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_ingress.errors import WireError
from llm_ingress.records import RecordKind, Tally, pack_record, records, tally

START = pack_record(RecordKind.START, 0, b'{"id":"c","n_prompt":5}')
TOKENS = st.binary(max_size=100).map(lambda data: data[: len(data) // 4 * 4])


def tokens(payload: bytes) -> bytes:
    return pack_record(RecordKind.TOKENS, 0, payload)


@given(st.lists(st.tuples(st.sampled_from(RecordKind), st.integers(0, 15), st.binary(max_size=300))))
def test_what_is_packed_is_read_back(packed: list[tuple[RecordKind, int, bytes]]) -> None:
    assert list(records(b"".join(pack_record(*record) for record in packed))) == packed


@given(TOKENS, TOKENS)
def test_counts_add_up_wherever_progress_is_divided(before: bytes, after: bytes) -> None:
    text = pack_record(RecordKind.TEXT, 0, b"text")
    whole = tally(START + tokens(before) + text + tokens(after))
    assert whole == Tally(5, (len(before) + len(after)) // 4)
    assert tally(START + tokens(before)) + tally(text + tokens(after)) == whole


def test_what_can_be_read_before_a_fault_is_counted() -> None:
    assert tally(START + tokens(bytes(8)) + b"\xf0\x00" + tokens(bytes(4))) == Tally(5, 2)
    assert tally(pack_record(RecordKind.START, 0, b"[]") + tokens(bytes(4))) == Tally(None, 0)
    assert tally(b"") == Tally(None, 0)


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_count(data: bytes) -> None:
    assert tally(data).n_generated <= len(data) // 4


@pytest.mark.parametrize("data", [b"\x20", b"\x20\x04abc", b"\x20" + b"\x80" * 9, b"\x00\x00", b"\xf0\x00"])
def test_what_are_no_records_is_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        list(records(data))
