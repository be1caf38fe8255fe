"""Workers lost in every state of an answer: the client reads what an undisturbed run says, or one error.

The undisturbed run is the oracle, at temperature 0 and above, as long as prompt and answer stay within 256
cells. Where nobody can go on, the answer comes no later than the heartbeat timeout (0 where the socket
closed), the wait for a worker, and 2 s.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import orjson
import pytest

from tests.network.chat import Answer, Chat, ask, ask_whole, sdk_of
from tests.network.conftest import HEARTBEAT_TIMEOUT_S, PAIR_HEARTBEAT_TIMEOUT_S, PATIENCE_S
from tests.network.fleet import MODEL, Fleet, Ingress, Worker, until
from tests.network.standing import Standing

pytestmark = pytest.mark.model

STORY = "Tell a story about a lighthouse."
OTHER_STORY = "Tell a story about a mountain."
LONG_QUESTION = "Which of these is a colour: " + "lamp, stone, " * 45 + "blue?"  # some 190 tokens
N_TOKENS = 64
N_BESIDE = 24  # of an answer that only runs beside another
SAMPLED = {"temperature": 1, "seed": 7}
PENALISED = {**SAMPLED, "presence_penalty": 0.7, "frequency_penalty": 0.4}
STARVED_S = 2.0
SLACK_S = 2.0  # beyond the timeouts that were asked for


def assert_same(answer: Answer, undisturbed: Answer) -> None:
    assert answer.text == undisturbed.text
    assert answer.finish_reason == undisturbed.finish_reason
    usage, expected = answer.usage, undisturbed.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        expected.prompt_tokens,
        expected.completion_tokens,
    )
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens <= 256


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": STORY}], "temperature": 0, **fields}


async def until_prompting(fleet: Fleet, ingress: Ingress) -> Worker:
    """The one worker that holds a lane, once its engine has begun with it."""
    await ingress.until(lambda _: ingress.holders())
    holder = fleet.holder(ingress)
    await until(lambda: holder.health()["kv_promised_tokens"], f"{holder} has begun with the prompt")
    return holder


async def until_decoding(fleet: Fleet, ingress: Ingress) -> Worker:
    """The one worker that holds a lane, once it has computed a token of it."""
    await ingress.until(lambda _: ingress.holders())
    holder = fleet.holder(ingress)
    await until(lambda: holder.health()["decoding"], f"{holder} decodes")
    return holder


# A worker dies, and another goes on.


async def test_a_worker_killed_before_its_first_word_leaves_the_whole_answer_to_another(
    pair: Standing,
) -> None:
    undisturbed = await pair.undisturbed(STORY, max_tokens=30)
    async with sdk_of(pair.ingress) as sdk:
        for worker in pair.workers:
            worker.freeze()
        asked = asyncio.create_task(ask(sdk, STORY, max_tokens=30))
        await pair.ingress.until(lambda health: health["lanes"]["claimed"] == 1)
        lost = pair.holder()
        await lost.kill()
        pair.other(lost).thaw()
        assert_same(await asked, undisturbed)
    await pair.ingress.quiet()


@pytest.mark.slow
async def test_a_worker_killed_in_the_prompt_leaves_the_whole_answer_to_another(fleet: Fleet) -> None:
    ingress = await fleet.ingress()
    await fleet.workers(ingress, "gpu-1", "gpu-2")
    async with sdk_of(ingress) as sdk:
        begun = asyncio.create_task(Chat.begin(sdk, LONG_QUESTION, max_tokens=30))
        await (await until_prompting(fleet, ingress)).kill()
        assert not begun.done()
        answer = await (await begun).rest()
        assert_same(answer, await ask(sdk, LONG_QUESTION, max_tokens=30))
    await ingress.quiet()


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(SAMPLED, marks=pytest.mark.slow),
        PENALISED,
    ],
    ids=["greedy", "sampled", "penalised"],
)
async def test_a_stream_of_a_killed_worker_reads_on_as_if_nothing_had_happened(
    pair: Standing, fields: dict[str, Any]
) -> None:
    undisturbed = await pair.undisturbed(STORY, max_tokens=N_TOKENS, **fields)
    async with sdk_of(pair.ingress) as sdk:
        chat = await Chat.begin(sdk, STORY, max_tokens=N_TOKENS, **fields)
        await chat.read(10)
        await pair.holder().kill()
        answer = await chat.rest()
    assert_same(answer, undisturbed)
    assert len(pair.ingress.health()["workers"]) == 1
    await pair.ingress.quiet()


@pytest.mark.slow
async def test_beyond_256_cells_a_q8_0_cache_keeps_the_promise(fleet: Fleet) -> None:
    ingress = await fleet.ingress()
    await fleet.workers(ingress, "gpu-1", "gpu-2", flags=("--cache-type-k", "q8_0", "--cache-type-v", "q8_0"))
    async with sdk_of(ingress) as sdk:
        undisturbed = await ask(sdk, STORY, max_tokens=400, **SAMPLED)
        chat = await Chat.begin(sdk, STORY, max_tokens=400, **SAMPLED)
        await chat.read(280)
        await fleet.holder(ingress).kill()
        answer = await chat.rest()
    assert (answer.text, answer.usage.total_tokens) == (undisturbed.text, undisturbed.usage.total_tokens)
    assert answer.usage.total_tokens > 400
    await ingress.quiet()


@pytest.mark.slow
async def test_a_stream_survives_as_many_deaths_as_there_are_attempts(fleet: Fleet) -> None:
    ingress = await fleet.ingress("--max-attempts", "3")
    await fleet.workers(ingress, "gpu-1", "gpu-2", "gpu-3")
    async with sdk_of(ingress) as sdk:
        undisturbed = await ask(sdk, STORY, max_tokens=N_TOKENS, **SAMPLED)
        chat = await Chat.begin(sdk, STORY, max_tokens=N_TOKENS, **SAMPLED)
        for _ in range(2):
            await chat.read(10)
            await fleet.holder(ingress).kill()
        assert_same(await chat.rest(), undisturbed)
    await ingress.quiet()


@pytest.mark.parametrize(
    "fields", [pytest.param({}, marks=pytest.mark.slow), PENALISED], ids=["greedy", "penalised"]
)
async def test_an_answer_in_one_piece_of_a_killed_worker_is_completed_by_another(
    pair: Standing, fields: dict[str, Any]
) -> None:
    undisturbed = await pair.undisturbed(STORY, max_tokens=N_TOKENS, **fields)
    async with sdk_of(pair.ingress) as sdk:
        asked = asyncio.create_task(ask_whole(sdk, STORY, max_tokens=N_TOKENS, **fields))
        lost = await until_decoding(pair.fleet, pair.ingress)
        await let_tokens_come(sdk)
        assert not asked.done()
        await lost.kill()
        assert_same(await asked, undisturbed)
    await pair.ingress.quiet()


async def test_a_restarted_worker_takes_up_what_was_lost_a_stop_string_half_held_back_included(
    pair: Standing,
) -> None:
    text = (await pair.undisturbed(STORY, max_tokens=N_TOKENS)).text
    held_at, stopped_at = len(text) // 4, len(text) - 20
    almost, met = text[held_at : held_at + 150] + "@", text[stopped_at:]
    assert text.find(almost[0], 0, held_at) >= 0  # what is held back is let go more than once
    stops = {"max_tokens": N_TOKENS, "stop": [almost, met]}
    undisturbed = await pair.undisturbed(STORY, **stops)
    assert (undisturbed.text, undisturbed.finish_reason) == (text[:stopped_at], "stop")

    async with sdk_of(pair.ingress) as sdk:
        chat = await Chat.begin(sdk, STORY, **stops)
        while len(chat.text) < held_at:
            await chat.read(1)
        other = await let_tokens_come(sdk)
        assert chat.text == text[:held_at]
        await pair.kill_all()
        await pair.workers[0].start()
        answers = await asyncio.gather(chat.rest(), other.rest())
    assert_same(answers[0], undisturbed)
    assert_same(answers[1], await pair.undisturbed(OTHER_STORY, max_tokens=N_BESIDE))
    await pair.ingress.quiet()


async def let_tokens_come(sdk: openai.AsyncOpenAI) -> Chat:
    """Let some tokens pass: those of another answer, which the other worker gives at the same pace."""
    other = await Chat.begin(sdk, OTHER_STORY, max_tokens=N_BESIDE)
    await other.read(8)
    return other


# A worker dies, and there is no other.


async def test_a_stream_nobody_can_go_on_with_ends_in_one_error_event_in_time(lone: Standing) -> None:
    asked = body(max_tokens=N_TOKENS, stream=True)
    async with (
        httpx.AsyncClient(timeout=30) as http,
        http.stream("POST", f"{lone.ingress.url}/v1/chat/completions", json=asked) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        await anext(lines)
        killed_at = time.monotonic()
        await lone.kill_all()
        events = [orjson.loads(line.removeprefix("data: ")) async for line in lines if line]
        assert PATIENCE_S <= time.monotonic() - killed_at < PATIENCE_S + SLACK_S
    assert ["error" in event for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["error"]["code"]
    await lone.ingress.quiet()


@pytest.mark.parametrize("is_frozen", [False, True], ids=["killed", "frozen"])
async def test_an_answer_in_one_piece_nobody_can_go_on_with_is_refused_in_time(
    lone: Standing, is_frozen: bool
) -> None:
    async with sdk_of(lone.ingress) as sdk:
        asked = asyncio.create_task(ask_whole(sdk, STORY, max_tokens=N_TOKENS))
        worker = await until_decoding(lone.fleet, lone.ingress)
        lost_at = time.monotonic()
        if is_frozen:
            worker.freeze()
        else:
            await worker.kill()
        with pytest.raises(openai.InternalServerError) as refused:
            await asked
        assert refused.value.status_code in (502, 503)
        heartbeat_s = HEARTBEAT_TIMEOUT_S if is_frozen else 0
        assert time.monotonic() - lost_at < heartbeat_s + PATIENCE_S + SLACK_S
    assert lone.ingress.health()["open"] == 0


@pytest.mark.slow
async def test_a_stream_of_which_nothing_was_sent_is_refused_if_nobody_can_begin_it(fleet: Fleet) -> None:
    ingress = await fleet.ingress("--no-worker-timeout", "1")
    await fleet.worker("gpu-1", ingress)
    async with sdk_of(ingress) as sdk:
        begun = asyncio.create_task(Chat.begin(sdk, LONG_QUESTION, max_tokens=30))
        await (await until_prompting(fleet, ingress)).kill()
        with pytest.raises(openai.InternalServerError) as refused:
            await begun
        assert refused.value.status_code == 503
    assert ingress.health()["open"] == 0


# A worker freezes, or has no time.


async def test_a_frozen_workers_stream_goes_on_elsewhere_and_when_it_wakes_it_serves_again(
    pair: Standing,
) -> None:
    undisturbed = await pair.undisturbed(STORY, max_tokens=N_TOKENS, **PENALISED)
    async with sdk_of(pair.ingress) as sdk:
        chat = await Chat.begin(sdk, STORY, max_tokens=N_TOKENS, **PENALISED)
        await chat.read(10)
        frozen = pair.holder()
        frozen_at = time.monotonic()
        frozen.freeze()
        await pair.ingress.until(lambda _: pair.ingress.holders() == [pair.other(frozen).name])
        assert time.monotonic() - frozen_at < PAIR_HEARTBEAT_TIMEOUT_S + SLACK_S
        frozen.thaw()
        assert_same(await chat.rest(), undisturbed)
        await pair.ingress.until_attached(2)
        await pair.ingress.quiet()

        await pair.other(frozen).kill()
        assert_same(await ask(sdk, STORY, max_tokens=N_TOKENS, **PENALISED), undisturbed)
    await pair.ingress.quiet()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["worker", "ingress"])
async def test_nobody_is_evicted_who_was_starved_for_2_s(fleet: Fleet, which: str) -> None:
    ingress = await fleet.ingress()
    worker = await fleet.worker("gpu-1", ingress)
    starved = worker if which == "worker" else ingress
    async with sdk_of(ingress) as sdk:
        undisturbed = await ask(sdk, STORY, max_tokens=N_TOKENS)
        chat = await Chat.begin(sdk, STORY, max_tokens=N_TOKENS)
        await chat.read(5)
        starved.freeze()
        await asyncio.sleep(STARVED_S)
        starved.thaw()
        assert_same(await chat.rest(), undisturbed)
    assert_nobody_was_evicted(ingress, worker)
    await ingress.quiet()


@pytest.mark.slow
async def test_nobody_is_evicted_on_a_machine_that_is_busy(fleet: Fleet) -> None:
    ingress = await fleet.ingress()
    worker = await fleet.worker("gpu-1", ingress)
    async with sdk_of(ingress) as sdk:
        undisturbed = await ask(sdk, STORY, max_tokens=N_TOKENS)
        with busy_processes(2 * (os.cpu_count() or 1)):
            assert_same(await ask(sdk, STORY, max_tokens=N_TOKENS), undisturbed)
    assert_nobody_was_evicted(ingress, worker)
    await ingress.quiet()


@contextmanager
def busy_processes(n: int) -> Iterator[None]:
    """Processes that each want a core for themselves."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def assert_nobody_was_evicted(ingress: Ingress, worker: Worker) -> None:
    assert len(worker.lines("is attached to")) == 1
    assert not (ingress.lines("WARNING") + worker.lines("WARNING"))
