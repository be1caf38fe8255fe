"""Token limits and sampling, over the real product: never more than asked for, the same for the same seed."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from tests.serve.client import STORY, Client, Said, chat, client_of
from tests.serve.process import LlmServe

pytestmark = pytest.mark.model

N_CTX = 512  # of the narrow server


@pytest.fixture
async def server(narrow: LlmServe) -> AsyncIterator[LlmServe]:
    yield narrow
    await narrow.quiet()


async def prompt_of(client: Client, n_tokens: int) -> str:
    """A question of exactly so many tokens, those of the template included, whose answer is long."""
    n_others: int = (await client.whole(STORY, max_tokens=1)).usage["prompt_tokens"]
    return STORY + " long" * (n_tokens - n_others)


# --- the context ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{}, {"max_tokens": N_CTX}, {"max_completion_tokens": 10**9}])
async def test_generation_ends_at_the_edge_of_the_context(client: Client, limit: dict[str, int]) -> None:
    prompt = await prompt_of(client, N_CTX * 9 // 10)
    answer = await client.streamed(prompt, **limit)
    assert answer.usage["prompt_tokens"] == N_CTX * 9 // 10
    assert answer.usage["total_tokens"] == N_CTX
    assert answer.finish_reason == "length"


async def test_a_limit_beyond_the_room_left_is_an_upper_bound(client: Client) -> None:
    prompt = await prompt_of(client, N_CTX // 2)
    answer = await client.whole(prompt, max_tokens=10 * N_CTX)
    assert 1 < answer.usage["completion_tokens"] <= N_CTX // 2


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_prompt_that_leaves_room_for_one_token_gets_one(client: Client, stream: bool) -> None:
    prompt = await prompt_of(client, N_CTX - 1)
    answer = await (client.streamed if stream else client.whole)(prompt)
    assert answer.usage["completion_tokens"] == 1
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("n_tokens", [N_CTX, 20 * N_CTX])
async def test_a_prompt_that_leaves_room_for_none_is_a_400_with_both_numbers(
    client: Client, n_tokens: int
) -> None:
    refused = await client.post(chat(await prompt_of(client, n_tokens), max_tokens=1))
    error = refused.json()["error"]
    assert refused.status_code == 400
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (n_tokens, N_CTX)


# --- max_tokens -----------------------------------------------------------------------------------------

FIELDS = ("max_tokens", "max_completion_tokens")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [0, -1, -2, 1.5, "10", True, [], {}, "inf"])
async def test_a_limit_that_is_none_is_a_400_that_names_it(client: Client, field: str, value: object) -> None:
    refused = await client.post(chat("hi", **{field: value}))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == field


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [None, 10**9, 1e9, 2**62])
async def test_a_limit_that_is_never_met_changes_nothing(
    client: Client, field: str, value: float | None
) -> None:
    assert await client.whole("hi", **{field: value}) == await client.whole("hi")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("n_tokens", [1, 2, 7])
async def test_exactly_as_many_tokens_come_as_were_asked_for(
    client: Client, field: str, n_tokens: int
) -> None:
    answer = await client.whole(STORY, **{field: n_tokens})
    assert answer.usage["completion_tokens"] == n_tokens
    assert answer.finish_reason == "length"


async def test_max_completion_tokens_wins_over_max_tokens(client: Client) -> None:
    answer = await client.whole(STORY, max_tokens=7, max_completion_tokens=3)
    assert answer.usage["completion_tokens"] == 3


# --- chance ---------------------------------------------------------------------------------------------


async def test_a_seed_gives_the_same_answer_alone_again_and_beside_others(roomy: LlmServe) -> None:
    async with client_of(roomy) as client:
        draw = partial(client.whole, STORY, temperature=1, max_tokens=24)
        alone = [await draw(seed=7) for _ in range(3)]
        beside = await asyncio.gather(*(draw(seed=seed) for seed in (7, 8, 9, 7)))
        assert alone == [alone[0]] * 3
        assert beside[0] == beside[3] == alone[0]
        assert len({answer.text for answer in beside}) == 3
    await roomy.quiet()


async def test_temperature_0_needs_no_seed(client: Client) -> None:
    answers = [await client.whole(STORY, max_tokens=12, **seed) for seed in ({}, {"seed": 1}, {"seed": 2})]
    assert answers == [answers[0]] * 3


async def test_without_a_seed_answers_differ(client: Client) -> None:
    draw = partial(client.whole, STORY, temperature=1, max_tokens=12)
    answers: list[Said] = [await draw() for _ in range(3)]
    assert len({answer.text for answer in answers}) > 1
