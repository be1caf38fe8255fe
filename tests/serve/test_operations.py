"""A server's life: how it starts, what it refuses to start with, how it drains and how it ends."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import openai
import pytest

from llm_engine.priority import NICENESS
from llm_ingress.draining import SECOND_THOUGHT_S
from tests import faulty_loop
from tests.ingress.test_serving import certificate
from tests.serve.client import CHAT, DONE, STORY, Client, Connection, asking, chat, client_of, deltas, events
from tests.serve.process import COMMAND, PATIENCE_S, POLL_S, LlmServe, running

pytestmark = pytest.mark.model

AT_ONCE_S = 10.0  # the process's own end included
LOADED = ("--model", "smollm2", "--ctx-size", "512")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


# --- the end --------------------------------------------------------------------------------------------


@asynccontextmanager
async def busy(server: LlmServe, n_lanes: int, max_tokens: int) -> AsyncIterator[list[Connection]]:
    """Have that many streams open, running and waiting."""
    async with AsyncExitStack() as stack:
        body = chat(STORY, stream=True, max_tokens=max_tokens)
        streams = [await stack.enter_async_context(asking(server, body)) for _ in range(n_lanes)]
        await server.until(lambda health: health["open"] == n_lanes and health["lanes"]["streaming"])
        yield streams


async def assert_turned_away(client: Client, path: str) -> None:
    response = await (client.get(path) if path == "/ready" else client.post(chat("hi")))
    assert response.status_code == 503
    assert response.headers["connection"] == "close"
    assert response.json()["error"]["reason"] == "draining"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_drain_finishes_what_it_holds_and_turns_away_what_comes(log: Path, number: int) -> None:
    with running("--max-inflight", "2", "--drain-timeout", "60", log=log) as server:
        async with client_of(server) as client, busy(server, 5, max_tokens=24) as streams:
            server.signal(number)
            await server.until(lambda health: health["draining"])
            await assert_turned_away(client, "/ready")
            await assert_turned_away(client, CHAT)
            assert server.health()["status"] == "draining"
            for stream in streams:
                assert (await stream.rest()).endswith(f"{DONE}\r\n0\r\n\r\n".encode())
        assert await server.exit_status() == 0
    assert server.lines(" ERROR ", "Traceback") == []


async def test_past_the_drains_limit_running_streams_get_an_error_event_and_waiting_ones_a_503(
    log: Path,
) -> None:
    with running("--max-inflight", "1", "--drain-timeout", "1", log=log) as server:
        async with busy(server, 2, max_tokens=2000) as (ran, waited):
            await server.until(lambda health: health["decoding"])  # something was sent
            server.signal(signal.SIGTERM)
            status, headers = await waited.head()
            assert (status, int(headers["retry-after"]) > 0) == (503, True)
            *_, end, last = (await ran.rest()).decode().rstrip().split("data: ")
            assert json.loads(last.split("\r\n")[0])["error"]["reason"] == "draining"
            assert "delta" in end
        assert await server.exit_status() == 0
    assert server.lines(" ERROR ", "Traceback") == []


async def test_the_sdk_raises_when_a_drain_cuts_its_stream(log: Path) -> None:
    with running("--drain-timeout", "0", log=log) as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
            stream = await sdk.chat.completions.create(
                model="smollm2", messages=[{"role": "user", "content": STORY}], stream=True
            )
            await anext(aiter(stream))
            server.signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="shutting down"):
                _ = [chunk async for chunk in stream]
        assert await server.exit_status() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(log: Path, number: int) -> None:
    with running("--max-inflight", "1", "--drain-timeout", "60", log=log) as server:
        async with busy(server, 3, max_tokens=4000):
            server.signal(number)
            await server.until(lambda health: health["draining"])
            await asyncio.sleep(2 * SECOND_THOUGHT_S)
            server.signal(number)
            async with asyncio.timeout(AT_ONCE_S):
                assert await server.exit_status() == 130
    assert server.lines(" ERROR ", "Traceback") == []


@pytest.mark.parametrize("n_signals", [1, 2])
async def test_sessions_are_kept_at_the_end_unless_a_second_signal_asks_for_it_at_once(
    log: Path, tmp_path: Path, n_signals: int
) -> None:
    flags = ("--max-inflight", "1", "--threads", "1", "--session-dir", str(tmp_path / "kept"))
    with running(*flags, "--drain-timeout", "60", log=log) as server:
        async with client_of(server) as client:
            question = chat("What did you see in the night, and who came by? Tell it in full.", max_tokens=2)
            assert (await client.post(question)).status_code == 200
        async with busy(server, 1, max_tokens=4000 if n_signals == 2 else 2):
            server.signal(signal.SIGTERM)
            if n_signals == 2:
                await server.until(lambda health: health["draining"])
                await asyncio.sleep(2 * SECOND_THOUGHT_S)
                server.signal(signal.SIGTERM)
            assert await server.exit_status() == (130 if n_signals == 2 else 0)
    assert bool(list(tmp_path.rglob("*.kv"))) == (n_signals == 1)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_that_arrives_twice_in_a_moment_is_one(log: Path, second: int) -> None:
    with running("--max-inflight", "1", "--drain-timeout", "60", log=log) as server:
        async with busy(server, 2, max_tokens=24) as streams:
            server.signal(signal.SIGTERM)
            await server.until(lambda health: health["draining"])
            server.signal(second)
            for stream in streams:
                assert (await stream.rest()).endswith(f"{DONE}\r\n0\r\n\r\n".encode())
        assert await server.exit_status() == 0
    assert server.lines(" ERROR ", "Traceback") == []


async def test_when_its_engine_fails_every_client_is_told_and_it_ends_with_status_1(
    log: Path, tmp_path: Path
) -> None:
    fault = tmp_path / "fault"
    program = (sys.executable, "-m", faulty_loop.PROGRAM)
    surroundings = faulty_loop.environment("llm_serve", fault)
    flags = ("--max-inflight", "2", "--drain-timeout", "60")
    with running(*flags, log=log, program=program, environment=surroundings) as server:
        async with busy(server, 3, max_tokens=4000) as (*ran, waited):
            await server.until(lambda health: health["decoding"] == 2)
            fault.touch()
            async with asyncio.timeout(AT_ONCE_S):
                for stream in ran:
                    *_, last = (await stream.rest()).decode().rstrip().split("data: ")
                    assert "The server has failed" in json.loads(last.split("\r\n")[0])["error"]["message"]
                status, headers = await waited.head()
                assert (status, int(headers["retry-after"]) > 0) == (503, True)
                assert await server.exit_status() == 1
    (told,) = server.lines("its engine has failed")
    assert "RuntimeError('made to fail')" in told


@pytest.mark.parametrize("moment_s", [0.0, 0.15, 0.3, 0.45, 0.6])
async def test_ctrl_c_ends_it_however_far_it_has_loaded(moment_s: float) -> None:
    process = subprocess.Popen([COMMAND, *LOADED, "--port", "0"], stdout=subprocess.PIPE)
    try:
        while ".gguf" not in Path(f"/proc/{process.pid}/maps").read_text():
            assert process.poll() is None
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(moment_s)
        process.send_signal(signal.SIGINT)
        await asyncio.to_thread(process.communicate, timeout=AT_ONCE_S)
    finally:
        process.kill()
    # 0 from the moment on that it serves.
    assert process.returncode in (-signal.SIGINT, 0)


# --- the start ------------------------------------------------------------------------------------------


def complaint(*flags: str | Path, **environment: str) -> str:
    """The one line a command ends with that will not serve."""
    done = subprocess.run(
        [COMMAND, *flags],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.startswith("llm-serve: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_plain_http_beyond_this_machine_is_refused(host: str) -> None:
    assert "--tls-cert and --tls-key, or --insecure" in complaint(*LOADED, "--bind", host)
    assert "--tls-cert and --tls-key, or --insecure" in complaint(*LOADED, HOST=host)


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in complaint("--model", "no/such/file.gguf", "--port", port)


def test_environment_stands_in_for_flags_and_a_flag_wins(log: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    surroundings = {"HOST": "127.0.0.2", "PORT": port}
    with running("--ctx-size", "512", log=log, environment=surroundings) as server:
        assert server.url == f"http://127.0.0.2:{port}"
        assert server.health()["status"] == "ok"
    with running("--bind", "127.0.0.1", "--port", "0", log=log, environment=surroundings) as server:
        assert server.address[0] == "127.0.0.1"
        assert server.address[1] != int(port)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere priorities belong to processes")
def test_the_event_loop_yields_to_the_decode(roomy: LlmServe) -> None:
    pid, usual = roomy.process.pid, os.getpriority(os.PRIO_PROCESS, 0)
    threads = map(int, os.listdir(f"/proc/{pid}/task"))
    niceness = {thread: os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
    assert niceness.pop(pid) == max(NICENESS, usual)
    assert usual in niceness.values()  # the step thread, and those that compute with it


@pytest.mark.parametrize(("flag", "version"), [("--http2", "2"), ("--http1.1", "1.1")])
async def test_it_serves_https_on_both_versions(log: Path, tmp_path: Path, flag: str, version: str) -> None:
    cert, key = certificate(tmp_path, "server")
    with running("--tls-cert", str(cert), "--tls-key", str(key), log=log) as server:
        assert server.url.startswith("https://")
        curl = await asyncio.create_subprocess_exec(
            *("curl", "-sN", flag, "--cacert", cert, "-w", "%{http_version} %{http_code}"),
            *("-H", "content-type: application/json", "-d", json.dumps(chat("hi", stream=True))),
            server.url + CHAT,
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await curl.communicate()
    *chunks, last = said.decode().split(DONE)
    assert last == f"{version} 200"
    assert "".join(deltas(events(chunks[0] + DONE))) == "Hello! How can I assist you today?"


@pytest.mark.parametrize("damage", ["cut in half", "garbled header", "empty", "missing"])
def test_a_broken_model_file_is_one_line_that_names_it(smollm2: Path, tmp_path: Path, damage: str) -> None:
    broken = tmp_path / "broken.gguf"
    sound = smollm2.read_bytes()
    match damage:
        case "cut in half":
            broken.write_bytes(sound[: len(sound) // 2])
        case "garbled header":
            broken.write_bytes(sound[:512] + bytes(255 - byte for byte in sound[512:1536]) + sound[1536:])
        case "empty":
            broken.touch()
    assert str(broken) in complaint("--model", broken, "--port", "0")
