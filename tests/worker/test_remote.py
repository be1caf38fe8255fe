"""The ring over mutual TLS: held to the contract of every ring, and to what only a network can do to it."""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aiohttp import web

from llm_ingress.attachment import Attachment
from llm_ingress.certs import CertificateFiles
from llm_ingress.control import Control, ControlConfig, serve_control
from llm_ingress.frames import pack
from llm_ingress.gateway import Gateway, GatewayConfig, LaneState
from llm_ingress.tls import LiveContext, control_context, worker_context
from llm_ingress.wire import Hello, LaneRef, LaneSignal, Message, OfLane, Welcome
from llm_worker.remote import RemoteRing, TlsSource
from llm_worker.ring import Ring
from tests.certificates import TODAY, Issued, issue
from tests.ring_network import controlled, open_lane, raw_worker
from tests.worker.ring_contract import END, HEAD, HEARTBEAT, HELLO, NotingListener, RingContract, until


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    """A CA, an ingress on loopback, and the worker gpu-1."""
    return issue(tmp_path_factory.mktemp("pki"))


def tls_of(files: CertificateFiles) -> LiveContext:
    return LiveContext(worker_context, files, datetime.now(UTC))


class TestRemoteRing(RingContract):
    @pytest.fixture(autouse=True)
    async def _network(self, issued: Issued) -> AsyncIterator[None]:
        self.issued = issued
        self.controls: list[Control] = []
        self.rings: list[RemoteRing] = []
        yield
        for ring in self.rings:
            ring.detach()
            await ring.closed()
        for control in self.controls:
            await control.close()

    async def connect(self, gateway: Gateway) -> Ring:
        listener = LiveContext(control_context, self.issued.ingress, datetime.now(UTC)).for_listener()
        control = await serve_control(gateway, listener, ControlConfig(port=0))
        self.controls.append(control)
        ring = RemoteRing(f"https://localhost:{control.port}", tls_of(self.issued.worker))
        self.rings.append(ring)
        return ring


@asynccontextmanager
async def dialled(
    port: int,
    files: CertificateFiles,
    hello: Hello = HELLO,
    *,
    host: str = "localhost",
    server_hostname: str | None = None,
    tls: TlsSource | None = None,
) -> AsyncIterator[tuple[RemoteRing, NotingListener]]:
    """A ring that dials, and its worker."""
    ring = RemoteRing(
        f"https://{host}:{port}", tls or tls_of(files), server_hostname=server_hostname, chance=lambda: 0.05
    )
    worker = NotingListener()
    ring.attach(hello, worker)
    try:
        yield ring, worker
    finally:
        ring.detach()
        await ring.closed()


def n_heard(worker: NotingListener, what: str) -> int:
    return sum(heard == what for heard, _ in worker.heard)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "llm_worker.remote"]


# Lost and found.


async def test_an_ingress_that_comes_back_is_found_again_and_lanes_are_counted_anew(issued: Issued) -> None:
    first, second = Gateway(GatewayConfig()), Gateway(GatewayConfig())
    async with controlled(first, issued) as control:
        port = control.port
        async with dialled(port, issued.worker) as (ring, worker):
            await until(lambda: n_heard(worker, "attached") == 1)
            ring.credit(1)
            await until(lambda: first.snapshot().workers[0].credit == 1)
            lane = open_lane(first)
            await until(lambda: len(worker.grants) == 1)
            await control.close()
            await until(lambda: n_heard(worker, "detached") == 1)
            assert lane.state is LaneState.WAITING
            ring.end(lane.ref, END)  # nobody hears it
            async with controlled(second, issued, port=port):
                await until(lambda: n_heard(worker, "attached") == 2)
                ring.credit(1)
                await until(lambda: second.snapshot().workers[0].credit == 1)
                open_lane(second)
                await until(lambda: len(worker.grants) == 2)
                assert n_heard(worker, "detached") == 1


async def test_a_lost_lane_is_continued_on_the_next_connection_from_its_progress(issued: Issued) -> None:
    gateway = Gateway(GatewayConfig())
    async with controlled(gateway, issued) as control, dialled(control.port, issued.worker) as (ring, worker):
        await until(lambda: n_heard(worker, "attached") == 1)
        ring.credit(1)
        await until(lambda: gateway.snapshot().workers[0].credit == 1)
        lane = open_lane(gateway)
        await until(lambda: len(worker.grants) == 1)
        ring.head(lane.ref, HEAD)
        ring.body(lane.ref, b"one", b"1")
        await until(lambda: lane.unread == 3)
        # The same instance on another connection: the first one is ended.
        async with raw_worker(control, issued.worker) as replacing:
            await replacing.present(HELLO)
            await until(lambda: n_heard(worker, "detached") == 1)
        await until(lambda: n_heard(worker, "attached") == 2)
        ring.credit(1)
        await until(lambda: len(worker.grants) == 2)
        assert worker.grants[1].progress == b"1"
        assert worker.grants[1].ref == LaneRef(lane.id, 2)


