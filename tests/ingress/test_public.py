"""The HTTP surface over a real hypercorn on loopback and the real gateway; only the worker is scripted."""

import asyncio
import gc
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from llm_ingress.gateway import AtCap, Budgets, Gateway, GatewayConfig, Lane
from llm_ingress.public import PublicConfig
from llm_ingress.records import RecordKind, pack_record
from llm_ingress.tenants import Tenancy, TenantBy, parse_proxies
from llm_ingress.wire import FinishReason, Grant, Head
from tests.ingress.scripted import (
    CHAT,
    JSON_HEAD,
    STREAM_HEAD,
    ScriptedWorker,
    Server,
    chat,
    event,
    raw_post,
    serving,
)

DONE = b"data: [DONE]\n\n"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as server:
        yield server


@pytest.fixture
def worker(server: Server) -> ScriptedWorker:
    return ScriptedWorker(server.gateway)


@pytest.fixture
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
        yield client


@asynccontextmanager
async def ring(
    *, public: PublicConfig | None = None, n_places: int = 4, **bounds: Any
) -> AsyncIterator[tuple[Server, ScriptedWorker, httpx.AsyncClient]]:
    """A server with other bounds than the usual."""
    gateway = Gateway(GatewayConfig(**bounds))
    async with serving(gateway, public=public) as server:
        worker = ScriptedWorker(gateway, n_places=n_places)
        async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
            yield server, worker, client


def post(client: httpx.AsyncClient, **fields: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post(CHAT, json=chat(**fields)))


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert isinstance(error, dict)
    return error


# --- answers --------------------------------------------------------------------------------------------


async def test_a_stream_is_relayed_byte_for_byte(
    server: Server, worker: ScriptedWorker, client: httpx.AsyncClient
) -> None:
    answer = post(client, stream=True)
    worker.answer(await worker.granted(), "a", "b")
    response = await answer
    assert response.status_code == 200
    assert response.content == event("a") + event("b") + DONE
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-lane-id"] == "1"
    assert "content-length" not in response.headers
    assert await server.counts() == (1, 1, 0, 0)


async def test_each_event_is_sent_when_it_comes(worker: ScriptedWorker, client: httpx.AsyncClient) -> None:
    async def follow() -> None:
        grant = await worker.granted()
        worker.begin(grant)
        worker.say(grant, event("a"))
        await heard_a.wait()
        worker.say(grant, event("b") + DONE)
        worker.end(grant)

    heard_a = asyncio.Event()
    script = asyncio.create_task(follow())
    heard = b""
    async with client.stream("POST", CHAT, json=chat(stream=True)) as response:
        async for data in response.aiter_raw():
            heard += data
            if event("a") in heard:
                heard_a.set()
    await script
    assert heard == event("a") + event("b") + DONE


async def test_an_answer_in_one_piece_has_its_length(
    server: Server, worker: ScriptedWorker, client: httpx.AsyncClient
) -> None:
    answer = post(client)
    grant = await worker.granted()
    assert json.loads(grant.body) == chat()
    worker.begin(grant, JSON_HEAD)
    worker.say(grant, b'{"id":')
    worker.say(grant, b'"x"}')
    worker.end(grant)
    response = await answer
    assert response.json() == {"id": "x"}
    assert response.headers["content-length"] == "10"
    assert response.headers["content-type"] == "application/json"
    assert await server.counts() == (1, 1, 0, 0)


async def test_a_refusal_by_the_worker_keeps_its_status(
    server: Server, worker: ScriptedWorker, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="llm_ingress")
    answer = post(client, stream=True)
    grant = await worker.granted()
    worker.begin(grant, Head(status=400, headers=JSON_HEAD.headers))
    worker.say(grant, b'{"error":{}}')
    worker.end(grant, FinishReason.REFUSED)
    response = await answer
    assert (response.status_code, response.content) == (400, b'{"error":{}}')
    assert response.headers["content-length"] == "12"
    assert await server.counts() == (1, 1, 0, 0)
    assert "outcome=refused" in caplog.text


async def test_one_connection_serves_several_requests(server: Server, worker: ScriptedWorker) -> None:
    answers = asyncio.create_task(worker.answer_all())
    limits = httpx.Limits(max_connections=1)
    async with httpx.AsyncClient(base_url=server.url, limits=limits) as client:
        streams = set()
        for _ in range(5):
            async with client.stream("POST", CHAT, json=chat(stream=True)) as response:
                streams.add(response.extensions["network_stream"].get_extra_info("client_addr"))
                await response.aread()
            assert (await client.get("/health")).status_code == 200
    answers.cancel()
    assert len(streams) == 1
    assert await server.counts() == (5, 5, 0, 0)


