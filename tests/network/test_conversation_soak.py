"""Many conversations over workers that come and go: each keeps its history, and nothing is left over."""

import asyncio
import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.network.fleet import Fleet, Ingress, Process, Worker, until
from tests.network.turns import INFER, Said, Turn, body, http_of, new_id

pytestmark = [pytest.mark.model, pytest.mark.slow]

N_CONVERSATIONS, N_TURNS = 24, 6
LEAVES = 0.2  # of the turns whose client leaves once before it asks again
QUESTION = "What is my word?"
WHOLE_S = 300  # for all conversations, on a slow machine
WORDS = ("lamp", "stone", "boat", "bread", "chair", "cloud", "horse", "knife")
N_REQUESTS, N_WARM_UP = 2000, 500
SLOPE_BYTES = 1024  # of resident memory a request, at most


@dataclass(slots=True)
class Conversation:
    """One client's, and what it was told."""

    number: int
    id: str = field(default_factory=new_id)
    told: list[dict[str, str]] = field(default_factory=list)

    def prompt(self) -> str:
        word = WORDS[self.number % len(WORDS)]
        return f"My word is {word} {self.number}." if not self.told else f"Say {word} {len(self.told)}."


class Clients:
    """They ask again what was refused with a reason, failed, or was left."""

    def __init__(self, http: httpx.AsyncClient, chance: random.Random) -> None:
        self._http = http
        self._chance = chance
        self.n_answered = 0

    async def converse(self, conversation: Conversation) -> None:
        for _ in range(N_TURNS):
            if self._chance.random() < LEAVES:
                await self._leave(conversation)
            prompt = conversation.prompt()
            said = await self.say(conversation, prompt)
            conversation.told += [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": said.text},
            ]
            self.n_answered += 1

    async def say(self, conversation: Conversation, prompt: str) -> Said:
        while True:
            turn = await self._begin(conversation, prompt)
            try:
                return await turn.rest()
            except KeyError:  # an error among its events, and so the last
                assert turn.events[-1]["error"]["code"] == "worker_unavailable"

    async def _begin(self, conversation: Conversation, prompt: str) -> Turn:
        while True:
            asked = body(prompt, conversation.id, max_tokens=8)
            response = await self._http.send(self._http.build_request("POST", INFER, json=asked), stream=True)
            if response.status_code == 200:
                return Turn(response)
            await response.aread()
            assert response.status_code in (502, 503), response.text
            error = response.json()["error"]
            assert error.get("reason") or error["code"] == "worker_unavailable", error
            await asyncio.sleep(0.1)

    async def _leave(self, conversation: Conversation) -> None:
        turn = await self._begin(conversation, "Tell a long story.")
        await turn.read(1)
        await turn.leave()


async def trouble(clients: Clients, doomed: Worker, drained: Worker) -> None:
    """Kill one worker in the middle and start it again, then have the other end in peace and come back."""
    await until(lambda: clients.n_answered > 40, "enough for the middle", WHOLE_S)
    await doomed.kill()
    await doomed.start()
    await until(lambda: clients.n_answered > 90, "enough for the end", WHOLE_S)
    await drained.stop()
    await drained.start()


async def expected(http: httpx.AsyncClient, conversation: Conversation) -> Said:
    """What a client hears that keeps the conversation itself."""
    messages = [*conversation.told, {"role": "user", "content": QUESTION}]
    asked = {**body("", "", max_tokens=8), "messages": messages}
    answer = (await http.post("/v1/chat/completions", json=asked)).json()
    (choice,) = answer["choices"]
    return Said(choice["message"]["content"], choice["finish_reason"], answer["usage"])


async def test_conversations_survive_workers_that_are_killed_and_drained(fleet: Fleet) -> None:
    ingress = await fleet.ingress("--at-cap", "park")
    doomed, drained = await fleet.worker("gpu-1", ingress), await fleet.worker("gpu-2", ingress)
    conversations = [Conversation(n) for n in range(N_CONVERSATIONS)]
    async with http_of(ingress) as http:
        clients = Clients(http, random.Random(7))
        troubled = asyncio.create_task(trouble(clients, doomed, drained))
        await asyncio.gather(*map(clients.converse, conversations))
        await asyncio.wait_for(troubled, 60)
        for conversation in conversations:
            said = await clients.say(conversation, QUESTION)
            assert said == await expected(http, conversation), conversation
    await nothing_is_left(ingress, doomed, drained)


async def nothing_is_left(ingress: Ingress, *workers: Worker) -> None:
    await ingress.quiet()
    for worker in workers:
        health = worker.health()
        assert (health["inflight"], health["kv_promised_tokens"]) == (0, 0), worker


async def test_memory_does_not_grow_with_the_requests(fleet: Fleet) -> None:
    ingress = await fleet.ingress()
    worker = await fleet.worker("gpu-1", ingress, flags=("--cache-ram-mib", "16"))
    resident: dict[Process, list[int]] = {ingress: [], worker: []}  # after each conversation
    async with http_of(ingress) as http:
        clients = Clients(http, random.Random(7))
        for n in range(N_REQUESTS // N_TURNS):
            conversation = Conversation(n)
            for _ in range(N_TURNS):
                await clients.say(conversation, conversation.prompt())
            await http.delete(f"/coordinator/sessions/{conversation.id}")
            for process, sizes in resident.items():
                sizes.append(resident_bytes(process))
    slopes = {str(process): slope(sizes[N_WARM_UP // N_TURNS :]) for process, sizes in resident.items()}
    assert max(slopes.values()) < SLOPE_BYTES, slopes
    await nothing_is_left(ingress, worker)


def slope(sizes: list[int]) -> float:
    """Bytes a request that a process grows by.

    Of all sizes, not from one to another: the cache in host memory lets whole conversations of 4 MiB go, so
    that two moments differ by that, which over 1,500 requests is 3 KiB for each.
    """
    n_requests = range(0, len(sizes) * N_TURNS, N_TURNS)
    return statistics.linear_regression(n_requests, sizes).slope


def resident_bytes(process: Process) -> int:
    fields = Path(f"/proc/{process.process.pid}/status").read_text().split("VmRSS:")
    return int(fields[1].split()[0]) << 10
