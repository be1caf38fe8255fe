"""Text from bytes: whole characters, nothing of a stop string, the same for any split of the bytes."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_engine.text import TextAssembler


def answer(stop: tuple[str, ...], pieces: list[bytes]) -> tuple[str, bool]:
    """What a client gets of these pieces, and whether a stop string ended it."""
    assembler, text = TextAssembler(stop), ""
    for piece in pieces:
        text += assembler.feed(piece)
        if assembler.stopped:
            return text, True
    return text + assembler.flush(), False


def reference_answer(stop: tuple[str, ...], data: bytes) -> tuple[str, bool]:
    """The stop string that is complete first ends the text; of several complete at once the longest."""
    text = data.decode("utf-8", "ignore")
    for end in range(1, len(text) + 1):
        ending = [string for string in stop if string and text[:end].endswith(string)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(bounds)]


# Few letters, so that stop strings occur, overlap and nearly occur; characters of every length in bytes.
letters = st.text(alphabet="abé水😀", max_size=30)
stops = st.lists(st.text(alphabet="abé水😀", max_size=6), max_size=5).map(tuple)
broken = st.sampled_from([b"", b"\x80", b"\xff", b"\xe6\xb0", b"\xf0\x9f\x98", b"\xc0\xaf", b"\xed\xa0\x80"])
streams = st.lists(st.tuples(letters, broken)).map(
    lambda parts: b"".join(text.encode() + junk for text, junk in parts)
)
places = st.lists(st.integers(0, 400), max_size=12)


@settings(deadline=None, max_examples=200)
@given(stop=stops, data=streams, places=places)
def test_any_split_of_the_bytes_gives_the_same_text_and_the_same_stop(
    stop: tuple[str, ...], data: bytes, places: list[int]
) -> None:
    expected = reference_answer(stop, data)
    assert answer(stop, cut(data, places)) == expected
    assert answer(stop, [data[i : i + 1] for i in range(len(data))]) == expected


@settings(deadline=None)
@given(data=st.binary(max_size=60), places=places)
def test_random_bytes_never_give_a_broken_character(data: bytes, places: list[int]) -> None:
    text, _ = answer((), cut(data, places))
    assert text == data.decode("utf-8", "ignore")


@settings(deadline=None)
@given(stop=stops, data=streams, places=places)
def test_what_was_sent_is_always_a_prefix_of_the_answer_and_lags_by_a_possible_stop_only(
    stop: tuple[str, ...], data: bytes, places: list[int]
) -> None:
    expected, _ = reference_answer(stop, data)
    assembler, sent, read = TextAssembler(stop), "", b""
    for piece in cut(data, places):
        sent += assembler.feed(piece)
        read += piece
        assert expected.startswith(sent)
        if assembler.stopped:
            break
        # Whole characters read so far; the bytes of an unfinished one are no text yet.
        held = read.decode("utf-8", "ignore")[len(sent) :]
        assert not held or any(string.startswith(held) for string in stop)


@settings(deadline=None)
@given(stop=stops, data=streams, places=places, n_replayed=st.integers(0, 12))
def test_replaying_pieces_with_the_text_dropped_continues_where_the_first_run_was(
    stop: tuple[str, ...], data: bytes, places: list[int], n_replayed: int
) -> None:
    first, pieces = TextAssembler(stop), cut(data, places)
    for piece in pieces[:n_replayed]:
        first.feed(piece)
        if first.stopped:
            return
    second = TextAssembler(stop)
    for piece in pieces[:n_replayed]:
        second.feed(piece)
    for piece in pieces[n_replayed:]:
        assert first.feed(piece) == second.feed(piece)
        assert first.stopped == second.stopped
        if first.stopped:
            return
    assert first.flush() == second.flush()


def test_text_is_held_only_while_it_could_become_a_stop_string() -> None:
    assembler = TextAssembler(("\n\nUser:",))
    assert assembler.feed(b"Hi\n") == "Hi"
    assert assembler.feed(b"\nUs") == ""
    assert assembler.feed(b"ually") == "\n\nUsually"
    assert assembler.feed(b" ok\n\nUser") == " ok"
    assert assembler.feed(b": more") == ""
    assert assembler.stopped
    assert assembler.flush() == ""


def test_a_character_is_held_until_its_last_byte_and_left_out_if_that_never_comes() -> None:
    assembler = TextAssembler(())
    whole = "é😀".encode()
    assert [assembler.feed(whole[i : i + 1]) for i in range(6)] == ["", "é", "", "", "", "😀"]
    assert assembler.feed(whole[2:5]) == ""
    assert assembler.flush() == ""


def test_bytes_that_are_no_part_of_a_character_are_left_out() -> None:
    assert answer((), [b"a\xff", b"\xe2\x82", b"b\x80c", b"\xc3"]) == ("abc", False)


def test_a_replacement_character_the_model_wrote_is_a_character() -> None:
    assert answer((), ["\ufffd".encode()]) == ("\ufffd", False)


def test_the_stop_string_that_is_complete_first_ends_the_text() -> None:
    assert answer(("abcd", "bc"), [b"xabcd"]) == ("xa", True)
    assert answer(("b", "abc"), [b"xab", b"c"]) == ("xa", True)


def test_of_stop_strings_complete_at_once_the_longest_counts() -> None:
    assert answer(("c", "abc", "bc"), [b"xa", b"b", b"c"]) == ("x", True)


def test_a_failed_start_of_a_stop_string_may_hold_the_start_of_another() -> None:
    assert answer(("aab",), [b"a", b"a", b"a", b"a", b"b!"]) == ("aa", True)
    assert answer(("abab!", "bac"), [b"abaxababac"]) == ("abaxaba", True)
    assert answer(("xyz1", "yz9", "z2"), [b"xyz", b"2"]) == ("xy", True)


def test_held_text_is_part_of_an_answer_that_ends_without_the_stop_string() -> None:
    assembler = TextAssembler(("END",))
    assert assembler.feed(b"the EN") == "the "
    assert assembler.flush() == "EN"
    assert assembler.flush() == ""


def test_an_empty_stop_string_stops_nothing() -> None:
    assert answer(("",), [b"abc"]) == ("abc", False)
    assert answer(("", "c"), [b"abc"]) == ("ab", True)


def test_thousands_of_long_stop_strings_cost_one_look_per_character() -> None:
    stop = tuple("a" * 200 + f"{n:04}" for n in range(2000))
    assert answer(stop, [b"a" * 50_000, b"1999", b"tail"]) == ("a" * (50_000 - 200), True)


def test_feeding_after_a_stop_is_a_bug_of_the_caller() -> None:
    assembler = TextAssembler(("x",))
    assembler.feed(b"x")
    with pytest.raises(AssertionError, match="fed after a stop string"):
        assembler.feed(b"y")