@pytest.mark.parametrize("own", ["req_1", "0f8fad5b-d9cb-469f-a165-70867728950e", "a/b:c=="])
async def test_a_well_formed_request_id_is_kept(
    worker: ScriptedWorker, client: httpx.AsyncClient, own: str
) -> None:
    answer = asyncio.create_task(client.post(CHAT, json=chat(stream=True), headers={"x-request-id": own}))
    grant = await worker.granted()
    worker.answer(grant)
    assert grant.request_id == own
    assert (await answer).headers["x-request-id"] == own


@pytest.mark.parametrize("own", ["", "a b", "x" * 200, "\xfc", '"'])
async def test_an_odd_request_id_is_replaced(client: httpx.AsyncClient, own: str) -> None:
    response = await client.get("/health", headers=[(b"x-request-id", own.encode("latin-1"))])
    assert len(response.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health"),
        ("GET", "/nope"),
        ("PUT", "/health"),
        ("OPTIONS", CHAT),
        ("GET", CHAT),
        ("POST", CHAT),
    ],
)
async def test_every_answer_has_a_request_id(client: httpx.AsyncClient, method: str, path: str) -> None:
    first = await client.request(method, path)
    second = await client.request(method, path)
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


# --- refusals before a lane -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", "hot", "temperature"),
        ("top_p", 2, "top_p"),
        ("messages", [], "messages"),
        ("messages", [{"role": "robot", "content": ""}], "messages[0].role"),
        ("max_tokens", 0, "max_tokens"),
        ("n", 2, "n"),
        ("model", None, "model"),
    ],
)
async def test_a_malformed_request_is_a_400_and_takes_no_lane(
    server: Server,
    worker: ScriptedWorker,
    client: httpx.AsyncClient,
    stream: bool,
    field: str,
    value: Any,
    param: str,
) -> None:
    response = await client.post(CHAT, json={**chat(stream=stream), field: value})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert error_of(response)["param"] == param
    assert await server.counts() == (0, 0, 0, 0)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"a":', b"\xff", b'{"x":' + b"[" * 100_000])
async def test_what_is_not_json_is_a_400(
    worker: ScriptedWorker, client: httpx.AsyncClient, body: bytes
) -> None:
    response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["param"] is None


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("text/plain", 400),
        ("application/x-www-form-urlencoded", 400),
        ("multipart/form-data; boundary=x", 400),
        ("application/json; charset=utf-8", 404),
        ('application/json;Charset="UTF-8"', 404),
        ("application/json; version=1; charset=us-ascii", 404),
        ("APPLICATION/JSON", 404),
        ("application/vnd.api+json", 404),
        ("application/json; charset=utf-16", 415),
        ('application/json; a=b;CHARSET = "latin-1"', 415),
    ],
)
async def test_a_body_must_say_it_is_json_in_utf_8(
    worker: ScriptedWorker, client: httpx.AsyncClient, content_type: str, status: int
) -> None:
    body = json.dumps({**chat(), "model": "nope"}).encode()
    response = await client.post(CHAT, content=body, headers={"content-type": content_type})
    assert response.status_code == status


async def test_a_charset_that_is_not_read_is_named(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json; charset=utf-16"}
    response = await client.post(CHAT, content=json.dumps(chat()).encode("utf-16"), headers=headers)
    assert response.status_code == 415
    assert error_of(response)["type"] == "invalid_request_error"
    assert error_of(response)["code"] == "unsupported_media_type"
    assert "'utf-16'" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("codings", "status"),
    [
        (["identity"], 404),
        (["IDENTITY"], 404),
        ([""], 404),
        (["gzip"], 415),
        (["identity, br"], 415),
        (["identity", "zstd"], 415),
    ],
)
async def test_a_compressed_body_is_a_415(
    worker: ScriptedWorker, client: httpx.AsyncClient, codings: list[str], status: int
) -> None:
    headers = [("content-type", "application/json"), *(("content-encoding", coding) for coding in codings)]
    body = json.dumps({**chat(), "model": "nope"}).encode()
    response = await client.post(CHAT, content=body, headers=headers)
    assert response.status_code == status
    if status == 415:
        assert error_of(response)["code"] == "unsupported_media_type"
        assert response.headers["accept-encoding"] == "identity"


async def test_a_model_nobody_serves_is_a_404(worker: ScriptedWorker, client: httpx.AsyncClient) -> None:
    response = await post(client, model="nope")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"
    assert error_of(response)["param"] == "model"


async def test_before_any_worker_came_a_request_is_a_503(client: httpx.AsyncClient) -> None:
    response = await post(client)
    assert response.status_code == 503
    assert error_of(response)["reason"] == "no_workers"
    assert 1 <= int(response.headers["retry-after"]) <= 30


