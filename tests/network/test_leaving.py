"""Clients that leave, each in another state of its lane: places, slots and promised cells all come back."""

import asyncio

import pytest

from tests.network.chat import Chat, ask, sdk_of
from tests.network.fleet import until
from tests.network.standing import Standing

pytestmark = pytest.mark.model

STORY = "Tell a story about a lighthouse."
N_TOKENS = 400  # seconds of work, were it not stopped
LONG_QUESTION = "Which of these is a colour: " + "lamp, stone, " * 110 + "blue?"
SOON_S = 2.0  # far less than the work that is given up takes


async def abandon(asking: asyncio.Task[Chat]) -> None:
    """Leave before the answer has a head."""
    assert not asking.done()
    asking.cancel()
    await asyncio.wait([asking])


async def test_clients_that_leave_in_any_state_give_everything_back(lone: Standing) -> None:
    ingress, (worker,) = lone.ingress, lone.workers
    before = ingress.health()
    async with sdk_of(ingress) as sdk:
        # Streaming, and parked behind it.
        streams = [await Chat.begin(sdk, STORY, max_tokens=N_TOKENS) for _ in range(2)]
        await asyncio.gather(*(stream.read(3) for stream in streams))
        parked = asyncio.create_task(Chat.begin(sdk, STORY, max_tokens=N_TOKENS))
        await ingress.until(lambda health: health["lanes"]["waiting"] == 1)
        await abandon(parked)
        await ingress.until(lambda health: health["open"] == 2, SOON_S)
        await asyncio.gather(*(stream.leave() for stream in streams))
        await ingress.quiet()

        # In its prompt.
        prompting = asyncio.create_task(Chat.begin(sdk, LONG_QUESTION, max_tokens=50))
        await until(lambda: worker.health()["kv_promised_tokens"], f"{worker} has begun with the prompt")
        assert not worker.health()["decoding"]
        await abandon(prompting)
        await until(lambda: not worker.health()["kv_promised_tokens"], f"{worker} has stopped", SOON_S)
        await ingress.quiet()

        # Claimed, by a worker that does not know yet.
        worker.freeze()
        claimed = asyncio.create_task(Chat.begin(sdk, STORY, max_tokens=N_TOKENS))
        await ingress.until(lambda health: health["lanes"]["claimed"] == 1)
        await abandon(claimed)
        await ingress.until(lambda health: health["open"] == 0, SOON_S)
        worker.thaw()
        health = await ingress.quiet()
        assert (health["cancelled"] - before["cancelled"], health["accepted"] - before["accepted"]) == (5, 5)
        assert (await ask(sdk, STORY, max_tokens=5)).text


async def test_a_client_that_leaves_between_two_workers_is_not_brought_to_the_second(pair: Standing) -> None:
    ingress, (worker, _) = pair.ingress, pair.workers
    before = ingress.health()
    async with sdk_of(ingress) as sdk:
        chat = await Chat.begin(sdk, STORY, max_tokens=N_TOKENS)
        await chat.read(3)
        await pair.kill_all()
        await ingress.until(lambda health: health["lanes"]["waiting"] == 1)
        await chat.leave()
        await ingress.until(lambda health: health["open"] == 0, SOON_S)
        await worker.start()
        await worker.until_attached()
        assert (await ask(sdk, STORY, max_tokens=5)).text
        assert worker.health()["jobs"] == 0
    health = await ingress.quiet()
    assert (health["cancelled"] - before["cancelled"], health["finished"] - before["finished"]) == (1, 1)
