"""The outbox: what goes first, what is cut, and that no lane's order is ever changed."""

from hypothesis import given
from hypothesis import strategies as st

from llm_ingress.frames import FrameReader
from llm_ingress.outbox import FULL_MESSAGE_BYTES, MAX_MESSAGE_BYTES, Outbox
from llm_ingress.payloads import FROM_INGRESS, FROM_WORKER
from llm_ingress.wire import Body, Grant, LaneRef, LaneSignal, Message, OfLane, RingSignal

MIB = 1024 * 1024


def grant(lane_id: int, body: bytes) -> Grant:
    return Grant(ref=LaneRef(lane_id, 1), path="/p", body=body, request_id="r", queued_ms=0.0)


def cancel(lane_id: int) -> OfLane:
    return OfLane(LaneRef(lane_id, 1), LaneSignal.CANCEL)


def drained(outbox: Outbox) -> list[Message]:
    reader = FrameReader(frozenset(FROM_WORKER | FROM_INGRESS), max_open_bytes=100 * MIB)
    messages: list[Message] = []
    while data := outbox.take():
        assert len(data) <= MAX_MESSAGE_BYTES
        messages += reader.feed(data)
    reader.close()
    assert outbox.n_bytes == 0
    return messages


def test_all_that_was_put_goes_out_as_one_message() -> None:
    outbox = Outbox()
    refs = [LaneRef(lane_id, 1) for lane_id in range(1, 201)]
    for ref in refs:
        outbox.put_body(ref, b"data", b"progress")
    (message,) = iter(outbox.take, b"")
    reader = FrameReader(FROM_WORKER, max_open_bytes=0)
    assert list(reader.feed(message)) == [Body(ref, b"data", b"progress") for ref in refs]


def test_another_lanes_cancel_goes_before_what_is_left_of_a_long_lane() -> None:
    outbox = Outbox()
    outbox.put(grant(1, b"x" * 10 * MIB))
    first = outbox.take()
    assert len(first) < 2 * FULL_MESSAGE_BYTES
    outbox.put(cancel(2))
    reader = FrameReader(FROM_INGRESS, max_open_bytes=20 * MIB)
    assert list(reader.feed(first)) == []
    assert list(reader.feed(outbox.take())) == [cancel(2)]


def test_a_lanes_own_cancel_comes_behind_its_grant() -> None:
    outbox = Outbox()
    long = grant(1, b"x" * MIB)
    outbox.put(long)
    outbox.put(cancel(1))
    assert drained(outbox) == [long, cancel(1)]


def test_long_messages_of_several_lanes_take_turns() -> None:
    outbox = Outbox()
    long, shorter = grant(1, b"x" * 10 * MIB), grant(2, b"y" * MIB)
    outbox.put(long)
    outbox.put(shorter)
    assert drained(outbox) == [shorter, long]


def test_a_short_body_behind_a_long_one_of_its_lane_keeps_its_place() -> None:
    outbox = Outbox()
    ref, other = LaneRef(1, 1), LaneRef(2, 1)
    outbox.put_body(ref, b"long" * MIB, b"")
    outbox.put_body(ref, b"short", b"1")
    outbox.put_body(other, b"other", b"2")
    assert drained(outbox) == [
        Body(other, b"other", b"2"),
        Body(ref, b"long" * MIB, b""),
        Body(ref, b"short", b"1"),
    ]


def test_more_short_messages_than_fit_are_taken_in_their_order() -> None:
    outbox = Outbox()
    bodies = [Body(LaneRef(1, 1), b"%d" % i * 1000, b"") for i in range(500)]
    for body in bodies:
        outbox.put_body(*body)
    assert drained(outbox) == bodies


sizes = st.sampled_from([0, 1, 100, 65_000, 65_532, 65_533, 70_000, 200_000])


@given(
    bodies=st.lists(st.tuples(st.integers(1, 3), sizes, sizes, st.booleans()), max_size=12),
    n_taken=st.integers(0, 5),
)
def test_each_lane_gets_its_messages_whole_and_in_order(
    bodies: list[tuple[int, int, int, bool]], n_taken: int
) -> None:
    outbox = Outbox()
    reader = FrameReader(FROM_WORKER, max_open_bytes=10 * MIB)
    sent: list[Message] = []
    received: list[Message] = []
    for place, (lane_id, n_data, n_progress, is_signal) in enumerate(bodies):
        ref = LaneRef(lane_id, 1)
        message: Message = OfLane(ref, LaneSignal.RELEASE) if is_signal else _body(ref, n_data, n_progress)
        sent.append(message)
        outbox.put_body(*message) if isinstance(message, Body) else outbox.put(message)
        if place < n_taken:
            received += reader.feed(outbox.take())
    received += [message for data in iter(outbox.take, b"") for message in reader.feed(data)]
    assert outbox.n_bytes == 0
    for lane_id in (1, 2, 3):
        assert _of(received, lane_id) == _of(sent, lane_id)


def _body(ref: LaneRef, n_data: int, n_progress: int) -> Body:
    return Body(ref, b"d" * n_data, b"p" * n_progress)


def _of(messages: list[Message], lane_id: int) -> list[Message]:
    return [m for m in messages if isinstance(m, Body | OfLane) and m.ref.lane_id == lane_id]


def test_a_message_about_the_ring_is_never_behind_a_lane() -> None:
    outbox = Outbox()
    outbox.put(grant(1, b"x" * MIB))
    outbox.put(RingSignal.DRAIN)
    assert drained(outbox)[0] is RingSignal.DRAIN