async def test_requests_beyond_the_ring_are_refused_and_nothing_else_is() -> None:
    async with ring(ring_streams=3, n_places=1) as (server, worker, client):
        for _ in range(10):
            answers = [post(client, stream=True) for _ in range(6)]
            done, held = await asyncio.wait(answers, timeout=5, return_when=asyncio.FIRST_COMPLETED)
            while len(done) < 3:
                more, held = await asyncio.wait(held, timeout=5, return_when=asyncio.FIRST_COMPLETED)
                assert more
                done |= more
            assert [answer.result().status_code for answer in done] == [503] * 3
            refused = done.pop().result()
            assert error_of(refused)["reason"] == "ring_full"
            assert error_of(refused)["type"] == "service_unavailable_error"
            assert error_of(refused)["code"] == "server_is_overloaded"
            assert 1 <= int(refused.headers["retry-after"]) <= 30
            for path in ("/health", "/ready", "/v1/models"):
                assert (await client.get(path)).status_code == 200
            assert (await client.options(CHAT)).status_code == 204
            for _ in held:
                worker.answer(await worker.granted(), "x")
                worker.offer(1)
            assert {answer.result().status_code for answer in (await asyncio.wait(held))[0]} == {200}
        assert await server.counts() == (30, 30, 0, 0)


async def test_a_request_that_gives_way_to_a_tenant_with_fewer_is_refused_as_if_it_came_now() -> None:
    public = PublicConfig(tenancy=Tenancy(by=TenantBy.USER))
    async with ring(public=public, ring_streams=2, n_places=1) as (server, worker, client):
        running = post(client, user="heavy", stream=True)
        grant = await worker.granted()
        parked = post(client, user="heavy", stream=True)
        while (await client.get("/health")).json()["open"] != 2:
            pass
        other = post(client, user="light", stream=True)
        refused = await parked
        assert (refused.status_code, error_of(refused)["reason"]) == (503, "ring_full")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        worker.answer(grant, "x")
        worker.offer(1)
        worker.answer(await worker.granted(), "x")
        assert [(await answer).status_code for answer in (running, other)] == [200, 200]
        assert await server.counts() == (3, 2, 0, 1)


async def test_a_fault_of_ours_is_a_500_that_tells_nothing(
    server: Server, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(server.gateway, "open_lane", broken)
    monkeypatch.setattr(server.gateway, "snapshot", broken)
    for response in (await post(client), await client.get("/health")):
        assert response.status_code == 500
        assert error_of(response)["type"] == "server_error"
        assert "secret" not in response.text
        assert "x-request-id" in response.headers
    monkeypatch.undo()


# --- failures of a lane ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_failure_before_the_first_byte_is_a_500(
    server: Server, worker: ScriptedWorker, client: httpx.AsyncClient, stream: bool, begun: bool
) -> None:
    answer = post(client, stream=stream)
    grant = await worker.granted()
    if begun:
        worker.begin(grant, STREAM_HEAD if stream else JSON_HEAD)
    worker.fail(grant)
    response = await answer
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    assert response.headers["x-lane-id"] == "1"
    assert "secret" not in response.text
    assert await server.counts() == (1, 0, 0, 1)


async def test_an_answer_in_one_piece_that_fails_midway_is_a_500(
    worker: ScriptedWorker, client: httpx.AsyncClient
) -> None:
    answer = post(client)
    grant = await worker.granted()
    worker.begin(grant, JSON_HEAD)
    worker.say(grant, b'{"id":')
    worker.fail(grant)
    assert (await answer).status_code == 500


async def test_a_stream_that_fails_ends_with_an_error_event_and_no_done(
    server: Server, worker: ScriptedWorker
) -> None:
    reader, writer = await raw_post(server, json.dumps(chat(stream=True)).encode())
    grant = await worker.granted()
    worker.begin(grant)
    worker.say(grant, event("a"))
    await reader.readuntil(event("a"))
    worker.fail(grant)
    rest = await reader.readuntil(b"\r\n0\r\n\r\n")
    _, _, data = rest.partition(b"data: ")
    error = json.loads(data.partition(b"\n\n")[0])["error"]
    assert error["type"] == "server_error"
    assert b"[DONE]" not in rest
    assert b"secret" not in rest
    writer.close()


async def test_a_worker_lost_before_the_first_byte_is_a_502(
    server: Server, worker: ScriptedWorker, client: httpx.AsyncClient
) -> None:
    answer = post(client)
    for _ in range(3):
        worker.fail(await worker.granted(), retryable=True)
        worker.offer(4)
    response = await answer
    assert response.status_code == 502
    assert error_of(response)["code"] == "worker_unavailable"
    # The clients would send it again by themselves, to as many workers more.
    assert response.headers["x-should-retry"] == "false"
    assert await server.counts() == (1, 0, 0, 1)


async def test_a_request_nobody_takes_in_time_is_a_503() -> None:
    async with ring(queue_timeout_s=0.05, n_places=0) as (server, _, client):
        for stream in (False, True):
            response = await post(client, stream=stream)
            assert response.status_code == 503
            assert error_of(response)["reason"] == "queue_timeout"
            assert 1 <= int(response.headers["retry-after"]) <= 30
        assert await server.counts() == (2, 0, 0, 2)


