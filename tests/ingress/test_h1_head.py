"""HTTP/1.1 heads that make no request, or one in an unusual form, over a real hypercorn on loopback."""

import asyncio
import json
from typing import Any

import h11
import pytest

from llm_ingress import serving as serving_module
from llm_ingress.h1_head import plain
from llm_ingress.serving import ServingConfig
from tests.ingress.scripted import CHAT, ScriptedWorker, Server, chat, event, raw_post, serving

LIMIT_S = 0.2
PROMPT = ServingConfig(port=0, drain_timeout_s=0, head_timeout_s=LIMIT_S)
STREAM = json.dumps(chat(stream=True)).encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
END = b"\r\n0\r\n\r\n"


async def answer_to(server: Server, head: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and error of the answer to some bytes; the connection is closed after it."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(head)
    async with asyncio.timeout(5):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert int(headers["content-length"]) == len(body)
    return int(status.split()[1]), headers, json.loads(body)["error"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS
        (b"GET /health HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET /health HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", 400),
        (f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n".encode(), 400),
        (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnot a chunk\r\n".encode(),
            400,
        ),
        (f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n".encode(), 501),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nx: " + b"y" * 100_000, 431),
    ],
    ids=["garbage", "TLS", "no host", "bad header", "bad length", "bad chunk", "coding", "too large"],
)
async def test_what_is_not_http_is_refused_like_everything_else(
    caplog: pytest.LogCaptureFixture, head: bytes, status: int
) -> None:
    caplog.set_level("INFO", logger="llm_ingress")
    async with serving() as server:
        heard, headers, error = await answer_to(server, head)
        assert heard == status
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert headers["content-type"] == "application/json"
        assert headers["cache-control"] == "no-cache"
        assert headers["connection"] == "close"
        assert f"request {headers['x-request-id']} refused: status={status}" in caplog.text
        assert await server.counts() == (0, 0, 0, 0)


@pytest.mark.parametrize("begun", [b"G", HEALTH[:-1], b"POST / HTTP/1.1\r\nx: y\r\n"])
async def test_a_head_that_does_not_come_to_its_end_is_a_408(begun: bytes) -> None:
    async with serving(config=PROMPT) as server:
        status, headers, error = await answer_to(server, begun)
        assert (status, error["code"]) == (408, "request_timeout")
        assert error["message"] == "The request's headers did not arrive within 0.2 seconds."
        assert headers["connection"] == "close"


async def test_a_head_that_trickles_in_has_no_more_time() -> None:
    async with serving(config=PROMPT) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)

        async def trickle() -> None:
            for i in range(1000):
                writer.write(b"GET / HTTP/1.1\r\n" if i == 0 else b"x: y\r\n")
                await asyncio.sleep(LIMIT_S / 10)

        trickling = asyncio.create_task(trickle())
        async with asyncio.timeout(5):
            assert (await reader.readline()).split()[1] == b"408"
        trickling.cancel()
        writer.close()


async def test_a_head_in_pieces_within_its_time_is_a_request() -> None:
    async with serving(config=PROMPT) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        for piece in (HEALTH[:5], HEALTH[5:20], HEALTH[20:]):
            writer.write(piece)
            await asyncio.sleep(LIMIT_S / 10)
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()


async def test_between_requests_a_connection_has_more_time() -> None:
    async with serving(config=PROMPT) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        for _ in range(2):
            await asyncio.sleep(2 * LIMIT_S)
            writer.write(HEALTH)
            assert (await reader.readline()).split()[1] == b"200"
            await reader.readuntil(b'"reading_bytes":0}')
        writer.close()


@pytest.mark.parametrize("pipelined", [b"", HEALTH[:10], HEALTH])
async def test_a_long_answer_is_not_cut_whatever_follows_its_request(pipelined: bytes) -> None:
    async with serving(config=PROMPT) as server:
        worker = ScriptedWorker(server.gateway)
        reader, writer = await raw_post(server, STREAM)
        grant = await worker.granted()
        worker.begin(grant)
        worker.say(grant, event("a"))
        await reader.readuntil(event("a"))
        writer.write(pipelined)
        await asyncio.sleep(3 * LIMIT_S)
        worker.say(grant, event("b"))
        worker.end(grant)
        assert event("b") in await reader.readuntil(END)
        if pipelined:  # the next head's time begins only now
            writer.write(HEALTH[len(pipelined) :])
            assert (await reader.readline()).split()[1] == b"200"
        writer.close()
        assert await server.counts() == (1, 1, 0, 0)


async def test_a_connection_that_sends_nothing_is_closed_when_its_keep_alive_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving_module, "KEEP_ALIVE_S", LIMIT_S)
    async with serving() as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("version", ["--http1.1", "--http2-prior-knowledge"])
async def test_the_keep_alive_time_cuts_no_answer(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(serving_module, "KEEP_ALIVE_S", LIMIT_S)
    async with serving(config=PROMPT) as server:
        worker = ScriptedWorker(server.gateway)
        curl = await asyncio.create_subprocess_exec(
            *("curl", "-sN", version, "--json", STREAM.decode(), server.url + CHAT),
            stdout=asyncio.subprocess.PIPE,
        )
        grant = await worker.granted()
        worker.begin(grant)
        worker.say(grant, event("a"))
        await asyncio.sleep(3 * LIMIT_S)
        worker.say(grant, event("b"))
        worker.end(grant)
        heard, _ = await curl.communicate()
        assert heard == event("a") + event("b")
        assert curl.returncode == 0


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/a?b", b"/a?b"),
        (b"http://x/a?b", b"/a?b"),
        (b"HTTPS://[::1]:8443/http://y/a", b"/http://y/a"),
        (b"http://x", b"/"),
        (b"http://x?b", b"/?b"),
        (b"*", b"*"),
    ],
)
def test_a_target_may_be_the_whole_url(target: bytes, path: bytes) -> None:
    asked = h11.Request(method="GET", target=target, headers=[("Host", "x")])
    assert plain(asked).target == path


def test_an_upgrade_is_ignored() -> None:
    upgrade = [("Host", "x"), ("Connection", "Upgrade"), ("Upgrade", "websocket")]
    asked = h11.Request(method="GET", target="/a", headers=upgrade)
    assert list(plain(asked).headers) == [(b"host", b"x"), (b"connection", b"Upgrade")]


@pytest.mark.parametrize(
    ("line", "status"), [(b"GET http://x/health HTTP/1.1", b"200"), (b"OPTIONS * HTTP/1.1", b"204")]
)
async def test_a_request_in_an_unusual_form_is_answered(line: bytes, status: bytes) -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(line + b"\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).split()[1] == status
        writer.close()
