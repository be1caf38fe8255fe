"""Progress: whatever was packed is read back, and nothing else is read at all."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_engine.generation import StopReason
from llm_ingress.records import Tally, tally
from llm_worker.compaction import Compaction
from llm_worker.errors import ProgressError
from llm_worker.progress import (
    Finish,
    Start,
    pack_finish,
    pack_start,
    pack_text,
    pack_tokens,
    unpack,
)

START = Start(
    id="chatcmpl-1", created=1700000000, seed=-(2**63), max_tokens=7, fingerprint="ab" * 32, n_prompt=5
)
OPENING = pack_start(START)

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=300).map(tuple)


def test_a_bare_start_is_read_back() -> None:
    progress = unpack(OPENING)
    assert progress.start == START
    assert progress.choice(0).tokens == []
    assert progress.choice(0).finish is None


def test_a_start_after_compaction_says_what_stands_for_which_turns() -> None:
    compaction = Compaction(n_older=5, summary="é " * 99, n_replaced=4, n_before=9, n_after=7, n_summaries=1)
    start = replace(START, compaction=compaction)
    assert unpack(pack_start(start)).start == start
    assert tally(pack_start(start)) == Tally(START.n_prompt, 0)


@given(st.lists(st.tuples(st.integers(0, 15), TOKENS, st.text(max_size=200))))
def test_deltas_of_several_choices_add_up_each_to_its_own(
    deltas: list[tuple[int, tuple[int, ...], str]],
) -> None:
    data = OPENING + b"".join(pack_tokens(t, c) + pack_text(text, c) for c, t, text in deltas)
    progress = unpack(data)
    for choice in range(16):
        mine = [(tokens, text) for c, tokens, text in deltas if c == choice]
        assert progress.choice(choice).tokens == [token for tokens, _ in mine for token in tokens]
        assert "".join(progress.choice(choice).pieces) == "".join(text for _, text in mine)


@given(st.lists(st.tuples(st.integers(0, 15), TOKENS, st.text(max_size=200)), max_size=8))
def test_an_ingress_counts_the_tokens(deltas: list[tuple[int, tuple[int, ...], str]]) -> None:
    data = OPENING + b"".join(pack_tokens(t, c) + pack_text(text, c) for c, t, text in deltas)
    data += pack_finish(Finish(reason=StopReason.STOP, n_cached=0))
    assert tally(data) == Tally(START.n_prompt, sum(len(tokens) for _, tokens, _ in deltas))


def test_a_finish_is_read_back() -> None:
    finish = Finish(reason=StopReason.LENGTH, n_cached=3)
    assert unpack(OPENING + pack_tokens((1,)) + pack_finish(finish)).choice(0).finish == finish


def test_a_token_costs_six_bytes() -> None:
    assert len(pack_tokens((151_643,))) == 6
    assert pack_tokens(()) == pack_text("") == b""


def test_one_token_is_packed_as_many_are() -> None:
    assert unpack(OPENING + pack_tokens((1,)) + pack_tokens((2,))) == unpack(OPENING + pack_tokens((1, 2)))


@given(st.integers(0, 10_000))
def test_progress_cut_short_inside_a_record_is_refused(n_bytes: int) -> None:
    ends = (OPENING, OPENING + pack_tokens((1, 2)), OPENING + pack_tokens((1, 2)) + pack_text("é" * 100))
    cut = ends[-1][: n_bytes % len(ends[-1])]
    if cut in ends:
        unpack(cut)
    else:
        with pytest.raises(ProgressError):
            unpack(cut)


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_is_raised(garbage: bytes) -> None:
    for data in (garbage, OPENING + garbage):
        try:
            unpack(data)
        except ProgressError:
            continue
        assert data.startswith(OPENING[:1])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pack_tokens((1,)),
        OPENING + OPENING,
        OPENING + b"\xf0\x00",
        OPENING + b"\x20\x03abc",
        OPENING + b"\x30\x01\xff",
        OPENING + b"\x40\x02{}",
        b"\x10\x02{}",
        OPENING + b"\x20" + b"\xff" * 1000,
    ],
    ids=[
        "nothing",
        "no start",
        "two starts",
        "unknown kind",
        "part of a token",
        "not utf-8",
        "finish without fields",
        "start without fields",
        "endless length",
    ],
)
def test_what_is_not_progress_is_refused(data: bytes) -> None:
    with pytest.raises(ProgressError):
        unpack(data)
