"""The network between a worker and its ingress, cut and healed: nothing is lost, nothing is said twice.

The worker runs in a network of its own, behind a line that drops what it is given, or lets little through.
Its clients are with the ingress, and notice nothing.
"""

import asyncio

import openai
import pytest

from tests.network.chat import Chat, ask, sdk_of
from tests.network.fleet import Fleet, Ingress, Worker, until
from tests.network.line import Line

pytestmark = [pytest.mark.model, pytest.mark.slow]

STORY = "Tell a story about a lighthouse."
N_TOKENS = 200
SHORT_CUT_S = 2.0
SOON_S = 1.0
SAMPLED = {"temperature": 1, "seed": 7}


async def fleet_with_line(fleet: Fleet, line: Line, *flags: str) -> tuple[Ingress, Worker]:
    """An ingress, and a worker at the far end of the line."""
    pki = fleet.another_certificate(line.near)
    ingress = fleet.new_ingress(*flags, pki=pki, host=line.near)
    far = fleet.new_worker("far", ingress, line=line)
    ingress.launch()
    await far.start()
    await far.until_attached()
    return ingress, far


async def test_a_cut_of_2_s_is_a_pause(line: Line, fleet: Fleet) -> None:
    ingress, far = await fleet_with_line(fleet, line)
    async with sdk_of(ingress) as sdk:
        undisturbed = await ask(sdk, STORY, max_tokens=N_TOKENS, **SAMPLED)
        chat = await Chat.begin(sdk, STORY, max_tokens=N_TOKENS, **SAMPLED)
        await chat.read(5)
        line.cut()
        await asyncio.sleep(SHORT_CUT_S)
        line.heal()
        answer = await chat.rest()
        assert (answer.text, answer.usage.total_tokens) == (undisturbed.text, undisturbed.usage.total_tokens)
    assert len(far.lines("is attached to")) == 1
    assert not (ingress.lines("WARNING") + far.lines("WARNING"))
    health = await ingress.quiet()
    assert (health["finished"], health["dropped_frames"]) == (2, 0)


async def test_a_longer_cut_is_a_death_and_the_worker_takes_the_place_of_its_old_connection(
    line: Line, fleet: Fleet
) -> None:
    patience = ("--heartbeat-timeout", "2", "--no-worker-timeout", "30")
    ingress, far = await fleet_with_line(fleet, line, *patience)
    async with sdk_of(ingress) as sdk:
        undisturbed = await ask(sdk, STORY, max_tokens=N_TOKENS, **SAMPLED)
        chat = await Chat.begin(sdk, STORY, max_tokens=N_TOKENS, **SAMPLED)
        await chat.read(5)
        line.cut()
        near = await near_worker(fleet, ingress)
        await chat.read(50)
        await ingress.until(lambda _: ingress.holders() == [near.name])
        await far.until_says("it is dialled until it answers")
        line.heal()
        await ingress.until_attached(2)
        assert len(ingress.health()["workers"]) == 2
        answer = await chat.rest()
        assert (answer.text, answer.usage.total_tokens) == (undisturbed.text, undisturbed.usage.total_tokens)
        await ingress.quiet()

        await near.kill()
        assert (await ask(sdk, STORY, max_tokens=N_TOKENS, **SAMPLED)).text == undisturbed.text
    assert len(far.lines("is attached to")) == 2
    await ingress.quiet()


async def test_a_line_cut_one_way_is_a_death_too_and_the_worker_comes_back_when_it_heals(
    line: Line, fleet: Fleet
) -> None:
    ingress, far = await fleet_with_line(fleet, line, "--heartbeat-timeout", "2")
    async with sdk_of(ingress) as sdk:
        undisturbed = await ask(sdk, STORY, max_tokens=N_TOKENS, **SAMPLED)
        near = await near_worker(fleet, ingress)
        near.freeze()  # loaded, and out of the way
        await ingress.until_attached(1)
        chat, leaving = [await Chat.begin(sdk, STORY, max_tokens=N_TOKENS, **SAMPLED) for _ in range(2)]
        assert ingress.holders() == [far.name]
        line.cut_outward()
        near.thaw()
        # What the ingress says arrives, but no answer to it.
        await ingress.until(lambda health: health["workers"][0]["heard_ago_s"] > 1)
        await leaving.leave()
        await ingress.until(lambda _: ingress.holders() == [near.name])
        line.heal()
        assert (await chat.rest()).text == undisturbed.text
        await ingress.until_attached(2)
    await ingress.quiet()
    assert len(far.lines("is attached to")) == 2


async def test_a_healed_cut_costs_the_one_attempt_that_was_lost(line: Line, fleet: Fleet) -> None:
    patience = ("--heartbeat-timeout", "2", "--no-worker-timeout", "30", "--max-attempts", "2")
    ingress, far = await fleet_with_line(fleet, line, *patience)
    async with sdk_of(ingress) as sdk:
        undisturbed = await ask(sdk, STORY, max_tokens=N_TOKENS, **SAMPLED)
        chat = await Chat.begin(sdk, STORY, max_tokens=N_TOKENS, **SAMPLED)
        await chat.read(5)
        line.cut()
        # Its heartbeats, and the end of its connection behind them, lie in the line until it heals.
        await far.until_says("it is dialled until it answers")
        await ingress.until_says("nothing heard from it for 2 s")
        line.heal()
        assert (await chat.rest()).text == undisturbed.text
    await ingress.quiet()


async def test_a_request_of_10_mib_on_a_slow_line_does_not_hold_up_the_end_of_another(
    line: Line, fleet: Fleet
) -> None:
    ingress, far = await fleet_with_line(fleet, line)
    async with sdk_of(ingress) as sdk:
        chat = await Chat.begin(sdk, STORY, max_tokens=2 * N_TOKENS)
        await chat.read(5)
        line.slow_inward(kbit_per_s=16_000)  # 5 s for the long one
        long = asyncio.create_task(ask(sdk, "word " * 2 * 1024 * 1024))
        await ingress.until(lambda health: health["workers"][0]["lanes"] == 2)
        assert far.health()["decoding"]
        await chat.leave()
        await until(lambda: not far.health()["decoding"], f"{far} has stopped", SOON_S)
        assert not long.done()
        with pytest.raises(openai.BadRequestError):
            await long
    await ingress.quiet()


async def near_worker(fleet: Fleet, ingress: Ingress) -> Worker:
    """A worker on this machine."""
    near = fleet.new_worker("near", ingress)
    await near.start()
    await near.until_attached()
    return near
