"""Frames: the bytes are pinned, any split gives the same messages, garbage is a WireError and no more."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_ingress.errors import UnknownVersion, WireError
from llm_ingress.frames import HEADER, MAX_PAYLOAD_BYTES, FrameReader, pack, pack_body
from llm_ingress.payloads import FROM_INGRESS, FROM_WORKER, OF_RING, Kind
from llm_ingress.wire import (
    Body,
    Credit,
    End,
    Fail,
    FinishReason,
    Grant,
    Head,
    Heartbeat,
    Hello,
    LaneRef,
    LaneSignal,
    Message,
    ModelCard,
    OfLane,
    Refusal,
    RefusedFor,
    RingSignal,
    Welcome,
)

GOLDEN = Path(__file__).parent / "golden"
EVERY_KIND = frozenset(Kind)
MIB = 1024 * 1024

REF = LaneRef(lane_id=0x0102030405060708, claim=0x090A0B0C)
HELLO = Hello(
    worker="gpu-1",
    instance_id="4fd1",
    model=ModelCard(
        name="m",
        aliases=("a", "b"),
        file="m.gguf",
        n_params=7,
        n_ctx=4096,
        fingerprint="f0",
        created=1700000000,
    ),
    max_inflight=4,
)
GRANT = Grant(
    ref=REF,
    path="/v1/chat/completions",
    body=b'{"model":"m"}',
    request_id="r1",
    queued_ms=12.5,
    remaining_s=30.0,
    progress=b"\x00\x01so far",
)
MESSAGES: dict[str, Message] = {
    "hello": HELLO,
    "credit": Credit(n_lanes=3, n_seen=5),
    "head": OfLane(REF, Head(status=200, headers=(("content-type", "text/event-stream"),))),
    "body": Body(REF, b"data: {}\n\n", b"\x01\x02"),
    "end": OfLane(
        REF,
        End(
            finish_reason=FinishReason.STOP,
            n_prompt=9,
            n_cached=8,
            n_completion=7,
            prefill_ms=1.5,
            decode_ms=2.5,
            record=b"\x00\xff",
        ),
    ),
    "fail": OfLane(REF, Fail(message="the engine failed", retryable=True)),
    "release": OfLane(REF, LaneSignal.RELEASE),
    "working": OfLane(REF, LaneSignal.WORKING),
    "heartbeat": Heartbeat(
        inflight=1,
        decoding=1,
        max_inflight=4,
        available_slots=3,
        step_ms=21.5,
        step_age_s=0.25,
        kv_promised_tokens=512,
        tokens_per_second=46.5,
        prompt_tokens_per_second=820.5,
        sessions=7,
        kv_bytes=25165824,
        kv_promised_bytes=12582912,
    ),
    "draining": RingSignal.DRAINING,
    "welcome": Welcome(ingress_id="i1", heartbeat_timeout_s=5.0),
    "refused": Refusal(reason=RefusedFor.DUPLICATE, message="another instance", retry_after_s=5.0),
    "lane": GRANT,
    "cancel": OfLane(REF, LaneSignal.CANCEL),
    "pause": OfLane(REF, LaneSignal.PAUSE),
    "resume": OfLane(REF, LaneSignal.RESUME),
    "drain": RingSignal.DRAIN,
}


def new_reader(kinds: frozenset[Kind] = EVERY_KIND, max_open_bytes: int = 100 * MIB) -> FrameReader:
    return FrameReader(kinds, max_open_bytes=max_open_bytes)


def unpack(data: bytes, kinds: frozenset[Kind] = EVERY_KIND) -> list[Message]:
    reader = new_reader(kinds)
    messages = list(reader.feed(data))
    reader.close()
    return messages


def frame(kind: int, payload: bytes = b"", *, more: int = 0, lane: int = 1, claim: int = 1) -> bytes:
    return HEADER.pack(kind, more, claim, lane, len(payload)) + payload


def ring_frame(kind: int, payload: bytes = b"") -> bytes:
    return frame(kind, payload, lane=0, claim=0)


# The bytes are pinned.


def test_there_is_a_golden_file_for_every_kind() -> None:
    kinds = {pack(message)[0] for message in MESSAGES.values()}
    assert kinds == set(Kind)
    assert {path.stem for path in GOLDEN.glob("*.bin")} == set(MESSAGES) | {"long_body"}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_has_the_bytes_of_its_golden_file(name: str) -> None:
    path = GOLDEN / f"{name}.bin"
    data = path.read_bytes()
    assert pack(MESSAGES[name]) == data
    assert unpack(data) == [MESSAGES[name]]


def test_a_heartbeat_of_a_worker_that_tells_nothing_of_its_conversations_is_read() -> None:
    payload = (
        b'{"inflight":1,"decoding":1,"max_inflight":4,"available_slots":3,"step_ms":21.5,"step_age_s":0.25,'
        b'"kv_promised_tokens":512,"tokens_per_second":46.5}'
    )
    (beat,) = unpack(ring_frame(Kind.HEARTBEAT, payload))
    assert isinstance(beat, Heartbeat)
    assert (beat.kv_promised_tokens, beat.sessions, beat.prompt_tokens_per_second) == (512, 0, 0.0)


def test_a_long_message_has_the_frames_of_its_golden_file() -> None:
    path = GOLDEN / "long_body.bin"
    message = Body(REF, b"d" * (MAX_PAYLOAD_BYTES + 1), b"pp")
    assert pack(message) == path.read_bytes()
    assert unpack(path.read_bytes()) == [message]


def test_the_header_is_as_documented() -> None:
    assert pack_body(REF, b"xyz", b"\x07").hex(" ") == (
        "04 00 09 0a 0b 0c 01 02 03 04 05 06 07 08 00 00 00 08 00 00 00 01 07 78 79 7a"
    )


def test_the_short_way_to_a_body_gives_the_same_bytes() -> None:
    assert pack_body(REF, b"data", b"progress") == pack(Body(REF, b"data", b"progress"))


# What is long goes in several frames.


@pytest.mark.parametrize(
    "size", [MAX_PAYLOAD_BYTES - 4, MAX_PAYLOAD_BYTES - 3, 3 * MAX_PAYLOAD_BYTES, 16 * MIB]
)
def test_a_message_of_any_size_arrives_in_frames_of_at_most_64_kib(size: int) -> None:
    message = Body(REF, b"x" * size, b"")
    data = pack(message)
    at = 0
    while at < len(data):
        length = HEADER.unpack_from(data, at)[-1]
        assert length <= MAX_PAYLOAD_BYTES
        at += HEADER.size + length
    assert unpack(data) == [message]


def test_a_lane_with_16_mib_and_long_progress_arrives_whole() -> None:
    grant = Grant(
        ref=REF, path="/p", body=os.urandom(16 * MIB), request_id="r", queued_ms=0.0, progress=b"p" * MIB
    )
    assert unpack(pack(grant)) == [grant]


def test_frames_of_other_lanes_may_come_between_those_of_a_long_message() -> None:
    first, second = LaneRef(1, 1), LaneRef(2, 7)
    payload = pack(Body(first, b"abcdef", b""))[HEADER.size :]
    data = b"".join(
        (
            frame(Kind.BODY, payload[:3], more=1),
            pack(Body(second, b"whole", b"2")),
            ring_frame(Kind.DRAINING),
            frame(Kind.BODY, payload[3:]),
        )
    )
    assert unpack(data) == [Body(second, b"whole", b"2"), RingSignal.DRAINING, Body(first, b"abcdef", b"")]


# What a worker may say of itself, and of an answer.

HOP_BY_HOP = ("Content-Length", "transfer-encoding", "connection", "upgrade")


def head_with(name: str) -> bytes:
    return f'{{"status":200,"headers":[["{name}","5"]]}}'.encode()


def odd_hellos() -> Iterator[tuple[Hello, str]]:
    """What no worker is called, and how much none can do; each with what is said to it."""
    for text in ("", "a\nFAKE line", "\x1b[31mred", "x" * 257):
        said = re.escape(f"{text[:40]!r} is no name")
        yield replace(HELLO, worker=text), said
        yield replace(HELLO, instance_id=text), said
        yield replace(HELLO, model=replace(HELLO.model, name=text)), said
        yield replace(HELLO, model=replace(HELLO.model, aliases=("a", text))), said
    yield replace(HELLO, model=replace(HELLO.model, aliases=("a",) * 101)), "101 aliases"
    yield replace(HELLO, model=replace(HELLO.model, n_ctx=0)), "n_ctx is 0, must be at least 1"
    for n in (0, 65_537):
        yield replace(HELLO, max_inflight=n), f"max_inflight is {n}, must be 1 to 65536"


def odd_heartbeats() -> Iterator[bytes]:
    """Counts that nobody could tell on in JSON, or divide."""
    payload = pack(MESSAGES["heartbeat"])[HEADER.size :]
    for n in (b"-1", b"9007199254740993", b"1" + b"0" * 400):
        yield ring_frame(Kind.HEARTBEAT, payload.replace(b'"inflight":1,', b'"inflight":' + n + b",", 1))


# Any split gives the same messages.

names = st.text(max_size=20)
refs = st.builds(LaneRef, st.integers(1, 2**64 - 1), st.integers(1, 2**32 - 1))
some_bytes = st.binary(max_size=300)
counts = st.integers(0, 2**40)
floats = st.floats(min_value=0, max_value=1e12)
messages = st.one_of(
    st.builds(Body, refs, some_bytes, some_bytes),
    st.builds(Credit, st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)),
    st.builds(OfLane, refs, st.sampled_from(LaneSignal)),
    st.builds(OfLane, refs, st.builds(Fail, message=names, retryable=st.booleans())),
    st.builds(OfLane, refs, st.builds(End, finish_reason=st.sampled_from(FinishReason), record=some_bytes)),
    st.builds(
        Grant,
        ref=refs,
        path=names,
        body=some_bytes,
        request_id=names,
        queued_ms=floats,
        remaining_s=st.none() | floats,
        progress=some_bytes,
    ),
    st.builds(
        Heartbeat,
        inflight=counts,
        decoding=counts,
        max_inflight=counts,
        available_slots=counts,
        step_ms=floats,
        step_age_s=floats,
        kv_promised_tokens=counts,
        tokens_per_second=floats,
        prompt_tokens_per_second=floats,
        sessions=counts,
        kv_bytes=counts,
        kv_promised_bytes=counts,
    ),
    st.sampled_from([HELLO, *RingSignal]),
)


def pieces_of(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


@given(st.lists(messages, max_size=8), st.lists(st.integers(0, 10**6), max_size=20))
def test_any_split_of_the_bytes_gives_the_same_messages(sent: list[Message], cuts: list[int]) -> None:
    reader = new_reader()
    data = b"".join(map(pack, sent))
    assert [message for piece in pieces_of(data, cuts) for message in reader.feed(piece)] == sent
    reader.close()


@given(st.lists(messages, min_size=1, max_size=4), st.data())
def test_any_split_of_a_fault_gives_the_same_messages_before_it(
    sent: list[Message], data: st.DataObject
) -> None:
    stream = bytearray(b"".join(map(pack, sent)))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    cuts = data.draw(st.lists(st.integers(0, 10**6), max_size=8))
    assert outcome_of([bytes(stream)]) == outcome_of(pieces_of(bytes(stream), cuts))


def outcome_of(pieces: list[bytes]) -> tuple[list[Message], str]:
    """What a reader makes of bytes: the messages, and the fault that ended them."""
    reader, received = new_reader(), list[Message]()
    try:
        for piece in pieces:
            received.extend(reader.feed(piece))
        reader.close()
    except WireError as error:
        return received, str(error)
    return received, ""


@given(st.lists(st.binary(max_size=200), max_size=10), st.sampled_from([FROM_WORKER, FROM_INGRESS]))
def test_garbage_is_a_wire_error_or_waits_for_more(pieces: list[bytes], kinds: frozenset[Kind]) -> None:
    reader = new_reader(kinds)
    try:
        for piece in pieces:
            list(reader.feed(piece))
    except WireError:
        pass


@given(st.sampled_from(Kind), st.binary(max_size=200))
def test_a_right_header_before_garbage_is_a_message_or_a_wire_error(kind: Kind, payload: bytes) -> None:
    data = ring_frame(kind, payload) if kind in OF_RING else frame(kind, payload)
    messages, fault = outcome_of([data])
    assert len(messages) == (not fault)
    assert not fault or kind.name in fault or "version" in fault


# What cannot be right.


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (frame(0x00), "no such frame: kind 0x00"),
        (frame(0x7F), "no such frame: kind 0x7f"),
        (frame(Kind.BODY, b"\0\0\0\0", more=2), "no such frame"),
        (HEADER.pack(Kind.BODY, 0, 1, 1, MAX_PAYLOAD_BYTES + 1), "must be at most 65536"),
        (HEADER.pack(Kind.HELLO, 0, 0, 0, 2**32 - 1), "must be at most 65536"),
        (frame(Kind.BODY, b"\0\0\0"), "BODY: truncated"),
        (frame(Kind.BODY, b"\0\0\0\1"), "BODY: truncated"),
        (frame(Kind.BODY, b"\0\0\0\0", lane=0), "BODY: lane 0, claim 1"),
        (frame(Kind.BODY, b"\0\0\0\0", claim=0), "BODY: lane 1, claim 0"),
        (frame(Kind.HEARTBEAT, b"{}"), "HEARTBEAT: lane 1, claim 1"),
        (frame(Kind.LANE, b"\0\0"), "LANE: truncated"),
        (frame(Kind.LANE, b"\0\0\0\2{}"), "LANE: truncated"),
        (frame(Kind.LANE, b"\0\0\0\2{}\0\0\0\0"), "LANE: .*path"),
        (ring_frame(Kind.CREDIT, b"\0" * 11), "CREDIT: 11 bytes, must be 12"),
        (frame(Kind.RELEASE, b"x"), "RELEASE: 1 bytes, must be empty"),
        (frame(Kind.HEAD, b"{"), "HEAD: "),
        (frame(Kind.HEAD, b"\xff"), "HEAD: "),
        (frame(Kind.HEAD, b'{"status":"200","headers":[]}'), "HEAD: Expected `int`"),
        (frame(Kind.HEAD, b'{"status":99,"headers":[]}'), "HEAD: status 99"),
        (frame(Kind.HEAD, b'{"status":101,"headers":[]}'), "HEAD: status 101"),
        (frame(Kind.HEAD, b'{"status":200,"headers":[["a b","c"]]}'), "HEAD: not a header: 'a b'"),
        (frame(Kind.HEAD, b'{"status":200,"headers":[["a","b\\r\\nc: d"]]}'), "HEAD: not a header: 'a'"),
        *((frame(Kind.HEAD, head_with(name)), f"HEAD: {name.lower()} is not") for name in HOP_BY_HOP),
        (frame(Kind.FAIL, b'{"message":"m"}'), "FAIL: .*retryable"),
        *((pack(hello), f"HELLO: {reason}") for hello, reason in odd_hellos()),
        (frame(Kind.END, b'{"finish_reason":"tired"}'), "END: .*tired"),
        *((beat, "HEARTBEAT: inflight is out of range") for beat in odd_heartbeats()),
        (frame(Kind.END, b'{"finish_reason":"stop","n_prompt":-1}'), "END: n_prompt is out of range"),
        (ring_frame(Kind.HELLO, b"[" * 60_000), "HELLO: "),
        (frame(Kind.BODY, more=1), "an empty frame with more to follow"),
        (
            frame(Kind.BODY, b"x", more=1) + frame(Kind.END, b"{}"),
            "END of lane 1 within its BODY",
        ),
        (
            frame(Kind.BODY, b"x", more=1) + frame(Kind.BODY, b"x", claim=2),
            "BODY of lane 1 within its BODY",
        ),
    ],
)
def test_what_cannot_be_right_is_a_wire_error_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        unpack(data)


@pytest.mark.parametrize("kinds", [FROM_WORKER, FROM_INGRESS])
def test_a_frame_in_the_wrong_direction_is_unknown(kinds: frozenset[Kind]) -> None:
    for message in MESSAGES.values():
        data = pack(message)
        if data[0] in kinds:
            assert unpack(data, kinds) == [message]
        else:
            with pytest.raises(WireError, match="no such frame"):
                unpack(data, kinds)


@pytest.mark.parametrize("size", range(1, HEADER.size + 5))
def test_a_stream_that_ends_within_a_message_is_truncated(size: int) -> None:
    with pytest.raises(WireError, match="ended within a message"):
        unpack(pack(Body(REF, b"x", b""))[:size])


def test_a_stream_that_ends_between_the_frames_of_a_message_is_truncated() -> None:
    with pytest.raises(WireError, match="ended within a message"):
        unpack(frame(Kind.BODY, b"\0\0\0\0", more=1))


def test_a_header_is_refused_before_its_payload_has_come() -> None:
    with pytest.raises(WireError, match="no such frame"):
        list(new_reader().feed(HEADER.pack(0x20, 0, 1, 1, 100)))


def test_what_is_not_complete_is_bounded_over_all_lanes() -> None:
    reader = new_reader(max_open_bytes=200_000)
    data = b"".join(frame(Kind.BODY, b"x", more=1, lane=lane) for lane in range(1, 1000))
    with pytest.raises(WireError, match="over 200000 bytes in messages not complete"):
        list(reader.feed(data))


def test_a_message_that_became_complete_no_longer_counts() -> None:
    reader = new_reader(max_open_bytes=200_000)
    long = pack(Body(REF, b"x" * 150_000, b""))
    for _ in range(5):
        assert len(list(reader.feed(long))) == 1


# Versions.


def test_unknown_fields_are_ignored() -> None:
    payload = b'{"message":"m","retryable":false,"colour":{"deep":[1,2]}}'
    assert unpack(frame(Kind.FAIL, payload)) == [OfLane(LaneRef(1, 1), Fail(message="m", retryable=False))]


def test_another_version_is_told_apart_from_a_broken_hello() -> None:
    with pytest.raises(UnknownVersion, match="version 2 of the ring protocol"):
        unpack(ring_frame(Kind.HELLO, b'{"protocol":2,"who":"knows"}'))
    with pytest.raises(WireError, match=r"HELLO: .*worker"):
        unpack(ring_frame(Kind.HELLO, b'{"protocol":1}'))
