"""More requests than slots, over the real product: each place counted, each refusal said, nobody held up."""

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import h2.connection
import h2.settings
import httpx
import openai
import pytest

from tests.serve.client import CHAT, STORY, Client, asking, chat, client_of, sending
from tests.serve.process import PATIENCE_S, LlmServe

pytestmark = pytest.mark.model

N_PLACES = 4  # of the narrow server
AT_ONCE_S = 0.5
LONG_PROMPT = "The herring swam on. " * 400  # 2000 tokens: seconds of prefill


@pytest.fixture
async def server(narrow: LlmServe) -> AsyncIterator[LlmServe]:
    yield narrow
    await narrow.quiet()


@asynccontextmanager
async def filled(server: LlmServe, n_lanes: int, prompt: str = STORY) -> AsyncIterator[None]:
    """Have that many lanes taken by answers that go on until the block ends."""
    async with AsyncExitStack() as stack:
        for _ in range(n_lanes):
            await stack.enter_async_context(asking(server, chat(prompt, stream=True, max_tokens=2000)))
        await server.until(lambda health: health["open"] == n_lanes)
        yield


def assert_refused(response: httpx.Response, reason: str) -> None:
    """Assert that a response is a 503 as every client understands it."""
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/json"
    assert 1 <= int(response.headers["retry-after"]) <= 30
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert error["type"] == "service_unavailable_error"
    assert error["code"] == "server_is_overloaded"
    assert error["param"] is None
    assert error["reason"] == reason


# --- the limit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_rounds", [3, pytest.param(50, marks=pytest.mark.slow)])
async def test_of_more_requests_than_places_exactly_the_rest_is_refused(
    server: LlmServe, client: Client, n_rounds: int
) -> None:
    for _ in range(n_rounds):
        before = await server.quiet()
        responses = await asyncio.gather(
            # Long enough that none has ended before the last has come.
            *(client.post(chat("hi", max_tokens=40, stream=n % 2 == 0)) for n in range(2 * N_PLACES))
        )
        refused = [response for response in responses if response.status_code != 200]
        assert len(refused) == N_PLACES
        for response in refused:
            assert_refused(response, "ring_full")
        after = await server.quiet()
        assert after["finished"] == before["finished"] + N_PLACES


async def test_a_refusal_comes_at_once(server: LlmServe, client: Client) -> None:
    async with filled(server, N_PLACES):
        began = time.monotonic()
        assert_refused(await client.post(chat("hi")), "ring_full")
        assert time.monotonic() - began < AT_ONCE_S


async def test_the_sdk_comes_again_and_succeeds_once_there_is_room(server: LlmServe) -> None:
    statuses: list[int] = []
    is_refused = asyncio.Event()

    async def note(response: Any) -> None:
        statuses.append(response.status_code)
        is_refused.set()

    http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [note]})
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=2, timeout=PATIENCE_S, http_client=http
    ) as sdk:
        async with filled(server, N_PLACES):
            answer = asyncio.create_task(
                sdk.chat.completions.create(
                    model="smollm2", messages=[{"role": "user", "content": "hi"}], max_tokens=4
                )
            )
            await is_refused.wait()
        assert (await answer).choices[0].message.content
    assert statuses == [503, 200]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_request_that_waited_in_vain_is_told_so(impatient: LlmServe, stream: bool) -> None:
    before = await impatient.quiet()
    async with client_of(impatient) as client, filled(impatient, 2):
        assert_refused(await client.post(chat("hi", stream=stream)), "queue_timeout")
    after = await impatient.quiet()
    assert after["lanes"]["expired"] == before["lanes"]["expired"] + 1


# --- what takes no place --------------------------------------------------------------------------------


