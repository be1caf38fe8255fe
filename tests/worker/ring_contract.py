"""What every ring owes its worker and its gateway, whatever lies between them.

A test module makes the suite its own by deriving from `RingContract` and building its ring in `connect`. The
gateway end is a real `Gateway`; the worker end is a listener that notes what it hears and answers what it is
told to.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from llm_ingress.gateway import Gateway, GatewayConfig, Lane, LaneRequest, LaneState
from llm_ingress.wire import End, Fail, FinishReason, Grant, Head, Heartbeat, Hello, LaneRef, ModelCard
from llm_worker.ring import Ring

CARD = ModelCard(name="echo", file="echo.gguf", n_params=1, n_ctx=10, fingerprint="f", created=1)
HELLO = Hello(worker="w", instance_id="i", model=CARD, max_inflight=32)
HEAD = Head(status=200, headers=(("content-type", "text/plain"),))
END = End(finish_reason=FinishReason.STOP, n_prompt=1, n_completion=2)
HEARTBEAT = Heartbeat(
    inflight=1,
    decoding=1,
    max_inflight=4,
    available_slots=3,
    step_ms=1.5,
    step_age_s=0.25,
    kv_promised_tokens=7,
    tokens_per_second=8.0,
)


async def until(condition: Callable[[], bool], within_s: float = 10) -> None:
    """Let the event loop run until something is so, without keeping a core from the decode."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - of objects that have no event to wait for
            await asyncio.sleep(0.001)


class NotingListener:
    """A worker that does nothing but note what its ring says."""

    def __init__(self) -> None:
        self.grants: list[Grant] = []
        self.heard: list[tuple[str, LaneRef | None]] = []
        self.is_inside = False

    def on_grant(self, ring: Ring, grant: Grant) -> None:
        self.grants.append(grant)
        self._note("grant", grant.ref)

    def on_cancel(self, ring: Ring, ref: LaneRef) -> None:
        self._note("cancel", ref)

    def on_pause(self, ring: Ring, ref: LaneRef) -> None:
        self._note("pause", ref)

    def on_resume(self, ring: Ring, ref: LaneRef) -> None:
        self._note("resume", ref)

    def on_drain(self, ring: Ring) -> None:
        self._note("drain", None)

    def on_attached(self, ring: Ring) -> None:
        self._note("attached", None)

    def on_detached(self, ring: Ring) -> None:
        self._note("detached", None)

    def _note(self, what: str, ref: LaneRef | None) -> None:
        assert not self.is_inside, f"{what} from inside the worker's own call"
        self.heard.append((what, ref))


@dataclass(slots=True)
class Ends:
    """Both ends of one attached ring."""

    gateway: Gateway
    ring: Ring
    worker: NotingListener

    def open(self, body: bytes = b"{}") -> Lane:
        request = LaneRequest(
            path="/v1/chat/completions", body=body, model="echo", request_id="r1", tenant="t"
        )
        return self.gateway.open_lane(request, lambda: None)

    async def granted(self, n: int = 1) -> list[Grant]:
        await until(lambda: len(self.worker.grants) >= n)
        return self.worker.grants

    def say(self, *calls: Callable[[], None]) -> None:
        """Make calls as a worker would: nothing may come back from inside them."""
        self.worker.is_inside = True
        for call in calls:
            call()
        self.worker.is_inside = False