async def test_an_ingress_reached_twice_is_served_once_and_the_other_way_stands_by(
    issued: Issued, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = Gateway(GatewayConfig())
    attended: dict[str, RemoteRing] = {}
    async with controlled(gateway, issued) as control:
        urls = [f"https://{host}:{control.port}" for host in ("127.0.0.1", "localhost")]
        rings = [
            RemoteRing(url, tls_of(issued.worker), attended=attended, chance=lambda: 0.05) for url in urls
        ]
        worker = NotingListener()
        for ring in rings:
            ring.attach(HELLO, worker)
        await until(lambda: "it is the ingress that this worker serves as" in caplog.text)
        (serving,) = attended.values()
        for _ in range(20):  # of its turns to dial
            await asyncio.sleep(0.01)
        assert (n_heard(worker, "attached"), n_heard(worker, "detached")) == (1, 0)
        # The way that was used is gone: the other takes over.
        serving.detach()
        await until(lambda: n_heard(worker, "attached") == 2)
        for ring in rings:
            ring.detach()
            await ring.closed()
    assert attended == {}


async def test_another_address_of_the_ingress_found_later_costs_the_lanes_it_serves_nothing(
    issued: Issued, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gateway = Gateway(GatewayConfig(max_attempts=1))
    attended: dict[str, RemoteRing] = {}
    async with controlled(gateway, issued) as control:
        rings = [
            RemoteRing(f"https://{host}:{control.port}", tls_of(issued.worker), attended=attended)
            for host in ("127.0.0.1", "localhost")
        ]
        worker = NotingListener()
        rings[0].attach(HELLO, worker)
        await until(lambda: n_heard(worker, "attached") == 1)
        rings[0].credit(1)
        await until(lambda: gateway.snapshot().workers[0].credit == 1)
        lane = open_lane(gateway)
        await until(lambda: len(worker.grants) == 1)
        rings[1].attach(HELLO, worker)
        stands_by = f"{rings[1]}: it is the ingress that this worker serves as {rings[0]}"
        await until(lambda: stands_by in caplog.text)
        assert "it has left: this worker serves this ingress by another connection" in caplog.text
        rings[0].head(lane.ref, HEAD)
        rings[0].end(lane.ref, END)
        await until(lambda: lane.state is LaneState.DONE)
        for ring in rings:
            ring.detach()
            await ring.closed()


async def test_what_was_said_before_leaving_arrives(issued: Issued) -> None:
    gateway = Gateway(GatewayConfig())
    async with controlled(gateway, issued) as control, dialled(control.port, issued.worker) as (ring, worker):
        await until(lambda: n_heard(worker, "attached") == 1)
        ring.credit(1)
        await until(lambda: gateway.snapshot().workers[0].credit == 1)
        lane = open_lane(gateway)
        await until(lambda: len(worker.grants) == 1)
        ring.head(lane.ref, HEAD)
        ring.body(lane.ref, b"x" * 3_000_000, b"")
        ring.end(lane.ref, END)
        ring.detach()
        await ring.closed()
        await until(lambda: lane.state is LaneState.DONE)
        assert lane.unread == 3_000_000


async def test_all_that_is_said_in_one_turn_goes_out_as_one_websocket_message(
    issued: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    feed = Attachment.feed

    def note(self: Attachment, data: bytes) -> None:
        sizes.append(len(data))
        feed(self, data)

    monkeypatch.setattr(Attachment, "feed", note)
    gateway = Gateway(GatewayConfig())
    async with controlled(gateway, issued) as control, dialled(control.port, issued.worker) as (ring, worker):
        await until(lambda: n_heard(worker, "attached") == 1)
        sizes.clear()
        for lane_id in range(1, 201):
            ring.body(LaneRef(lane_id, 1), b"x" * 100, b"")
        ring.heartbeat(HEARTBEAT)
        await until(lambda: gateway.snapshot().dropped_frames == 200)
        assert len(sizes) == 1


# An ingress that cannot be had: one line that says which of these it is.


async def said(caplog: pytest.LogCaptureFixture, n: int = 1) -> str:
    await until(lambda: len(warnings_of(caplog)) >= n)
    return warnings_of(caplog)[n - 1]


async def test_an_unreachable_ingress_is_one_line_however_often_it_is_dialled(
    issued: Issued, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with dialled(port, issued.worker, host="127.0.0.1"):
        assert f"https://127.0.0.1:{port}: unreachable: Connection refused" in await said(caplog)
        await asyncio.sleep(0.3)  # some attempts more
    assert len(warnings_of(caplog)) == 1


class _Stranger:
    """Trusts an ingress whose CA knows nothing of its own certificate."""

    def __init__(self, own: Issued, trusted: Issued) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.load_cert_chain(own.worker.cert, own.worker.key)
        self._context.load_verify_locations(trusted.worker.ca)

    def for_dial(self, _now: datetime) -> ssl.SSLContext:
        return self._context


async def test_a_wrong_ca_a_wrong_name_and_a_foreign_worker_are_told_apart(
    issued: Issued, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = issue(tmp_path / "foreign", names="ingress-a")
    async with controlled(Gateway(GatewayConfig()), issued) as control:
        async with dialled(control.port, foreign.worker):
            assert "its certificate is of another CA than the one given here" in await said(caplog)
        caplog.clear()
        async with dialled(control.port, issued.worker, server_hostname="ingress-a"):
            assert "its certificate is for another name" in await said(caplog)
        caplog.clear()
        async with dialled(control.port, issued.worker, tls=_Stranger(foreign, issued)):
            assert "does not accept this worker's certificate" in await said(caplog)


async def test_an_own_certificate_that_expires_while_the_worker_runs_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = issue(tmp_path, now=TODAY - timedelta(days=90)).worker
    tls = LiveContext(worker_context, files, TODAY - timedelta(days=60))
    async with dialled(1, files, tls=tls):
        assert f"{files.cert}: expired on " in await said(caplog)


async def test_a_machine_that_accepts_and_says_nothing_gives_no_answer_in_time(
    issued: Issued, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm_worker.remote.DIAL_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        async with dialled(mute.getsockname()[1], issued.worker, host="127.0.0.1"):
            assert "unreachable: no answer in time" in await said(caplog)


async def test_the_address_is_dialled_and_the_name_verified(tmp_path: Path) -> None:
    issued = issue(tmp_path, names="ingress-a")
    gateway = Gateway(GatewayConfig())
    async with (
        controlled(gateway, issued) as control,
        dialled(control.port, issued.worker, host="127.0.0.1", server_hostname="ingress-a") as (ring, worker),
    ):
        await until(lambda: n_heard(worker, "attached") == 1)
        assert str(ring) == f"https://127.0.0.1:{control.port} (ingress-a)"


@pytest.mark.parametrize("reason", ["version", "allow_list", "duplicate"])
async def test_a_refusal_is_one_line_that_says_for_what_and_is_retried_slowly(
    issued: Issued, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    gateway = Gateway(GatewayConfig())
    allow = frozenset({"gpu-7"}) if reason == "allow_list" else None
    hello = replace(HELLO, protocol=2) if reason == "version" else replace(HELLO, instance_id="j")
    async with (
        controlled(gateway, issued, allow=allow) as control,
        raw_worker(control, issued.worker) as first,
    ):
        if reason == "duplicate":
            await first.present(HELLO)
        async with dialled(control.port, issued.worker, hello) as (_, worker):
            assert f"it refuses this worker for {reason}: " in await said(caplog)
            await asyncio.sleep(0.3)
            assert worker.heard == []
    assert len(warnings_of(caplog)) == 1


async def test_of_two_instances_that_take_over_the_later_one_stays(
    issued: Issued, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = Gateway(GatewayConfig())
    one, other = (replace(HELLO, instance_id=name, takeover=True) for name in "ab")
    async with (
        controlled(gateway, issued) as control,
        dialled(control.port, issued.worker, one) as (_, first),
    ):
        await until(lambda: n_heard(first, "attached") == 1)
        async with dialled(control.port, issued.worker, other) as (_, second):
            await until(lambda: "it refuses this worker for duplicate" in caplog.text)
            assert (n_heard(first, "attached"), n_heard(second, "attached")) == (1, 1)
            assert [worker.instance_id for worker in gateway.snapshot().workers] == ["b"]


async def test_a_refused_duplicate_attaches_once_the_first_is_gone(issued: Issued) -> None:
    gateway = Gateway(GatewayConfig(heartbeat_timeout_s=0.3, heartbeat_interval_s=0.1))
    async with controlled(gateway, issued) as control, raw_worker(control, issued.worker) as first:
        await first.present(HELLO)
        hello = replace(HELLO, instance_id="j")
        async with dialled(control.port, issued.worker, hello) as (_, worker):
            await until(lambda: n_heard(worker, "attached") == 1)


# An ingress that misbehaves.


@asynccontextmanager
async def scripted_ingress(
    issued: Issued, script: Callable[[web.WebSocketResponse], Awaitable[None]]
) -> AsyncIterator[int]:
    """A listener with an ingress's certificate that does what a test likes; yields its port."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        ws = web.WebSocketResponse(autoping=False, timeout=0.1)
        await ws.prepare(request)
        await script(ws)
        await ws.close()
        return ws

    tls = control_context(issued.ingress, datetime.now(UTC))
    http = web.Server(handle, access_log=None)
    listener = await asyncio.get_running_loop().create_server(http, "127.0.0.1", 0, ssl=tls)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        await http.shutdown(0.05)


def saying(*messages: Message, then: bytes = b"", for_s: float = 10.0) -> Callable[..., Awaitable[None]]:
    """A script: these messages, these bytes, then silence."""

    async def script(ws: web.WebSocketResponse) -> None:
        await ws.send_bytes(b"".join(map(pack, messages)) + then)
        await asyncio.sleep(for_s)

    return script


WELCOME = Welcome(ingress_id="i", heartbeat_timeout_s=5.0)
CANCEL = OfLane(LaneRef(1, 1), LaneSignal.CANCEL)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (saying(WELCOME, then=b"\x20" * 18), "it sends what is not the ring protocol: no such frame"),
        (saying(CANCEL), "its first word is not a WELCOME"),
        (saying(WELCOME, WELCOME), "it sent a second WELCOME"),
        (saying(replace(WELCOME, heartbeat_timeout_s=0.2)), "nothing heard from it for 0.2 s"),
        (saying(WELCOME, for_s=0.0), "the connection was closed"),
    ],
    ids=["garbage", "early", "twice", "silent", "closes"],
)
async def test_an_ingress_that_misbehaves_is_let_go_of_with_a_reason(
    issued: Issued,
    caplog: pytest.LogCaptureFixture,
    script: Callable[[web.WebSocketResponse], Awaitable[None]],
    reason: str,
) -> None:
    async with scripted_ingress(issued, script) as port, dialled(port, issued.worker) as (_, worker):
        assert reason in await said(caplog)
        await until(lambda: n_heard(worker, "detached") == n_heard(worker, "attached"))


async def test_the_silence_of_an_idle_ingress_counts_from_its_welcome(
    issued: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "llm_worker.connection.WELCOME_S", 1.0
    )  # whose rhythm is slower than the timeout below
    gateway = Gateway(GatewayConfig(heartbeat_interval_s=0.1, heartbeat_timeout_s=0.2))
    async with controlled(gateway, issued) as control, dialled(control.port, issued.worker) as (ring, worker):
        await until(lambda: n_heard(worker, "attached") == 1)
        for _ in range(20):
            ring.heartbeat(HEARTBEAT)
            await asyncio.sleep(0.05)  # time itself is the subject
        assert n_heard(worker, "detached") == 0


async def test_an_ingress_that_never_welcomes_is_let_go_of(
    issued: Issued, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm_worker.connection.WELCOME_S", 0.2)
    async with scripted_ingress(issued, saying()) as port, dialled(port, issued.worker):
        assert "no WELCOME within 0.2 s" in await said(caplog)


async def test_an_ingress_that_takes_nothing_does_not_fill_the_workers_memory(
    issued: Issued, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm_worker.connection.MAX_UNSENT_BYTES", 1000)
    gateway = Gateway(GatewayConfig())
    async with controlled(gateway, issued) as control, dialled(control.port, issued.worker) as (ring, worker):
        await until(lambda: n_heard(worker, "attached") == 1)
        worker.is_inside = True
        ring.body(LaneRef(1, 1), b"x" * 2000, b"")
        worker.is_inside = False
        assert n_heard(worker, "detached") == 0
        await until(lambda: n_heard(worker, "detached") == 1)
        assert "it takes nothing: " in await said(caplog)


async def test_what_is_no_ring_is_told_by_its_status(
    issued: Issued, caplog: pytest.LogCaptureFixture
) -> None:
    async def not_found(_request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=404)

    http = web.Server(not_found, access_log=None)
    tls = control_context(issued.ingress, datetime.now(UTC))
    listener = await asyncio.get_running_loop().create_server(http, "127.0.0.1", 0, ssl=tls)
    async with dialled(listener.sockets[0].getsockname()[1], issued.worker):
        assert "it is no ingress's listener for workers: HTTP status 404" in await said(caplog)
    listener.close()
    await http.shutdown(0.05)


async def test_a_drain_is_heard(issued: Issued) -> None:
    gateway = Gateway(GatewayConfig())
    async with controlled(gateway, issued) as control, dialled(control.port, issued.worker) as (_, worker):
        await until(lambda: n_heard(worker, "attached") == 1)
        control.drain()
        await until(lambda: n_heard(worker, "drain") == 1)


async def test_leaving_while_dialling_ends_at_once(issued: Issued) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts, and never says a word
        async with dialled(mute.getsockname()[1], issued.worker, host="127.0.0.1") as (_, worker):
            await asyncio.sleep(0.05)
        assert worker.heard == []
