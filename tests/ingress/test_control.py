"""The control listener over real TLS: whatever one connection does, its lanes go back, no other notices."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

import aiohttp
import pytest
from aiohttp import WSMsgType

from llm_ingress.certs import CertificateFiles
from llm_ingress.control import Control, ControlConfig, serve_control
from llm_ingress.errors import CertificateFault, ConfigError
from llm_ingress.frames import pack
from llm_ingress.gateway import Budgets, Gateway, GatewayConfig, Lane, LaneState
from llm_ingress.tls import LiveContext, control_context, worker_context
from llm_ingress.wire import (
    Body,
    Credit,
    End,
    FinishReason,
    Grant,
    Head,
    LaneRef,
    LaneSignal,
    Message,
    OfLane,
    Refusal,
    RefusedFor,
    RingSignal,
    Welcome,
)
from tests.certificates import Issued, issue
from tests.misdeeds import MISDEEDS
from tests.ring_network import HEARTBEAT, HELLO, RawWorker, another_worker, controlled, open_lane, raw_worker

HEAD = Head(status=200, headers=(("content-type", "text/plain"),))
END = End(finish_reason=FinishReason.STOP)
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    """A CA, an ingress on loopback, and the worker gpu-1."""
    return issue(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def gpu_2(issued: Issued, tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    """Another worker of that CA."""
    return another_worker(issued, tmp_path_factory.mktemp("gpu-2"), "gpu-2")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - of objects that have no event to wait for
            await asyncio.sleep(0.002)


@dataclass(slots=True)
class Scene:
    """A worker about to misbehave with a lane in its hands, and another in the middle of an answer."""

    gateway: Gateway
    control: Control
    bad: RawWorker
    lane: Lane
    good: RawWorker
    good_lane: Lane

    async def holds(self) -> None:
        """The good worker still serves: its answer arrives and ends."""
        ref = self.good_lane.ref
        await self.good.say(Body(ref, b"two", b""), OfLane(ref, END))
        await until(lambda: self.good_lane.state is LaneState.DONE)
        assert self.gateway.take(self.good_lane) == b"onetwo"


@asynccontextmanager
async def scene(
    issued: Issued, gpu_2: CertificateFiles, config: GatewayConfig | None = None
) -> AsyncIterator[Scene]:
    gateway = Gateway(config or GatewayConfig())
    async with (
        controlled(gateway, issued) as control,
        raw_worker(control, gpu_2) as good,
        raw_worker(control, issued.worker) as bad,
    ):
        await good.present()
        await good.say(Credit(1, 0))
        await until(lambda: gateway.snapshot().workers[0].credit == 1)
        good_lane = open_lane(gateway)
        ref = (await good.granted()).ref
        await good.say(OfLane(ref, HEAD), Body(ref, b"one", b""))
        await bad.present()
        await bad.say(Credit(1, 0))
        await until(lambda: gateway.snapshot().workers[1].credit == 1)
        lane = open_lane(gateway)
        await bad.granted()
        yield Scene(gateway, control, bad, lane, good, good_lane)


@pytest.mark.parametrize("misdeed", MISDEEDS)
async def test_a_fault_ends_its_connection_with_one_reason_and_touches_nobody_else(
    misdeed: str, issued: Issued, gpu_2: CertificateFiles, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(issued, gpu_2) as the:
        await MISDEEDS[misdeed].commit(the.bad, the.lane.ref)
        await until(lambda: the.lane.state is LaneState.WAITING)
        assert the.lane.attempts == 1
        assert (await the.bad.ended()).type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.ERROR)
        await until(lambda: len(caplog.records) == 1)
        assert caplog.records[0].levelno == logging.WARNING
        assert "worker gpu-1 at 127.0.0.1: " in caplog.text
        assert MISDEEDS[misdeed].reason in caplog.text
        assert len(the.gateway.snapshot().workers) == 1
        await the.holds()


@pytest.mark.parametrize("message", ["ping", "pong", "empty"])
@pytest.mark.parametrize("has_said_hello", [True, False])
async def test_messages_without_a_frame_may_be_a_flood(
    issued: Issued, message: str, has_said_hello: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm_ingress.leases.IDLE_FRAMES_PER_S", 200)
    async with (
        controlled(Gateway(GatewayConfig()), issued) as control,
        raw_worker(control, issued.worker) as raw,
    ):
        if has_said_hello:
            await raw.present()
        ways: dict[str, Callable[[], Awaitable[None]]] = {
            "ping": raw.ws.ping,
            "pong": raw.ws.pong,
            "empty": partial(raw.send, b""),
        }
        with suppress(ConnectionError, aiohttp.ClientError):
            for _ in range(2000):
                await ways[message]()
        why = "over 200 frames in a second that move nothing" if has_said_hello else "messages and no HELLO"
        assert why in str((await raw.ended()).extra)


async def test_a_worker_that_claims_and_never_answers_loses_its_connection_and_not_the_lane(
    issued: Issued, gpu_2: CertificateFiles, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(issued, gpu_2, GatewayConfig(claim_timeout_s=0.2, heartbeat_interval_s=0.1)) as the:
        for _ in range(10):
            await the.bad.say(HEARTBEAT)
            await the.good.say(OfLane(the.good_lane.ref, LaneSignal.WORKING))
            await asyncio.sleep(0.03)
        assert (await the.bad.ended()).type is WSMsgType.CLOSE
        assert the.lane.state is LaneState.WAITING
        assert "it holds lane 2 and has said nothing of it for 0.2 s" in caplog.text
        await the.holds()


async def test_a_closed_socket_gives_its_lanes_back_at_once(issued: Issued, gpu_2: CertificateFiles) -> None:
    async with scene(issued, gpu_2, GatewayConfig(heartbeat_timeout_s=3600)) as the:
        await the.bad.vanish()
        await until(lambda: the.lane.state is LaneState.WAITING)
        await the.holds()


async def test_a_silent_worker_is_let_go_of_with_one_line_and_its_late_return_is_welcome(
    issued: Issued, gpu_2: CertificateFiles, caplog: pytest.LogCaptureFixture
) -> None:
    config = GatewayConfig(heartbeat_timeout_s=0.4, heartbeat_interval_s=0.1)
    async with scene(issued, gpu_2, config) as the:
        held = the.lane.ref
        alive = asyncio.create_task(_beat(the.good))
        await until(lambda: the.lane.state is LaneState.WAITING)
        end = await the.bad.ended()
        assert (end.type, end.extra) == (WSMsgType.CLOSE, "nothing heard from it for 0.4 s")
        assert [record.getMessage() for record in caplog.records] == [
            "worker gpu-1 at 127.0.0.1: nothing heard from it for 0.4 s"
        ]
        async with raw_worker(the.control, issued.worker) as back:
            await back.present()
            await back.say(Credit(1, 0))
            assert (await back.granted()).ref == LaneRef(held.lane_id, held.claim + 1)
        alive.cancel()
        await the.holds()


async def _beat(worker: RawWorker) -> None:
    while True:
        await worker.say(HEARTBEAT)
        await asyncio.sleep(0.05)


async def test_an_event_loop_starved_for_longer_than_the_lease_evicts_nobody(
    issued: Issued, gpu_2: CertificateFiles
) -> None:
    config = GatewayConfig(heartbeat_timeout_s=0.4, heartbeat_interval_s=0.2)
    async with scene(issued, gpu_2, config) as the:
        beats = [asyncio.create_task(_beat(worker)) for worker in (the.good, the.bad)]
        await asyncio.sleep(0.1)
        time.sleep(1.0)
        await asyncio.sleep(0.3)
        assert all(worker.is_live for worker in the.gateway.snapshot().workers)
        assert the.lane.state is LaneState.CLAIMED
        for beat in beats:
            beat.cancel()
        await the.holds()


# Who may attach.


async def refusal_of(worker: RawWorker, *messages: Message) -> Refusal:
    await worker.say(*messages)
    refusal = await worker.hear()
    assert isinstance(refusal, Refusal), refusal
    assert (await worker.ended()).type is WSMsgType.CLOSE
    return refusal


async def test_another_version_is_refused_with_both_numbers(issued: Issued) -> None:
    async with (
        controlled(Gateway(GatewayConfig()), issued) as control,
        raw_worker(control, issued.worker) as raw,
    ):
        refusal = await refusal_of(raw, replace(HELLO, protocol=2))
        assert refusal.reason is RefusedFor.VERSION
        assert refusal.message == "it speaks version 2 of the ring protocol, this ingress version 1"


async def test_a_name_that_is_not_on_the_allow_list_is_refused(
    issued: Issued, gpu_2: CertificateFiles
) -> None:
    gateway = Gateway(GatewayConfig())
    async with (
        controlled(gateway, issued, allow=frozenset({"gpu-2"})) as control,
        raw_worker(control, issued.worker) as stranger,
        raw_worker(control, gpu_2) as listed,
    ):
        # What it calls itself is no matter.
        refusal = await refusal_of(stranger, replace(HELLO, worker="gpu-2"))
        assert refusal.reason is RefusedFor.ALLOW_LIST
        await listed.present()


async def test_a_certificate_that_is_no_workers_is_refused(
    issued: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_worker(_der: bytes) -> str:
        raise CertificateFault("its names are 'localhost', must be one URI llm-worker:<name>")

    monkeypatch.setattr("llm_ingress.control.identity_of", no_worker)
    async with (
        controlled(Gateway(GatewayConfig()), issued) as control,
        raw_worker(control, issued.worker) as raw,
    ):
        refusal = await refusal_of(raw, HELLO)
        assert refusal.reason is RefusedFor.IDENTITY
        assert "must be one URI" in refusal.message


async def test_another_instance_is_refused_and_told_when_to_come_again(issued: Issued) -> None:
    gateway = Gateway(GatewayConfig(heartbeat_timeout_s=7.0))
    async with (
        controlled(gateway, issued) as control,
        raw_worker(control, issued.worker) as first,
        raw_worker(control, issued.worker) as second,
    ):
        await first.present()
        refusal = await refusal_of(second, replace(HELLO, instance_id="j"))
        assert (refusal.reason, refusal.retry_after_s) == (RefusedFor.DUPLICATE, 7.0)
        await first.say(HEARTBEAT)
        await until(lambda: gateway.snapshot().workers[0].heartbeat == HEARTBEAT)


@pytest.mark.parametrize(
    "hello", [HELLO, replace(HELLO, instance_id="j", takeover=True)], ids=["same instance", "takeover"]
)
async def test_a_newer_connection_takes_the_place_of_the_old_one(issued: Issued, hello: Message) -> None:
    gateway = Gateway(GatewayConfig())
    async with (
        controlled(gateway, issued) as control,
        raw_worker(control, issued.worker) as first,
        raw_worker(control, issued.worker) as second,
    ):
        await first.present()
        await second.say(hello)
        assert isinstance(await second.hear(), Welcome)
        end = await first.ended()
        assert (end.type, end.extra) == (
            WSMsgType.CLOSE,
            "a newer connection of the same worker takes its place",
        )
        assert len(gateway.snapshot().workers) == 1


async def test_a_connection_without_a_hello_is_ended(
    issued: Issued, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("llm_ingress.control.HELLO_S", 0.1)
    async with (
        controlled(Gateway(GatewayConfig()), issued) as control,
        raw_worker(control, issued.worker) as raw,
    ):
        assert (await raw.ended()).extra == "no HELLO within 0.1 s"
        assert "no HELLO within 0.1 s" in caplog.text


async def test_the_first_message_must_be_the_hello(issued: Issued) -> None:
    async with (
        controlled(Gateway(GatewayConfig()), issued) as control,
        raw_worker(control, issued.worker) as raw,
    ):
        await raw.say(HEARTBEAT)
        assert (await raw.ended()).extra == "its first message is not a HELLO"


async def test_only_the_rings_own_path_is_served(issued: Issued) -> None:
    tls = worker_context(issued.worker, datetime.now(UTC))
    async with (
        controlled(Gateway(GatewayConfig()), issued) as control,
        aiohttp.ClientSession() as session,
        session.get(f"https://localhost:{control.port}/health", ssl=tls) as response,
    ):
        assert response.status == 404


@pytest.mark.parametrize(
    "data",
    [bytes(range(256)) * 20, b"GET /ring HTTP/1.1\r\nx: " + b"a" * 200_000],
    ids=["garbage", "long header"],
)
async def test_what_is_no_http_is_one_line(
    issued: Issued, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    tls = worker_context(issued.worker, datetime.now(UTC))
    async with controlled(Gateway(GatewayConfig()), issued) as control:
        reader, writer = await asyncio.open_connection("localhost", control.port, ssl=tls)
        writer.write(data)
        assert (await reader.readline()).startswith(b"HTTP/1.0 400")
        writer.close()
        (record,) = caplog.records
    assert record.getMessage().startswith("worker gpu-1 at 127.0.0.1: it does not speak HTTP: ")
    assert len(record.getMessage().splitlines()) == 1
    assert record.exc_info is None


async def test_two_models_of_one_name_are_a_warning_that_says_who_has_it(
    issued: Issued, gpu_2: CertificateFiles, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        controlled(Gateway(GatewayConfig()), issued) as control,
        raw_worker(control, issued.worker) as first,
        raw_worker(control, gpu_2) as second,
    ):
        for worker, name in ((first, "one"), (second, "two")):
            card = replace(HELLO.model, name=name, aliases=("tiny", f"tiny-{name}"))
            await worker.present(replace(HELLO, model=card))
        (message,) = caplog.messages
    assert message == "both two and one go by the name tiny: requests for it are for two"


async def test_places_that_a_budget_keeps_empty_are_a_warning(
    issued: Issued, gpu_2: CertificateFiles, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = Gateway(GatewayConfig(budgets=Budgets(max_in_flight_decodes=5)))
    async with (
        controlled(gateway, issued) as control,
        raw_worker(control, issued.worker) as first,
        raw_worker(control, gpu_2) as second,
    ):
        for worker in (first, second):
            await worker.present(replace(HELLO, max_inflight=4))
        assert caplog.messages == [
            "3 places of the workers stay empty: see --max-in-flight-decodes and --ring-streams"
        ]


# What is sent, and in which order.


async def test_a_long_lane_does_not_delay_another_lanes_cancel(issued: Issued) -> None:
    gateway = Gateway(GatewayConfig())
    async with controlled(gateway, issued) as control, raw_worker(control, issued.worker) as worker:
        await worker.present()
        await worker.say(Credit(2, 0))
        await until(lambda: gateway.snapshot().workers[0].credit == 2)
        short = open_lane(gateway)
        ref = (await worker.granted()).ref
        long = open_lane(gateway, b"x" * 16 * MIB)
        await asyncio.sleep(0.1)  # as much of it is under way as the line takes
        gateway.leave(short)
        assert await worker.hear() == OfLane(ref, LaneSignal.CANCEL)
        grant = await worker.granted()
        assert (grant.ref, len(grant.body)) == (long.ref, 16 * MIB)


async def test_a_worker_is_heard_while_a_long_lane_is_on_its_way_to_it(issued: Issued) -> None:
    gateway = Gateway(GatewayConfig())
    async with controlled(gateway, issued) as control, raw_worker(control, issued.worker) as worker:
        await worker.present()
        await worker.say(Credit(1, 0))
        await until(lambda: gateway.snapshot().workers[0].credit == 1)
        open_lane(gateway, b"x" * 16 * MIB)
        await asyncio.sleep(0.1)  # the line is full: the worker does not read
        for _ in range(3):
            await worker.ws.ping()
        await worker.say(HEARTBEAT)
        await until(lambda: gateway.snapshot().workers[0].heartbeat == HEARTBEAT)
        assert isinstance(await worker.hear(), Grant)


async def test_a_worker_that_takes_nothing_is_given_up(
    issued: Issued, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("llm_ingress.control.STUCK_S", 0.2)
    gateway = Gateway(GatewayConfig())
    async with controlled(gateway, issued) as control, raw_worker(control, issued.worker) as worker:
        await worker.present()
        await worker.say(Credit(1, 0))
        await until(lambda: gateway.snapshot().workers[0].credit == 1)
        lane = open_lane(gateway, b"x" * 32 * MIB)
        await until(lambda: lane.state is LaneState.WAITING)
        assert "it has taken nothing for 0.2 s" in caplog.text


async def test_all_answers_of_one_step_may_come_in_one_message(issued: Issued) -> None:
    gateway = Gateway(GatewayConfig())
    async with controlled(gateway, issued) as control, raw_worker(control, issued.worker) as worker:
        await worker.present()
        await worker.say(Credit(3, 0))
        await until(lambda: gateway.snapshot().workers[0].credit == 3)
        lanes = [open_lane(gateway) for _ in range(3)]
        refs = [(await worker.granted()).ref for _ in lanes]
        await worker.send(
            b"".join(
                pack(m) for ref in refs for m in (OfLane(ref, HEAD), Body(ref, b"x", b"1"), OfLane(ref, END))
            )
        )
        await until(lambda: all(lane.state is LaneState.DONE for lane in lanes))


# The end.


async def test_drain_tells_every_worker_and_close_says_goodbye(issued: Issued) -> None:
    gateway = Gateway(GatewayConfig())
    async with controlled(gateway, issued) as control, raw_worker(control, issued.worker) as worker:
        await worker.present()
        control.drain()
        assert await worker.hear() is RingSignal.DRAIN
        await control.close()
        end = await worker.ended()
        assert (end.type, end.extra) == (WSMsgType.CLOSE, "this ingress goes away")
        assert gateway.snapshot().workers == ()


async def test_a_worker_that_leaves_is_no_cause_for_alarm(
    issued: Issued, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gateway = Gateway(GatewayConfig())
    async with controlled(gateway, issued) as control:
        async with raw_worker(control, issued.worker) as worker:
            await worker.present()
        await until(lambda: gateway.snapshot().workers == ())
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.INFO]
    assert "it has left" in caplog.text


async def test_a_port_that_is_taken_is_named(issued: Issued) -> None:
    gateway = Gateway(GatewayConfig())
    async with controlled(gateway, issued) as control:
        tls = LiveContext(control_context, issued.ingress, datetime.now(UTC)).for_listener()
        with pytest.raises(ConfigError, match=f"cannot listen for workers on 127.0.0.1 port {control.port}"):
            await serve_control(gateway, tls, ControlConfig(port=control.port))


def test_a_port_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="control port is 65536"):
        ControlConfig(port=65536)