async def test_a_request_whose_workers_are_all_gone_is_a_503() -> None:
    async with ring(no_worker_timeout_s=0.05) as (server, worker, client):
        server.gateway.workers.detach(worker.id, "test")
        response = await post(client)
        assert response.status_code == 503
        assert error_of(response)["reason"] == "no_workers"


async def test_a_request_past_its_deadline_is_a_504_and_its_worker_stops() -> None:
    async with ring(request_timeout_s=0.05) as (_, worker, client):
        response = await post(client)
        assert response.status_code == 504
        assert error_of(response)["code"] == "timeout"
        assert response.headers["x-should-retry"] == "false"
        assert await worker.cancelled() == (await worker.granted()).ref


async def test_a_stream_past_its_deadline_ends_with_an_error_event() -> None:
    async with ring(request_timeout_s=0.05) as (_, worker, client):
        answer = post(client, stream=True)
        grant = await worker.granted()
        worker.begin(grant)
        worker.say(grant, event("a"))
        response = await answer
        assert response.status_code == 200
        assert response.content.startswith(event("a"))
        assert json.loads(response.content.removeprefix(event("a") + b"data: "))["error"]["code"] == "timeout"


# --- clients that leave ---------------------------------------------------------------------------------


def leave(writer: asyncio.StreamWriter, *, rudely: bool) -> None:
    """Close a connection; rudely, with a reset."""
    if rudely:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
    else:
        writer.close()


@pytest.mark.parametrize("rudely", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["before the head", "after the head", "in the middle"])
async def test_a_client_that_leaves_ends_its_work(
    server: Server, worker: ScriptedWorker, when: str, stream: bool, rudely: bool
) -> None:
    reader, writer = await raw_post(server, json.dumps(chat(stream=stream)).encode())
    grant = await worker.granted()
    if when != "before the head":
        worker.begin(grant, STREAM_HEAD if stream else JSON_HEAD)
    if when == "in the middle":
        worker.say(grant, event("a"))
        if stream:
            await reader.readuntil(event("a"))
    leave(writer, rudely=rudely)
    assert await worker.cancelled() == grant.ref
    assert await server.counts() == (1, 0, 1, 0)


@pytest.mark.parametrize(
    ("tenancy", "light"),
    [
        (Tenancy(by=TenantBy.USER), {"user": "light"}),
        (Tenancy(trusted=parse_proxies(["127.0.0.1"])), {"forwarded": "1.2.3.4"}),
    ],
)
async def test_tenants_take_turns_whatever_tells_them_apart(tenancy: Tenancy, light: dict[str, str]) -> None:
    async with ring(public=PublicConfig(tenancy=tenancy), n_places=1) as (server, worker, client):
        answers = [post(client)]
        first = await worker.granted()
        for n_open in (2, 3):  # parked by the same tenant
            answers.append(post(client))
            await server.has_open(n_open)
        headers = {"x-forwarded-for": light["forwarded"]} if "forwarded" in light else {}
        body = chat(user=light.get("user"))
        answers.append(asyncio.create_task(client.post(CHAT, json=body, headers=headers)))
        await server.has_open(4)
        order = [first.ref.lane_id]
        worker.answer(first, "x")
        for _ in range(3):
            worker.offer(1)
            grant = await worker.granted()
            order.append(grant.ref.lane_id)
            worker.answer(grant, "x")
        assert order == [1, 2, 4, 3]
        assert [(await answer).status_code for answer in answers] == [200] * 4


async def test_a_client_that_leaves_the_queue_is_never_granted() -> None:
    async with ring(n_places=1) as (server, worker, _):
        body = json.dumps(chat(stream=True)).encode()
        reader, writer = await raw_post(server, body)
        running = await worker.granted()
        worker.begin(running)
        worker.say(running, event("a"))
        await reader.readuntil(event("a"))
        parked = [(await raw_post(server, body))[1] for _ in range(3)]
        await server.has_open(4)
        for parked_writer in (parked[1], parked[0]):
            leave(parked_writer, rudely=False)
        await server.has_open(2)
        worker.say(running, DONE)
        worker.end(running)
        await reader.readuntil(b"\r\n0\r\n\r\n")
        worker.offer(1)
        last = await worker.granted()
        assert last.ref.lane_id == 4
        worker.answer(last, "x")
        assert await server.counts() == (4, 2, 2, 0)
        for open_writer in (writer, parked[2]):
            open_writer.close()


async def test_a_client_that_leaves_at_the_very_end_is_counted_once(
    server: Server, worker: ScriptedWorker
) -> None:
    body = json.dumps(chat(stream=True)).encode()
    for _ in range(50):
        reader, writer = await raw_post(server, body)
        grant = await worker.granted()
        worker.begin(grant)
        worker.say(grant, event("a"))
        await reader.readuntil(event("a"))
        leave(writer, rudely=True)
        worker.say(grant, DONE)
        worker.end(grant)
        worker.offer(4)
    accepted, finished, cancelled, failed = await server.counts()
    assert (accepted, finished + cancelled, failed) == (50, 50, 0)


