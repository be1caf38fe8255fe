"""Work goes to whoever has room: of two equal workers neither is left out, however alike requests begin."""

import asyncio

import pytest

from tests.network.chat import ask, sdk_of
from tests.network.standing import Standing

pytestmark = pytest.mark.model

N_REQUESTS, N_AT_ONCE = 100, 8
SYSTEM_PROMPT = "You know the lamps, the stones and the boats of every harbour. " * 14  # some 200 tokens


@pytest.mark.parametrize("n_questions", [N_REQUESTS, pytest.param(1, marks=pytest.mark.slow)])
async def test_equal_workers_get_equal_shares_of_requests_that_begin_alike(
    pair: Standing, n_questions: int
) -> None:
    before = granted(pair)
    at_once = asyncio.Semaphore(N_AT_ONCE)

    async def ask_one(n: int) -> None:
        async with at_once:
            await ask(sdk, f"{SYSTEM_PROMPT}Which lamp is number {n % n_questions}?", max_tokens=3)

    async with sdk_of(pair.ingress) as sdk:
        await asyncio.gather(*(ask_one(n) for n in range(N_REQUESTS)))
    shares = {name: n - before[name] for name, n in granted(pair).items()}
    assert sum(shares.values()) == N_REQUESTS
    assert all(40 <= share <= 60 for share in shares.values()), shares
    await pair.ingress.quiet()


def granted(ring: Standing) -> dict[str, int]:
    return {worker["name"]: worker["granted"] for worker in ring.ingress.health()["workers"]}
