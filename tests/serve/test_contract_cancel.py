"""Clients that leave, over the real product: their work ends with them, and nobody else's does."""

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial

import openai
import pytest

from tests.serve.client import CHAT, STORY, Client, Json, asking, chat, client_of
from tests.serve.process import Health, LlmServe

pytestmark = pytest.mark.model

FREED_S = 1.0  # from the client's end to a health that tells of a free slot
LONG_PROMPT = "The whale swam on. " * 400  # 2000 tokens: seconds of prefill
LEAK_BYTES = 32 << 20

QUESTIONS = [
    "hi",
    "What is 2+2?",
    "Name three colours.",
    "Who wrote Hamlet?",
    "Greet me in French.",
    "Spell cat.",
    "Reply with only emoji: happy, sad, party.",
    "What is the capital of France?",
]

# How far a client follows the answer before it leaves.
MOMENTS = {
    "at once": b"",
    "at the head": b"\r\n\r\n",
    "at the first chunk": b'"role"',
    "at the last chunk": b'"finish_reason":"',
    "at the very end": b"[DONE]",
}


@pytest.fixture
async def server(roomy: LlmServe) -> AsyncIterator[LlmServe]:
    yield roomy
    await roomy.quiet()


def is_in_prefill(health: Health) -> bool:
    """Whether the engine computes a prompt and nothing else."""
    return bool(health["workers"][0]["kv_promised_tokens"] > 0 and health["decoding"] == 0)


def is_in_decode(health: Health) -> bool:
    return bool(health["decoding"] > 0)


def is_free(health: Health) -> bool:
    return bool(health["inflight"] == 0)


# --- while it runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("prompt", "is_reached"),
    [pytest.param(LONG_PROMPT, is_in_prefill, id="prefill"), pytest.param(STORY, is_in_decode, id="decode")],
)
async def test_a_client_that_leaves_frees_its_slot(
    server: LlmServe, prompt: str, is_reached: Callable[[Health], bool], stream: bool
) -> None:
    before = await server.quiet()
    prompt = f"{stream}. {prompt}"  # of which nothing is cached yet
    async with asking(server, chat(prompt, stream=stream, max_tokens=2000)):
        await server.until(is_reached)
    await server.until(is_free, within_s=FREED_S)
    after = await server.quiet()
    assert after["cancelled"] == before["cancelled"] + 1
    assert after["finished"] == before["finished"]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("version", ["--http1.1", "--http2-prior-knowledge"])
async def test_curl_that_is_stopped_frees_its_slot(server: LlmServe, version: str, stream: bool) -> None:
    before = await server.quiet()
    body = json.dumps(chat(STORY, max_tokens=2000, stream=stream))
    curl = await asyncio.create_subprocess_exec(
        *("curl", "-sN", version, server.url + CHAT, "-H", "content-type: application/json", "-d", body),
        stdout=asyncio.subprocess.DEVNULL,
    )
    await server.until(is_in_decode)
    curl.send_signal(signal.SIGINT)
    await curl.wait()
    await server.until(is_free, within_s=FREED_S)
    assert (await server.quiet())["cancelled"] == before["cancelled"] + 1


async def test_the_sdks_closed_iterator_frees_its_slot(server: LlmServe, sdk: openai.AsyncOpenAI) -> None:
    before = await server.quiet()
    stream = await sdk.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": STORY}], max_tokens=2000, stream=True
    )
    await anext(aiter(stream))
    await stream.close()
    await server.until(is_free, within_s=FREED_S)
    assert (await server.quiet())["cancelled"] == before["cancelled"] + 1


async def test_what_a_client_had_when_it_left_is_in_the_log(server: LlmServe) -> None:
    body = chat(STORY, stream=True, max_tokens=2000)
    async with asking(server, body, "X-Request-Id: left-in-the-middle\r\n") as stream:
        heard = b"".join([await stream.until(b'"content":"') for _ in range(12)])
    await server.quiet()
    (line,) = server.lines("request left-in-the-middle ")
    said = dict(word.split("=", 1) for word in line.split() if "=" in word)
    assert said["outcome"] == "client_left"
    assert 10 <= int(said["n_out"]) < 2000, heard
    assert 10 < int(said["n_prompt"]) < 100
    assert int(said["ttft_ms"]) < int(said["total_ms"])