@pytest.mark.parametrize("version", ["--http1.1", "--http2-prior-knowledge"])
async def test_curl_that_is_stopped_ends_its_work(
    server: Server, worker: ScriptedWorker, version: str
) -> None:
    curl = await asyncio.create_subprocess_exec(
        *("curl", "-sN", version, "--json", json.dumps(chat(stream=True)), server.url + CHAT),
        stdout=asyncio.subprocess.PIPE,
    )
    assert curl.stdout is not None
    grant = await worker.granted()
    worker.begin(grant)
    worker.say(grant, event("a"))
    await curl.stdout.readuntil(event("a"))
    curl.kill()
    assert await worker.cancelled() == grant.ref
    await curl.communicate()
    assert await server.counts() == (1, 0, 1, 0)


# --- bodies ---------------------------------------------------------------------------------------------


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], dict[str, Any]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return (
        int(head[0].split()[1]),
        headers,
        json.loads(await reader.readexactly(int(headers["content-length"]))),
    )


async def test_a_body_that_declares_too_much_is_a_413_at_once() -> None:
    async with ring(public=PublicConfig(max_request_bytes=1000)) as (server, _, _):
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n".encode())
        status, headers, body = await read_answer(reader)
        assert (status, body["error"]["code"]) == (413, "request_too_large")
        assert headers["connection"] == "close"
        writer.close()
        assert await server.counts() == (0, 0, 0, 0)


async def test_an_endless_chunked_body_is_a_413() -> None:
    async with ring(public=PublicConfig(max_request_bytes=1_000_000)) as (server, _, _):
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())

        async def pour() -> None:
            while True:
                writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
                await writer.drain()

        pouring = asyncio.create_task(pour())
        status, headers, body = await read_answer(reader)
        assert (status, body["error"]["code"]) == (413, "request_too_large")
        assert headers["connection"] == "close"
        pouring.cancel()
        writer.close()


async def test_a_large_body_within_the_limit_passes(
    worker: ScriptedWorker, client: httpx.AsyncClient
) -> None:
    text = "x" * 10_000_000
    answer = post(client, content=text, stream=True)
    grant = await worker.granted()
    assert json.loads(grant.body)["messages"][0]["content"] == text
    worker.answer(grant)
    assert (await answer).status_code == 200


async def test_a_slow_body_is_a_408_and_holds_no_lane() -> None:
    async with ring(public=PublicConfig(body_timeout_s=0.05)) as (server, _, client):
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(f'POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{"mo'.encode())
        status, headers, body = await read_answer(reader)
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert headers["connection"] == "close"
        assert (await client.get("/health")).json()["accepted"] == 0
        writer.close()


async def test_bodies_being_read_are_bounded_together() -> None:
    bounds = PublicConfig(max_request_bytes=1000, max_reading_bytes=1500)
    async with ring(public=bounds) as (server, worker, client):
        _, slow = await asyncio.open_connection(server.host, server.port)
        slow.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n".encode())
        while (await client.get("/health")).json()["reading_bytes"] != 1000:
            pass
        refused = await post(client, content="x" * 600)
        assert error_of(refused)["reason"] == "ring_full"
        assert "retry-after" in refused.headers
        small = post(client, stream=True)
        worker.answer(await worker.granted(), "x")
        assert (await small).status_code == 200
        slow.close()


async def test_a_client_that_leaves_while_it_sends_gives_its_room_back() -> None:
    bounds = PublicConfig(max_request_bytes=1000, max_reading_bytes=1000)
    async with ring(public=bounds) as (server, worker, client):
        for _ in range(5):
            _, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n".encode())
            while (await client.get("/health")).json()["reading_bytes"] != 900:
                pass
            leave(writer, rudely=False)
            await server.counts()
        answer = post(client, content="x" * 800, stream=True)
        worker.answer(await worker.granted(), "x")
        assert (await answer).status_code == 200


