"""A request that kills every worker it meets is given up before the fleet is gone."""

import openai
import pytest

from tests.network.chat import Chat, ask, sdk_of
from tests.network.fleet import Fleet, Ingress, Worker, until
from tests.network.mortal_worker import DEADLY, DEADLY_LATER, N_TOKENS

pytestmark = [pytest.mark.model, pytest.mark.slow]

STORY, STORY_TOKENS = "Tell a story about a lighthouse.", 60
N_ATTEMPTS = 2


async def mortal_fleet(fleet: Fleet) -> tuple[Ingress, list[Worker]]:
    """An ingress, and one worker more than a request may lose."""
    ingress = await fleet.ingress("--max-attempts", str(N_ATTEMPTS))
    workers = [
        fleet.new_worker(f"gpu-{n}", ingress, program="tests.network.mortal_worker")
        for n in range(N_ATTEMPTS + 1)
    ]
    for worker in workers:
        worker.launch()
    for worker in workers:
        await worker.until_attached()
    return ingress, workers


def n_lost(workers: list[Worker]) -> int:
    return [worker.is_running for worker in workers].count(False)


async def test_a_deadly_request_is_given_up_and_the_fleet_serves_on(fleet: Fleet) -> None:
    ingress, workers = await mortal_fleet(fleet)
    async with sdk_of(ingress) as sdk:
        undisturbed = await ask(sdk, STORY, max_tokens=STORY_TOKENS)
        bystander = await Chat.begin(sdk, STORY, max_tokens=STORY_TOKENS)
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(sdk, DEADLY)
        assert refused.value.status_code == 502
        await until(lambda: n_lost(workers) >= N_ATTEMPTS, "their ends")
        assert (await bystander.rest()).text == undisturbed.text

        assert (await ask(sdk, STORY, max_tokens=STORY_TOKENS)).text == undisturbed.text
    assert n_lost(workers) == N_ATTEMPTS
    await ingress.quiet()


async def test_a_request_that_is_deadly_in_mid_answer_is_given_up_where_it_came_to(fleet: Fleet) -> None:
    ingress, workers = await mortal_fleet(fleet)
    async with sdk_of(ingress) as sdk:
        bystander = await Chat.begin(sdk, STORY, max_tokens=STORY_TOKENS)
        chat = await Chat.begin(sdk, DEADLY_LATER, max_tokens=STORY_TOKENS)
        with pytest.raises(openai.APIError):
            await chat.rest()
        await until(lambda: n_lost(workers) >= N_ATTEMPTS, "their ends")
        # Each attempt went on from where the one before had come to.
        n_pieces = sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chat.chunks)
        assert N_TOKENS < n_pieces <= N_ATTEMPTS * (N_TOKENS + 1)
        undisturbed = await ask(sdk, STORY, max_tokens=STORY_TOKENS)
        assert (await bystander.rest()).text == undisturbed.text
    assert n_lost(workers) == N_ATTEMPTS
    health = await ingress.quiet()
    assert (health["failed"], health["finished"]) == (1, 2)