# --- while it waits -------------------------------------------------------------------------------------


async def test_a_client_that_leaves_the_queue_is_never_served(narrow: LlmServe) -> None:
    """A has the one slot; B, C and D wait; C leaves, then B. D follows A, and A notices nothing."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(client_of(narrow))
        ask_a = partial(client.streamed, STORY, max_tokens=300)
        undisturbed = await ask_a()
        before = await narrow.quiet()
        a = asyncio.create_task(ask_a())
        await narrow.until(is_in_decode)
        b, c, d = [
            await stack.enter_async_context(asking(narrow, chat("hi", max_tokens=4))) for _ in range(3)
        ]
        await narrow.until(lambda health: health["lanes"]["waiting"] == 3)
        for n_waiting, leaver in ((2, c), (1, b)):
            await leaver.cut()
            health = await narrow.until(lambda health: health["lanes"]["waiting"] == n_waiting, FREED_S)  # noqa: B023
            assert health["lanes"]["streaming"] == 1
        assert await a == undisturbed
        assert (await d.head())[0] == 200
    after = await narrow.quiet()
    assert after["cancelled"] == before["cancelled"] + 2
    assert after["finished"] == before["finished"] + 2


@pytest.mark.parametrize("n_waiting", [60, pytest.param(200, marks=pytest.mark.slow)])
async def test_many_that_wait_and_leave_are_all_forgotten(server: LlmServe, n_waiting: int) -> None:
    before = await server.quiet()
    async with AsyncExitStack() as stack:
        for _ in range(n_waiting):
            await stack.enter_async_context(asking(server, chat(STORY, max_tokens=2000)))
        await server.until(lambda health: health["open"] == n_waiting)
    after = await server.quiet()
    assert after["cancelled"] == before["cancelled"] + n_waiting


# --- at any moment --------------------------------------------------------------------------------------


async def leave_at(server: LlmServe, moment: bytes, question: Json) -> None:
    async with asking(server, question) as connection:
        if moment:
            await connection.until(moment)


async def leave_often(server: LlmServe, moment: bytes, n_times: int) -> None:
    """Leave that many answers of one to three tokens, a few at a time."""
    chance = random.Random(16)
    places = asyncio.Semaphore(8)

    async def leave_one() -> None:
        async with places:
            await leave_at(server, moment, chat("hi", stream=True, max_tokens=chance.randint(1, 3)))

    await asyncio.gather(*(leave_one() for _ in range(n_times)))


@pytest.mark.parametrize(
    ("moment", "n_times"),
    [
        *((moment, 12) for moment in MOMENTS),
        pytest.param("at the first chunk", 1000, marks=pytest.mark.slow),
        pytest.param("at the last chunk", 50, marks=pytest.mark.slow),
    ],
)
async def test_an_answer_left_near_its_end_is_counted_once_and_holds_nothing(
    server: LlmServe, client: Client, moment: str, n_times: int
) -> None:
    before = await server.quiet()
    held = server.memory_bytes()
    await leave_often(server, MOMENTS[moment], n_times)
    after = await server.quiet()  # which holds that each ended in one way
    assert after["accepted"] == before["accepted"] + n_times
    assert after["failed"] == before["failed"]
    assert server.memory_bytes() < held + LEAK_BYTES
    async with asyncio.timeout(2):
        assert (await client.whole("hi", max_tokens=2)).text == "Hello!"


# --- nobody else's --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"temperature": 1, "seed": 14}], ids=["greedy", "seeded"]
)
async def test_answers_side_by_side_are_what_they_are_alone(client: Client, fields: Json) -> None:
    asks = [partial(client.streamed, question, max_tokens=12, **fields) for question in QUESTIONS]
    alone = [await ask() for ask in asks]
    assert await asyncio.gather(*(ask() for ask in asks)) == alone


async def test_an_answer_beside_others_that_leave_is_what_it_is_alone(
    server: LlmServe, client: Client
) -> None:
    ask = partial(client.streamed, STORY, max_tokens=64)
    alone = await ask()
    beside, _ = await asyncio.gather(ask(), leave_often(server, MOMENTS["at the first chunk"], 24))
    assert beside == alone