@pytest.mark.parametrize("version", ["--http1.1", "--http2-prior-knowledge"])
async def test_curl_reads_the_refusal_of_its_upload(version: str) -> None:
    async with ring(public=PublicConfig(max_request_bytes=1000)) as (server, _, _):
        curl = await asyncio.create_subprocess_exec(
            *("curl", "-s", version, "-H", "content-type: application/json", "--data-binary", "@-"),
            *("-o", "/dev/null", "-w", "%{http_code}", server.url + CHAT),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await curl.communicate(b" " * 17_000_000)
        assert out == b"413"


async def test_an_answered_request_needs_no_garbage_collector(
    server: Server, worker: ScriptedWorker, client: httpx.AsyncClient
) -> None:
    gc.collect()
    gc.disable()
    others = lanes_alive()  # which earlier tests still hold
    try:
        for _ in range(3):
            answer = post(client, stream=True)
            worker.answer(await worker.granted(), "x")
            await answer
        await server.counts()
        await client.get("/health")
        assert lanes_alive() == others
    finally:
        gc.enable()


def lanes_alive() -> set[int]:
    return {id(each) for each in gc.get_objects() if isinstance(each, Lane)}


# --- slow readers ---------------------------------------------------------------------------------------


async def flood(worker: ScriptedWorker, grant: Any) -> int:
    """Say as much as the gateway lets a worker say; returns how many bytes that was."""
    n_bytes = 0
    piece = event("x" * 8000)
    while not worker.pause_heard.is_set():
        worker.say(grant, piece)
        n_bytes += len(piece)
        await asyncio.sleep(0)
    return n_bytes


def slow_socket(server: Server) -> socket.socket:
    """A connection that holds little for a client that does not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    return connection


async def test_a_slow_reader_is_paused_then_dropped_and_holds_little() -> None:
    async with ring(response_buffer_bytes=64 * 1024, stall_timeout_s=0.3) as (server, worker, client):
        connection = slow_socket(server)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, (server.host, server.port))
        body = json.dumps(chat(stream=True)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(connection, head.encode() + body)
        grant = await worker.granted()
        worker.begin(grant)
        async with asyncio.timeout(10):
            n_bytes = await flood(worker, grant)
        assert n_bytes < 1_000_000
        assert worker.paused == [grant.ref]

        other = post(client, stream=True)
        worker.answer(await worker.granted(), "x")
        assert (await other).status_code == 200

        assert await worker.cancelled() == grant.ref
        assert await server.counts() == (2, 1, 1, 0)
        connection.close()


async def test_a_paused_stream_goes_on_when_its_client_reads_again() -> None:
    async with ring(response_buffer_bytes=64 * 1024, stall_timeout_s=30) as (server, worker, _):
        reader, writer = await raw_post(server, json.dumps(chat(stream=True)).encode())
        grant = await worker.granted()
        worker.begin(grant)
        n_said = await flood(worker, grant)  # asyncio's reader takes so much, then the socket fills up
        worker.say(grant, DONE)
        worker.end(grant)
        answer = await reader.readuntil(b"\r\n0\r\n\r\n") if n_said < 2**16 else await _read_all(reader)
        assert answer.endswith(DONE + b"\r\n0\r\n\r\n")
        assert worker.resumed == [] or worker.resumed == [grant.ref]
        writer.close()
        assert await server.counts() == (1, 1, 0, 0)


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    heard = b""
    while not heard.endswith(b"\r\n0\r\n\r\n"):
        heard += await reader.read(2**16)
    return heard


# --- what takes no lane ---------------------------------------------------------------------------------


async def test_models_lists_exactly_what_is_accepted(
    worker: ScriptedWorker, client: httpx.AsyncClient
) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [entry["id"] for entry in listed["data"]] == ["m", "alias"]
    for entry in listed["data"]:
        assert entry.keys() == {"id", "object", "created", "owned_by"}
        assert entry["object"] == "model"
        answer = post(client, model=entry["id"], stream=True)
        worker.answer(await worker.granted(), "x")
        assert (await answer).status_code == 200


async def test_health_tells_capacity_lanes_counts_and_model(
    worker: ScriptedWorker, client: httpx.AsyncClient
) -> None:
    assert (await client.get("/health")).json()["available_slots"] == 4
    answer = post(client, stream=True)
    grant = await worker.granted()
    worker.beat(inflight=1, max_inflight=4)
    health = (await client.get("/health")).json()
    assert health["status"] == "ok"
    assert (health["inflight"], health["decoding"], health["max_inflight"], health["available_slots"]) == (
        1,
        1,
        4,
        3,
    )
    assert health["lanes"]["claimed"] == 1
    assert health["accepted"] == 1
    assert health["ring_streams"] == 64
    assert health["draining"] is False
    assert health["model"]["name"] == "m"
    assert health["model"]["file"] == "m.gguf"
    assert (health["model"]["n_params"], health["model"]["n_ctx"]) == (1000, 4096)
    assert health["workers"][0]["name"] == "w"
    worker.answer(grant, "x")
    await answer
    health = (await client.get("/health")).json()
    assert (health["finished"], health["cancelled"], health["failed"], health["open"]) == (1, 0, 0, 0)


async def test_health_tells_what_is_taken_of_the_budgets_and_who_went_back_to_whom(
    worker: ScriptedWorker, client: httpx.AsyncClient
) -> None:
    for n in range(2):
        answer = post(client, stream=True, conversation_id="c")
        grant = await worker.granted()
        budgets = (await client.get("/health")).json()["budgets"]
        assert (budgets["in_flight_decodes"], budgets["sessions"], budgets["max_sessions"]) == (1, 1, 1000)
        worker.offer(1)
        worker.answer(grant, "x")
        assert (await answer).status_code == 200
        affinity = (await client.get("/health")).json()["affinity"]
        assert affinity == {"entries": 1, "known": n, "had_room": n, "returned_at_once": n, "returned": n}


async def test_over_a_budget_a_request_waits_unless_the_operator_says_otherwise() -> None:
    for at_cap in AtCap:
        config = GatewayConfig(budgets=Budgets(max_in_flight_decodes=1), at_cap=at_cap)
        async with serving(Gateway(config)) as server, httpx.AsyncClient(base_url=server.url) as client:
            worker = ScriptedWorker(server.gateway)
            first = post(client)
            grant = await worker.granted()
            second = post(client)
            if at_cap is AtCap.PARK:
                await server.has_open(2)
                worker.answer(grant, "x")
                worker.answer(await worker.granted(), "x")
                assert (await second).status_code == 200
            else:
                refused = await second
                worker.answer(grant, "x")
                assert (refused.status_code, error_of(refused)["reason"]) == (
                    503,
                    "system_in_flight_decode_full",
                )
                assert 1 <= int(refused.headers["retry-after"]) <= 30
            assert (await first).status_code == 200


async def test_health_is_200_without_a_worker_and_ready_is_not(
    server: Server, client: httpx.AsyncClient
) -> None:
    health = await client.get("/health")
    assert (health.status_code, health.json()["status"], health.json()["model"]) == (200, "no_workers", None)
    ready = await client.get("/ready")
    assert (ready.status_code, error_of(ready)["reason"]) == (503, "no_workers")
    worker = ScriptedWorker(server.gateway, n_places=0)
    assert (await client.get("/ready")).status_code == 200  # busy is ready
    server.gateway.workers.draining(worker.id)
    assert (await client.get("/ready")).status_code == 503


async def test_an_unknown_path_is_a_404_in_json(client: httpx.AsyncClient) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        response = await client.request(method, "/nope", content=b"x" * 1000 if method == "POST" else b"")
        assert response.status_code == 404
        assert error_of(response)["type"] == "invalid_request_error"
    assert (await client.get("/health/")).status_code == 404


@pytest.mark.parametrize(("method", "path"), [("GET", CHAT), ("DELETE", CHAT), ("POST", "/health")])
async def test_a_wrong_method_is_a_405_in_json(client: httpx.AsyncClient, method: str, path: str) -> None:
    response = await client.request(method, path)
    assert response.status_code == 405
    assert error_of(response)["type"] == "invalid_request_error"
    assert "OPTIONS" in response.headers["allow"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", CHAT])
async def test_options_needs_nothing(client: httpx.AsyncClient, path: str) -> None:
    response = await client.options(path)
    assert (response.status_code, response.content) == (204, b"")
    assert ("POST" if path == CHAT else "GET") in response.headers["allow"]


async def test_head_is_get_without_a_body(client: httpx.AsyncClient) -> None:
    response = await client.head("/health")
    assert (response.status_code, response.content) == (200, b"")
    assert int(response.headers["content-length"]) > 0


async def test_a_body_where_none_belongs_does_no_harm(server: Server, client: httpx.AsyncClient) -> None:
    for path in ("/health", "/nope", CHAT):
        response = await client.request("PUT", path, content=b"x" * 3_000_000)
        assert response.status_code in (404, 405)
    assert (await client.get("/health")).status_code == 200


async def test_a_websocket_is_refused(server: Server) -> None:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(
        f"GET {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.split()[1] == b"405"
    assert b"\r\nx-request-id: " in head
    assert b"is not allowed" in await reader.readuntil(b"}}")
    writer.close()


# --- the official client --------------------------------------------------------------------------------


@pytest.fixture
async def sdk(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


async def test_the_sdk_streams(worker: ScriptedWorker, sdk: openai.AsyncOpenAI) -> None:
    answers = asyncio.create_task(worker.answer_all())
    assert await _texts(sdk) == ["hello"]
    answers.cancel()


async def test_the_sdk_raises_from_an_error_event(worker: ScriptedWorker, sdk: openai.AsyncOpenAI) -> None:
    async def fail() -> None:
        grant = await worker.granted()
        worker.begin(grant)
        worker.say(grant, event("a"))
        worker.fail(grant)

    script = asyncio.create_task(fail())
    with pytest.raises(openai.APIError, match="error while processing"):
        await _texts(sdk)
    await script


async def test_the_sdk_knows_each_error(worker: ScriptedWorker, sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        await sdk.chat.completions.create(model="nope", messages=[{"role": "user", "content": "hi"}])
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    assert not_found.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], temperature=9
        )
    assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")


async def test_the_sdk_waits_and_succeeds_when_the_ring_was_full(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Gateway, "retry_after_s", lambda self, reason: 1)
    caplog.set_level("INFO", logger="llm_ingress")
    async with ring(ring_streams=1) as (server, worker, client):
        holding = post(client, stream=True)
        grant = await worker.granted()
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=2) as sdk:
            asking = asyncio.create_task(_texts(sdk))
            async with asyncio.timeout(5):
                while "server_is_overloaded" not in caplog.text:  # noqa: ASYNC110 - the log is the event
                    await asyncio.sleep(0)
            worker.answer(grant, "x")
            await holding
            worker.answer(await worker.granted(), "y")
            assert await asking == ["y"]
    assert caplog.text.count("server_is_overloaded") == 1


async def _texts(sdk: openai.AsyncOpenAI) -> list[str | None]:
    stream = await sdk.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    return [chunk.choices[0].delta.content async for chunk in stream]


# --- the log --------------------------------------------------------------------------------------------


async def test_each_request_is_one_line_and_never_its_text(
    server: Server, worker: ScriptedWorker, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="llm_ingress")
    answer = post(client, content="a secret question", stream=True)
    worker.answer(await worker.granted(), "a secret answer")
    await answer
    await post(client, content="a secret question", n=2)
    worker.offer(0)
    server.gateway.drain()
    await post(client, content="a secret question")
    finished, refused, turned_away = [
        record.getMessage() for record in caplog.records if "llm_ingress" in record.name
    ]
    assert "lane 1: model=m n_prompt=3 n_cached=1 n_out=2" in finished
    assert "outcome=finished" in finished
    assert "refused: status=400 code=invalid_value param=n" in refused
    assert "refused: status=503 code=server_is_overloaded param=None reason=draining" in turned_away
    assert "secret" not in caplog.text


def facts(line: str) -> dict[str, str]:
    """What a line of the log says, by name."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


@asynccontextmanager
async def half_said(
    caplog: pytest.LogCaptureFixture, *, stream: bool, **bounds: Any
) -> AsyncIterator[tuple[Server, ScriptedWorker, Grant, asyncio.StreamWriter, float]]:
    """A request with five tokens of prompt that has got two of its answer, and the time since it came."""
    caplog.set_level("INFO", logger="llm_ingress")
    async with ring(**bounds) as (server, worker, _):
        _, writer = await raw_post(server, json.dumps(chat(stream=stream)).encode())
        came_at = asyncio.get_running_loop().time()
        grant = await worker.granted()
        worker.say(grant, b"", pack_record(RecordKind.START, 0, b'{"n_prompt":5}'))
        if stream:
            worker.begin(grant)
        for text in "ab":
            worker.say(grant, event(text) if stream else b"", pack_record(RecordKind.TOKENS, 0, bytes(4)))
        yield server, worker, grant, writer, came_at
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("outcome", ["client_left", "worker_failed", "deadline", "drain_ended"])
async def test_the_line_of_what_did_not_finish_counts_what_was_generated(
    caplog: pytest.LogCaptureFixture, outcome: str, stream: bool
) -> None:
    bounds = {"request_timeout_s": 0.3} if outcome == "deadline" else {}
    async with half_said(caplog, stream=stream, **bounds) as (server, worker, grant, writer, came_at):
        said_ms = 1000 * (asyncio.get_running_loop().time() - came_at)
        await asyncio.sleep(0.1)
        match outcome:
            case "client_left":
                writer.close()
            case "worker_failed":
                worker.fail(grant)
            case "drain_ended":
                server.gateway.fail_open_lanes("the end")
        await server.counts()
    (line,) = [record.getMessage() for record in caplog.records if " lane 1: " in record.getMessage()]
    said = facts(line)
    assert (said["n_prompt"], said["n_out"], said["outcome"]) == ("5", "2", outcome)
    assert "n_cached" not in said
    assert int(said["ttft_ms"]) <= said_ms + 50
    assert int(said["ttft_ms"]) + 100 <= int(said["total_ms"])


async def test_the_line_of_what_was_never_begun_tells_of_no_first_token(
    server: Server, worker: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="llm_ingress")
    _, writer = await raw_post(server, json.dumps(chat()).encode())
    await worker.granted()
    writer.close()
    await server.counts()
    said = facts(caplog.records[-1].getMessage())
    assert (said["n_out"], said["outcome"]) == ("0", "client_left")
    assert said.keys().isdisjoint({"n_prompt", "n_cached", "ttft_ms"})


async def test_an_answer_in_one_piece_had_its_first_token_before_its_first_byte(
    worker: ScriptedWorker, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="llm_ingress")
    answer = post(client)
    grant = await worker.granted()
    worker.say(grant, b"", pack_record(RecordKind.TOKENS, 0, bytes(4)))
    await asyncio.sleep(0.1)
    worker.begin(grant, JSON_HEAD)
    worker.say(grant, b"{}")
    worker.end(grant)
    await answer
    said = facts(caplog.records[-1].getMessage())
    assert int(said["ttft_ms"]) + 100 <= int(said["total_ms"])
