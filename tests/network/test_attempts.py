"""A request that kills every worker it meets is given up before the fleet is gone."""

import openai
import pytest

from tests.network.chat import Chat, ask, sdk_of
from tests.network.fleet import Fleet
from tests.network.mortal_worker import DEADLY

pytestmark = pytest.mark.model

STORY = "Tell a story about a lighthouse."
N_ATTEMPTS = 2


@pytest.mark.slow
async def test_a_deadly_request_is_given_up_and_the_fleet_serves_on(fleet: Fleet) -> None:
    ingress = await fleet.ingress("--max-attempts", str(N_ATTEMPTS))
    workers = [
        fleet.new_worker(f"gpu-{n}", ingress, program="tests.network.mortal_worker") for n in (1, 2, 3)
    ]
    for worker in workers:
        worker.launch()
    for worker in workers:
        await worker.until_attached()
    async with sdk_of(ingress) as sdk:
        undisturbed = await ask(sdk, STORY, max_tokens=100)
        bystander = await Chat.begin(sdk, STORY, max_tokens=100)
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(sdk, DEADLY)
        assert refused.value.status_code == 502
        assert [worker.is_running for worker in workers].count(False) == N_ATTEMPTS
        assert (await bystander.rest()).text == undisturbed.text

        assert (await ask(sdk, STORY, max_tokens=100)).text == undisturbed.text
    await ingress.quiet()
