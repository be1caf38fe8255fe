"""A turn's request and records come back as they were packed, and nothing else is taken for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_ingress.errors import WireError
from llm_ingress.turns import AskedTurn, Does, TurnRecord, pack_asked, pack_turn, unpack_asked, unpack_turn

RECORDS = st.builds(TurnRecord, does=st.sampled_from(Does), closing=st.binary(), content=st.binary())


@given(request=st.binary(), limit=st.integers(0, 2**64 - 1), history=st.lists(st.binary()))
def test_a_request_arrives_with_its_limit_and_the_records_before_it(
    request: bytes, limit: int, history: list[bytes]
) -> None:
    body = pack_asked(request, history, limit_bytes=limit)
    assert unpack_asked(body) == AskedTurn(request, limit, tuple(history))
    assert unpack_asked(body).n_bytes == len(body) - 16


@given(RECORDS)
def test_a_record_arrives_as_it_left(record: TurnRecord) -> None:
    assert unpack_turn(pack_turn(record)) == record


def test_the_form_of_both() -> None:
    limit = b"\0\0\0\x08" + (1000).to_bytes(8)
    assert pack_asked(b"ask", [b"one"], limit_bytes=1000) == b"\0\0\0\3ask" + limit + b"\0\0\0\3one"
    assert pack_turn(TurnRecord(closing=b"end", content=b"said")) == b"\1\0\0\0\3endsaid"
    assert pack_turn(TurnRecord(does=Does.REPLACES, closing=b"", content=b"all")) == b"\2\0\0\0\0all"


@pytest.mark.parametrize("data", [b"", b"\0", b"\3\0\0\0\0", b"\1\0\0\0", b"\1\0\0\0\4end", b"{}"])
def test_what_is_no_record_is_a_fault(data: bytes) -> None:
    with pytest.raises(WireError):
        unpack_turn(data)


@pytest.mark.parametrize("body", [b"", b"\0\0", b"\0\0\0\4ask", b"\0\0\0\3ask", b"\0\0\0\3ask\0\0\0\3one"])
def test_what_is_no_asked_turn_is_a_fault(body: bytes) -> None:
    with pytest.raises(WireError):
        unpack_asked(body)