@pytest.mark.parametrize("n_times", [5, pytest.param(50, marks=pytest.mark.slow)])
async def test_what_takes_no_place_is_answered_at_once_when_all_are_taken(
    server: LlmServe, client: Client, n_times: int
) -> None:
    asked = [("GET", path) for path in ("/health", "/ready", "/v1/models", "/")]
    async with filled(server, N_PLACES):
        for method, path in [*asked, ("OPTIONS", "/v1/chat/completions"), ("OPTIONS", "/v1/models")]:
            waits_s = []
            for _ in range(n_times):
                response = await client.get(path, method)
                assert response.status_code == (200 if method == "GET" else 204)
                waits_s.append(response.elapsed.total_seconds())
            assert statistics.median(waits_s) < AT_ONCE_S, path


async def test_a_long_prefill_holds_up_no_health(roomy: LlmServe) -> None:
    async with client_of(roomy) as client, filled(roomy, 4, LONG_PROMPT):
        await roomy.until(lambda health: health["workers"][0]["kv_promised_tokens"] > 0)
        waits_s = []
        for _ in range(10):
            response = await client.get("/health")
            waits_s.append(response.elapsed.total_seconds())
            assert response.json()["decoding"] == 0
            assert (await client.get("/ready")).status_code == 200
    assert statistics.median(waits_s) < AT_ONCE_S
    await roomy.quiet()


# --- slow clients ---------------------------------------------------------------------------------------


@asynccontextmanager
async def reading_nothing(server: LlmServe) -> AsyncIterator[None]:
    """Ask for a long answer over HTTP/2, and give it a window of one kilobyte for ever."""
    _, writer = await asyncio.open_connection(*server.address)
    client = h2.connection.H2Connection()
    window = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1024}
    client.local_settings = h2.settings.Settings(client=True, initial_values=window)
    client.initiate_connection()
    pseudo = [(":method", "POST"), (":path", CHAT), (":scheme", "http"), (":authority", "x")]
    client.send_headers(1, [*pseudo, ("content-type", "application/json")])
    body = chat(STORY, stream=True, max_tokens=2000)
    client.send_data(1, json.dumps(body).encode(), end_stream=True)
    writer.write(client.data_to_send())
    try:
        yield
    finally:
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def reading_slowly(server: LlmServe) -> AsyncIterator[None]:
    """Ask for a long answer in long chunks, and read one byte of it after the other once no more fits."""
    long_id = f"x-request-id: {'x' * 128}\r\n"
    question = chat(STORY, stream=True, max_tokens=4000)
    async with asking(server, question, long_id, room_bytes=4096) as connection:
        reader = asyncio.create_task(trickle(connection.reader))
        try:
            yield
        finally:
            reader.cancel()


async def trickle(reader: asyncio.StreamReader) -> None:
    """Read a byte every tenth of a second, to the end."""
    while await reader.read(1):  # noqa: ASYNC110 - this is how slow the client is
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("read", [reading_nothing, pytest.param(reading_slowly, marks=pytest.mark.slow)])
async def test_a_slow_reader_is_dropped_and_holds_up_nobody(
    impatient: LlmServe, read: Callable[[LlmServe], AbstractAsyncContextManager[None]]
) -> None:
    async with client_of(impatient) as client:
        alone = await client.streamed(STORY, max_tokens=48)
        before = await impatient.quiet()
        n_stalled = len(impatient.lines("outcome=stalled"))
        async with read(impatient):
            await impatient.until(lambda health: health["decoding"] == 1)
            assert await client.streamed(STORY, max_tokens=48) == alone
            await impatient.until(lambda health: health["cancelled"] == before["cancelled"] + 1)
        assert len(impatient.lines("outcome=stalled")) == n_stalled + 1
        assert (await impatient.quiet())["accepted"] == before["accepted"] + 2


async def test_a_slow_upload_is_a_408_and_never_takes_a_place(impatient: LlmServe) -> None:
    before = await impatient.quiet()
    async with sending(impatient, "Content-Length: 100\r\n", b"{") as connection:
        await impatient.until(lambda health: health["reading_bytes"] == 100)
        status, headers = await connection.head()
        body = json.loads(await connection.until(b"}}"))
    assert (status, headers["content-type"], headers["connection"]) == (408, "application/json", "close")
    assert body["error"]["code"] == "request_timeout"
    assert (await impatient.quiet())["accepted"] == before["accepted"]
