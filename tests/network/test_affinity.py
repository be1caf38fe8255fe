"""Conversations over several workers: turns go back to who has them, and elsewhere when that is lost."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage

from tests.network.chat import sdk_of
from tests.network.fleet import MODEL, Fleet, Ingress
from tests.network.standing import Standing

pytestmark = pytest.mark.model

SYSTEM = "You keep the logbook of a harbour, and answer in one short sentence about its boats and lamps."
N_TURNS = 4
ANSWER_TOKENS = 12
REUSED = 0.9  # of the turn before, prompt and answer


@dataclass(eq=False)
class Talk:
    """A conversation as an unchanged client keeps it: everything said so far goes along with each turn."""

    topic: str
    fields: dict[str, Any] = field(default_factory=dict)
    messages: list[Any] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])
    usages: list[CompletionUsage] = field(default_factory=list)

    async def turn(self, sdk: openai.AsyncOpenAI) -> None:
        question = f"{self.topic}, entry {len(self.usages)}: what is to be written down about it tonight?"
        self.messages.append({"role": "user", "content": question})
        answer = await sdk.chat.completions.create(
            model=MODEL,
            messages=self.messages,
            temperature=0,
            max_tokens=ANSWER_TOKENS,
            extra_body=self.fields,
        )
        assert answer.usage is not None
        self.usages.append(answer.usage)
        self.messages.append({"role": "assistant", "content": answer.choices[0].message.content})

    @property
    def reused(self) -> list[bool]:
        """Of each turn but the first, whether what the one before had computed was there."""
        pairs = zip(self.usages, self.usages[1:], strict=False)
        return [n_cached(later) >= REUSED * earlier.total_tokens for earlier, later in pairs]


def n_cached(usage: CompletionUsage) -> int:
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


def affinity(ingress: Ingress) -> dict[str, int]:
    facts: dict[str, int] = ingress.health()["affinity"]
    return facts


def granted(ring: Standing) -> dict[str, int]:
    return {worker["name"]: worker["granted"] for worker in ring.ingress.health()["workers"]}


async def test_the_turns_of_conversations_that_run_side_by_side_find_what_was_computed(
    pair: Standing,
) -> None:
    before, granted_before = affinity(pair.ingress), granted(pair)
    talks = [Talk(f"Boat number {n}") for n in range(6)]
    async with sdk_of(pair.ingress) as sdk:
        for _ in range(N_TURNS):
            for some in (talks[:3], talks[3:]):
                await asyncio.gather(*(talk.turn(sdk) for talk in some))
    n_turns = len(talks) * (N_TURNS - 1)
    rise = {name: n - before[name] for name, n in affinity(pair.ingress).items()}
    assert rise["known"] == n_turns
    assert rise["returned_at_once"] >= 0.95 * rise["had_room"] > 0
    reused = [each for talk in talks for each in talk.reused]
    assert len(reused) == n_turns
    assert sum(reused) >= rise["returned"] >= 0.8 * n_turns, (reused, rise)
    # Both have part of them: a system prompt that all share pins none.
    assert all(n > granted_before[name] for name, n in granted(pair).items())
    await pair.ingress.quiet()


async def test_a_conversation_whose_holder_is_killed_goes_on_at_the_other(pair: Standing) -> None:
    talk = Talk("The lighthouse", {"prompt_cache_key": "lighthouse"})
    async with sdk_of(pair.ingress) as sdk:
        counts = granted(pair)
        for _ in range(2):
            await talk.turn(sdk)
        assert talk.reused == [True]
        (name,) = (name for name, n in granted(pair).items() if n > counts[name])
        (holder,) = (worker for worker in pair.workers if worker.name == name)
        await holder.kill()
        for _ in range(2):
            await talk.turn(sdk)
    assert n_cached(talk.usages[2]) < talk.usages[1].total_tokens  # computed anew
    assert talk.reused[-1]
    health = await pair.ingress.quiet()
    assert [worker["name"] for worker in health["workers"]] == [pair.other(holder).name]


async def test_turns_that_come_by_two_ingresses_reach_the_worker_that_has_the_conversation(
    fleet: Fleet,
) -> None:
    ingresses = [await fleet.ingress(name=name) for name in ("ingress-a", "ingress-b")]
    for name in ("gpu-1", "gpu-2"):
        await fleet.worker(name, *ingresses)
    for ingress in ingresses:
        await ingress.until_attached(2)
    talks = [Talk(f"Session {key}", {"prompt_cache_key": key}) for key in ("s-1", "s-12", "s-2", "s-21")]
    async with sdk_of(ingresses[0]) as one, sdk_of(ingresses[1]) as other:
        for n in range(N_TURNS):
            for i, talk in enumerate(talks):
                await talk.turn((one, other)[(n + i) % 2])
    assert [talk.reused for talk in talks] == [[True] * (N_TURNS - 1)] * len(talks)
    for ingress in ingresses:
        await ingress.quiet()
