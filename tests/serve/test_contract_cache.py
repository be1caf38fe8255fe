"""What the next turn of a chat costs, over the real product: `cached_tokens` tells."""

from collections.abc import AsyncIterator

import pytest

from tests.serve.client import MODEL, Client, Json, Said
from tests.serve.process import LlmServe

pytestmark = pytest.mark.model


@pytest.fixture
async def server(roomy: LlmServe) -> AsyncIterator[LlmServe]:
    yield roomy
    await roomy.quiet()


async def say(client: Client, messages: list[Json], question: str) -> Said:
    """Another turn of a chat; the question and the answer are appended."""
    messages.append({"role": "user", "content": question})
    body = {"model": MODEL, "temperature": 0, "max_tokens": 24, "messages": messages}
    response = await client.post(body)
    assert response.status_code == 200
    said = Said.whole(response.json())
    messages.append({"role": "assistant", "content": said.text})
    return said


async def test_each_turn_of_a_chat_finds_the_turns_before_it(client: Client) -> None:
    chat: list[Json] = [{"role": "system", "content": "You keep a lighthouse and speak of nothing else."}]
    total = 0
    for turn in range(6):
        said = await say(client, chat, f"Question {turn}: what did you see in the night, and who came by?")
        assert said.n_cached >= 0.9 * total
        assert said.n_cached < said.usage["prompt_tokens"]
        total = said.usage["total_tokens"]


async def test_chats_that_share_a_system_prompt_keep_to_their_own(client: Client) -> None:
    system = {"role": "system", "content": "You repeat the last word of what you are told. " * 8}
    # Long enough to be kept: what differs in fewer than 32 tokens is computed anew.
    secrets = ("The word is lantern. " * 10, "The word is whale. " * 10)
    chats: list[list[Json]] = [[system], [system]]
    first = [await say(client, chat, secret) for chat, secret in zip(chats, secrets, strict=True)]
    assert first[1].n_cached > 0.5 * first[1].usage["prompt_tokens"]
    totals = [said.usage["total_tokens"] for said in first]
    for chat, total in zip(chats, totals, strict=True):
        assert (await say(client, chat, "Again.")).n_cached >= 0.9 * total
    assert "whale" not in str(chats[0])
    assert "lantern" not in str(chats[1])
