"""Workers lost while they answer a conversation that outgrew the context: the client reads on.

Prompt and answer stay within 256 cells, so the undisturbed run is the oracle.
"""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.network.chat import Answer, Chat, ask, sdk_of
from tests.network.fleet import MODEL, Fleet, Ingress, Worker, until

pytestmark = pytest.mark.model

N_CTX = 256
N_TOKENS = 40
QUESTION = "Tell a story about one of them."
AUTO = {"extra_body": {"truncation": "auto"}}
OUTGROWN: list[Any] = [
    {"role": "system", "content": "You tell stories."},
    *(
        turn
        for i in range(6)
        for turn in (
            {"role": "user", "content": f"My duck number {i} sleeps in a box near the old stove every day."},
            {"role": "assistant", "content": f"How lovely that duck number {i} must be, and how warm!"},
        )
    ),
]


def told(answer: Answer) -> dict[str, int]:
    assert answer.usage.model_extra is not None
    compaction: dict[str, int] = answer.usage.model_extra["compaction"]
    return compaction


def n_summaries(worker: Worker) -> int:
    return int(worker.health()["summaries"])


async def pair_of(fleet: Fleet, *flags: str) -> tuple[Ingress, list[Worker]]:
    ingress = await fleet.ingress()
    return ingress, await fleet.workers(ingress, "gpu-1", "gpu-2", flags=("--ctx-size", str(N_CTX), *flags))


async def test_a_stream_of_a_killed_worker_reads_on_from_the_same_shortened_conversation(
    fleet: Fleet,
) -> None:
    ingress, workers = await pair_of(fleet, "--compaction", "summary")
    async with sdk_of(ingress) as sdk:
        undisturbed = await ask(sdk, QUESTION, history=OUTGROWN, max_tokens=N_TOKENS)
        chat = await Chat.begin(sdk, QUESTION, history=OUTGROWN, max_tokens=N_TOKENS)
        await chat.read(10)
        lost = fleet.holder(ingress)
        (heir,) = (worker for worker in workers if worker is not lost)
        n_before = n_summaries(heir)
        await lost.kill()
        answer = await chat.rest()
    assert answer.text == undisturbed.text
    assert answer.finish_reason == undisturbed.finish_reason
    assert n_summaries(heir) == n_before, "the heir has the summary from the one it follows"
    facts = told(answer)
    assert {**facts, "summaries": 0} == {**told(undisturbed), "summaries": 0}
    assert facts["tokens_after"] == answer.usage.prompt_tokens <= N_CTX // 2 < N_CTX < facts["tokens_before"]
    await ingress.quiet()


async def test_a_worker_killed_in_mid_summary_leaves_all_of_it_to_another(fleet: Fleet) -> None:
    ingress, workers = await pair_of(fleet)
    async with sdk_of(ingress) as sdk:
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(sdk, QUESTION, history=OUTGROWN, max_tokens=N_TOKENS)
        assert refused.value.code == "context_length_exceeded"
        asked = asyncio.create_task(ask(sdk, QUESTION, history=OUTGROWN, max_tokens=N_TOKENS, **AUTO))
        await ingress.until(lambda _: ingress.holders())
        lost = fleet.holder(ingress)
        await until(lambda: n_summaries(lost), f"{lost} summarises")
        await lost.kill()
        answer = await asked
        (heir,) = (worker for worker in workers if worker is not lost)
        assert told(answer)["summaries"] == n_summaries(heir) > 0
        again = await ask(sdk, QUESTION, history=OUTGROWN, max_tokens=N_TOKENS, **AUTO)
        assert again.text == answer.text
    await ingress.quiet()


async def test_a_client_that_leaves_in_mid_summary_leaves_no_slot_taken(fleet: Fleet) -> None:
    ingress = await fleet.ingress()
    worker = await fleet.worker("gpu-1", ingress, flags=("--ctx-size", str(N_CTX)))
    body = {
        "model": MODEL,
        "messages": [*OUTGROWN, {"role": "user", "content": QUESTION}],
        "truncation": "auto",
    }
    async with httpx.AsyncClient() as http:
        asked = asyncio.create_task(http.post(f"{ingress.url}/v1/chat/completions", json=body))
        await until(lambda: n_summaries(worker), f"{worker} summarises")
        asked.cancel()
        await asyncio.wait([asked])
    health = await ingress.quiet()
    assert health["cancelled"] == 1
