"""Workers that are heard and do nothing, and workers that are heard and have much to do."""

import asyncio
import time

import openai
import pytest

from tests.network.chat import Chat, ask, sdk_of
from tests.network.fleet import Fleet
from tests.network.mortal_worker import STALLING

pytestmark = pytest.mark.model

N_TOKENS = 40
CLAIM_TIMEOUT_S = 2.0
SLACK_S = 2.0
LONG_QUESTION = "Which of these is a colour: " + "lamp, stone, " * 250 + "blue?"  # some 1000 tokens


async def test_an_engine_that_stops_in_mid_answer_loses_it_to_another_and_gets_nothing_more(
    fleet: Fleet,
) -> None:
    ingress = await fleet.ingress("--claim-timeout", f"{CLAIM_TIMEOUT_S:g}", "--no-worker-timeout", "1")
    stalling = fleet.new_worker("gpu-1", ingress, program="tests.network.mortal_worker")
    await stalling.start()
    await stalling.until_attached()
    sound = await fleet.worker("gpu-2", ingress)
    async with sdk_of(ingress) as sdk:
        chat = await Chat.begin(sdk, STALLING, max_tokens=N_TOKENS)  # the first who came is chosen
        assert ingress.holders() == [stalling.name]
        await chat.read(1)
        began_at = time.monotonic()
        await ingress.until_says("gpu-1", "has said nothing of it for 2 s")
        assert CLAIM_TIMEOUT_S < time.monotonic() - began_at < CLAIM_TIMEOUT_S + SLACK_S
        answer = await chat.rest()

        # It is back, says why it takes nothing, and whoever asks is answered by the other.
        await stalling.until_says("the engine stands still")
        await ingress.until_attached(2)
        await ingress.until(lambda health: all(_takes_nothing(one) for one in health["workers"][1:]))
        answers = await asyncio.gather(*(ask(sdk, STALLING, max_tokens=N_TOKENS) for _ in range(3)))
        assert {one.text for one in answers} == {answer.text}

        # With no other it is as if there were none.
        await sound.kill()
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(sdk, STALLING, max_tokens=N_TOKENS)
        assert refused.value.status_code == 503
        assert isinstance(refused.value.body, dict)
        assert refused.value.body["reason"] == "no_workers"
    assert len(ingress.lines("has said nothing of it")) == 1
    assert len(stalling.lines("the engine stands still")) == 1


def _takes_nothing(worker: dict[str, object]) -> bool:
    return worker["name"] == "gpu-1" and worker["credit"] == worker["available_slots"] == 0


@pytest.mark.slow
async def test_a_prompt_may_take_longer_than_a_word_about_its_lane(fleet: Fleet) -> None:
    ingress = await fleet.ingress("--claim-timeout", f"{CLAIM_TIMEOUT_S:g}")
    await fleet.worker("gpu-1", ingress, flags=("--ctx-size", "4096"))
    async with sdk_of(ingress) as sdk:
        asked_at = time.monotonic()
        chats = [asyncio.create_task(Chat.begin(sdk, LONG_QUESTION, max_tokens=5)) for _ in range(2)]
        for chat in chats:
            assert (await (await chat).rest()).usage.completion_tokens <= 5
        assert time.monotonic() - asked_at > 2 * CLAIM_TIMEOUT_S, "too short a prompt to tell anything"
    assert not ingress.lines("WARNING")
    await ingress.quiet()
