"""Processes that end and come back while others work: ingresses killed, workers replaced one by one."""

import asyncio

import httpx
import openai
import pytest

from tests.network.chat import Answer, Chat, ask, sdk_of
from tests.network.fleet import Fleet, Worker, until

pytestmark = [pytest.mark.model, pytest.mark.slow]

STORY = "Tell a story about a lighthouse."
N_TOKENS = 180
N_CLIENTS = 3
N_RESTARTS = 5


async def test_a_killed_ingress_costs_its_workers_nothing_but_its_own_lanes(fleet: Fleet) -> None:
    doomed, steady = await fleet.ingress(name="doomed"), await fleet.ingress(name="steady")
    worker = await fleet.worker("gpu-1", doomed, steady)
    await doomed.until_ready()
    await steady.until_ready()
    async with sdk_of(doomed) as lost, sdk_of(steady) as sdk:
        undisturbed = await ask(sdk, STORY, max_tokens=N_TOKENS)
        cut, kept = [await Chat.begin(one, STORY, max_tokens=N_TOKENS) for one in (lost, sdk)]
        await asyncio.gather(cut.read(3), kept.read(3))
        assert worker.health()["inflight"] == 2
        await doomed.kill()
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            await cut.rest()
        await until(lambda: worker.health()["inflight"] == 1, f"{worker} cancels what nobody waits for")
        assert worker.status("/ready") == 200
        await doomed.start()
        await doomed.until_ready()
        assert (await kept.rest()).text == undisturbed.text
    async with sdk_of(doomed) as sdk:
        assert (await ask(sdk, STORY, max_tokens=N_TOKENS)).text == undisturbed.text
    assert len(worker.lines("is attached to", steady.control_url)) == 1
    assert len(worker.lines("is attached to", doomed.control_url)) == 2
    await doomed.quiet()
    await steady.quiet()


async def test_an_ingress_restarted_again_and_again_under_load_is_found_each_time(fleet: Fleet) -> None:
    ingress = await fleet.ingress()
    workers = await fleet.workers(ingress, "gpu-1", "gpu-2")
    for n_lives in range(1, N_RESTARTS + 1):
        async with sdk_of(ingress) as sdk:
            chats = [await Chat.begin(sdk, STORY, max_tokens=N_TOKENS) for _ in range(N_CLIENTS)]
            await ingress.kill()
            for chat in chats:
                with pytest.raises((openai.APIError, httpx.HTTPError)):
                    await chat.rest()
        await ingress.start()
        await ingress.until_attached(len(workers))
        for worker in workers:
            await until_said(worker, n_lives + 1)
        async with sdk_of(ingress) as sdk:
            assert (await ask(sdk, STORY, max_tokens=5)).text
        await ingress.quiet()


async def until_said(worker: Worker, n_times: int) -> None:
    """Wait until the worker has logged its attachment, too: that many times in all."""
    await until(lambda: len(worker.lines("is attached to")) == n_times, f"{worker} has said so")


async def test_a_rolling_restart_of_the_workers_under_load_loses_no_request(fleet: Fleet) -> None:
    ingress = await fleet.ingress()
    workers = await fleet.workers(ingress, "gpu-1", "gpu-2")
    is_over = asyncio.Event()

    async def client() -> list[Answer]:
        answers = []
        while not is_over.is_set():
            answers.append(await ask(sdk, STORY, max_tokens=60))
        return answers

    async with sdk_of(ingress) as sdk:
        clients = [asyncio.create_task(client()) for _ in range(N_CLIENTS)]
        for worker in workers:
            await ingress.until(lambda health: health["lanes"]["streaming"] >= 2)
            assert await worker.stop() == 0
            await worker.start()
            await worker.until_attached()
        is_over.set()
        answers = [answer for answers in await asyncio.gather(*clients) for answer in answers]
    assert len({answer.text for answer in answers}) == 1
    health = await ingress.quiet()
    assert health["finished"] == len(answers) > N_CLIENTS
    assert not ingress.lines("WARNING")