class RingContract:
    """The suite."""

    async def connect(self, gateway: Gateway) -> Ring:
        """A ring to this gateway, not yet attached."""
        raise NotImplementedError

    async def attached(self, config: GatewayConfig | None = None, *, credit: int = 0) -> Ends:
        gateway = Gateway(config or GatewayConfig())
        ring = await self.connect(gateway)
        ends = Ends(gateway, ring, NotingListener())
        ends.say(lambda: ring.attach(HELLO, ends.worker))
        await until(lambda: ("attached", None) in ends.worker.heard)
        if credit:
            ends.say(lambda: ring.credit(credit))
            await until(lambda: gateway.snapshot().workers[0].credit == credit)
        return ends

    async def test_attaching_presents_the_model_and_is_heard_back(self) -> None:
        ends = await self.attached()
        assert ends.gateway.models() == (CARD,)
        assert ends.worker.heard == [("attached", None)]

    async def test_no_lane_is_granted_without_credit_and_no_more_than_offered(self) -> None:
        ends = await self.attached()
        lanes = [ends.open() for _ in range(3)]
        ends.say(lambda: ends.ring.credit(2))
        grants = await ends.granted(2)
        assert [grant.ref for grant in grants] == [lane.ref for lane in lanes[:2]]
        assert lanes[2].state is LaneState.WAITING

    async def test_credit_replaces_the_last_and_counts_from_the_lanes_received(self) -> None:
        ends = await self.attached(credit=1)
        ends.open()
        await ends.granted(1)
        ends.say(lambda: ends.ring.credit(1))
        ends.open()
        await ends.granted(2)
        ends.open()
        assert ends.gateway.snapshot().lanes[LaneState.WAITING] == 1

    async def test_a_grant_carries_the_request_untouched(self) -> None:
        ends = await self.attached(credit=1)
        body = bytes(range(256)) * 400
        lane = ends.open(body)
        (grant,) = await ends.granted()
        assert (grant.body, grant.path, grant.request_id) == (body, "/v1/chat/completions", "r1")
        assert grant.ref == lane.ref
        assert grant.progress == b""

    async def test_an_answer_reaches_its_lane_in_order_and_ends_it(self) -> None:
        ends = await self.attached(credit=1)
        lane = ends.open()
        (grant,) = await ends.granted()
        ref, ring = grant.ref, ends.ring
        ends.say(
            lambda: ring.head(ref, HEAD),
            lambda: ring.body(ref, b"one ", b"1"),
            lambda: ring.body(ref, b"", b"2"),
            lambda: ring.body(ref, b"two", b"3"),
            lambda: ring.end(ref, END),
        )
        await until(lambda: lane.state is LaneState.DONE)
        assert lane.head == HEAD
        assert ends.gateway.take(lane) == b"one two"
        assert lane.outcome is not None
        assert lane.outcome.end == END

    async def test_progress_may_come_before_the_head(self) -> None:
        ends = await self.attached(credit=1)
        lane = ends.open()
        (grant,) = await ends.granted()
        ends.say(lambda: ends.ring.body(grant.ref, b"", b"12"))
        await until(lambda: bytes(lane.progress) == b"12")
        assert lane.state is LaneState.CLAIMED

    async def test_a_released_lane_waits_for_this_workers_next_credit(self) -> None:
        ends = await self.attached(credit=2)
        lane = ends.open()
        (grant,) = await ends.granted()
        ends.say(lambda: ends.ring.release(grant.ref))
        await until(lambda: lane.state is LaneState.WAITING)
        ends.say(lambda: ends.ring.credit(1))
        again = (await ends.granted(2))[1]
        assert again.ref.lane_id == grant.ref.lane_id
        assert again.ref.claim == grant.ref.claim + 1

    async def test_a_retryable_failure_comes_back_with_all_its_progress(self) -> None:
        ends = await self.attached(credit=1)
        ends.open()
        (grant,) = await ends.granted()
        ends.say(
            lambda: ends.ring.head(grant.ref, HEAD),
            lambda: ends.ring.body(grant.ref, b"one", b"12"),
            lambda: ends.ring.body(grant.ref, b"two", b"34"),
            lambda: ends.ring.fail(grant.ref, Fail(message="no", retryable=True)),
            lambda: ends.ring.credit(1),
        )
        assert (await ends.granted(2))[1].progress == b"1234"

    async def test_a_failure_that_would_repeat_ends_the_lane(self) -> None:
        ends = await self.attached(credit=1)
        lane = ends.open()
        (grant,) = await ends.granted()
        ends.say(lambda: ends.ring.fail(grant.ref, Fail(message="why", retryable=False)))
        await until(lambda: lane.state is LaneState.FAILED)
        assert lane.outcome is not None
        assert lane.outcome.message == "why"

    async def test_a_client_that_leaves_is_a_cancel_of_that_claim(self) -> None:
        ends = await self.attached(credit=1)
        lane = ends.open()
        (grant,) = await ends.granted()
        ends.gateway.leave(lane)
        await until(lambda: ("cancel", grant.ref) in ends.worker.heard)

    async def test_a_cancel_right_behind_its_grant_comes_after_it(self) -> None:
        ends = await self.attached(credit=1)
        lane = ends.open()
        ref = lane.ref
        ends.gateway.leave(lane)
        await until(lambda: len(ends.worker.heard) == 3)
        assert ends.worker.heard[1:] == [("grant", ref), ("cancel", ref)]

    async def test_frames_of_a_cancelled_claim_are_dropped(self) -> None:
        ends = await self.attached(credit=2)
        lane, other = ends.open(), ends.open()
        first, second = await ends.granted(2)
        ends.gateway.leave(lane)
        ends.say(
            lambda: ends.ring.head(first.ref, HEAD),
            lambda: ends.ring.body(first.ref, b"late", b""),
            lambda: ends.ring.end(first.ref, END),
            lambda: ends.ring.head(second.ref, HEAD),
        )
        await until(lambda: other.head == HEAD)
        assert lane.state is LaneState.CANCELLED
        assert lane.unread == 0
        assert ends.gateway.snapshot().dropped_frames == 3

    async def test_a_slow_reader_is_a_pause_and_reading_a_resume(self) -> None:
        ends = await self.attached(GatewayConfig(response_buffer_bytes=10), credit=1)
        lane = ends.open()
        (grant,) = await ends.granted()
        ends.say(
            lambda: ends.ring.head(grant.ref, HEAD),
            lambda: ends.ring.body(grant.ref, b"more than ten bytes", b""),
        )
        await until(lambda: ("pause", grant.ref) in ends.worker.heard)
        assert ends.gateway.take(lane) == b"more than ten bytes"
        await until(lambda: ("resume", grant.ref) in ends.worker.heard)

    async def test_a_heartbeat_is_seen_as_it_was_sent(self) -> None:
        ends = await self.attached()
        ends.say(lambda: ends.ring.heartbeat(HEARTBEAT))
        await until(lambda: ends.gateway.snapshot().workers[0].heartbeat == HEARTBEAT)

    async def test_a_lane_that_is_worked_on_is_known_to_be(self) -> None:
        ends = await self.attached(credit=1)
        lane = ends.open()
        (grant,) = await ends.granted()
        heard_at = lane.heard_at
        ends.say(lambda: ends.ring.working(grant.ref))
        await until(lambda: lane.heard_at > heard_at)
        assert lane.state is LaneState.CLAIMED

    async def test_a_draining_worker_gets_no_more_and_finishes_what_it_holds(self) -> None:
        ends = await self.attached(credit=3)
        held = ends.open()
        (grant,) = await ends.granted()
        ends.say(ends.ring.draining)
        await until(lambda: ends.gateway.snapshot().workers[0].is_draining)
        waiting = ends.open()
        ends.say(lambda: ends.ring.head(grant.ref, HEAD), lambda: ends.ring.end(grant.ref, END))
        await until(lambda: held.state is LaneState.DONE)
        assert waiting.state is LaneState.WAITING

    async def test_a_worker_that_detaches_leaves_its_lanes_and_hears_nothing_more(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        ends = await self.attached(credit=2)
        lane, other = ends.open(), ends.open()
        await ends.granted(2)
        ends.gateway.leave(other)
        ends.say(ends.ring.detach)
        n_heard = len(ends.worker.heard)
        await until(lambda: lane.state is LaneState.WAITING)
        await until(lambda: not ends.gateway.snapshot().workers)
        await asyncio.sleep(0)  # what was under way arrives now
        assert len(ends.worker.heard) == n_heard
        assert not caplog.records

    @pytest.mark.parametrize("n_lanes", [1, 20])
    async def test_every_lane_ends_once_and_gives_its_place_back(self, n_lanes: int) -> None:
        ends = await self.attached(credit=n_lanes)
        lanes = [ends.open() for _ in range(n_lanes)]
        for grant in await ends.granted(n_lanes):
            ends.say(partial(ends.ring.head, grant.ref, HEAD), partial(ends.ring.end, grant.ref, END))
        await until(lambda: ends.gateway.is_idle)
        snapshot = ends.gateway.snapshot()
        assert snapshot.accepted == snapshot.finished == len(lanes)
