"""Compaction with a real engine: what of a conversation is in the prompt, and that nothing is left behind."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from llm_engine.config import EngineConfig
from llm_engine.engine import Engine
from llm_engine.generation import Delta, GenerateRequest, Generation, Listener, Prepared
from llm_engine.model import Model
from llm_ingress.gateway import Gateway, GatewayConfig, Lane, LaneRequest, LaneState
from llm_worker.compaction import OPENING
from llm_worker.local import LocalRing
from llm_worker.worker import Worker, WorkerConfig
from tests.worker.ring_contract import until

pytestmark = pytest.mark.model

N_CTX = 512
N_ANSWER = 8
ANSWER_S = 120  # on a busy machine
RULE = "Rule HELIOTROPE-41: you are terse, and you like ducks."
SYSTEM = {"role": "system", "content": RULE}
OWNERS = (1, 2, 3)  # of conversations, on two slots
SUMMARISE = "Summarise this conversation"


class WatchedEngine(Engine):
    """An engine that remembers what it was asked."""

    asked: list[Prepared]

    def submit(self, request: GenerateRequest | Prepared, on_event: Listener | None = None) -> Generation:
        assert isinstance(request, Prepared)
        self.asked.append(request)
        return super().submit(request, on_event)


@pytest.fixture(scope="module")
def spawned(smollm2: Path) -> Iterator[WatchedEngine]:
    config = EngineConfig(model=str(smollm2), max_inflight=2, ctx_size=N_CTX, threads=1)
    with WatchedEngine.spawn(config) as engine:
        yield engine


@pytest.fixture
def engine(spawned: WatchedEngine) -> WatchedEngine:
    spawned.asked = []
    return spawned


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Iterator[Model]:
    model = Model.load(smollm2)
    yield model
    model.close()


@dataclass(slots=True)
class Ring:
    """A gateway and its one worker."""

    gateway: Gateway
    worker: Worker
    engine: WatchedEngine

    def ask(self, turns: list[dict[str, str]], **fields: Any) -> Lane:
        name = self.engine.info.name
        body = {"model": name, "messages": turns, "max_tokens": N_ANSWER, "temperature": 0, **fields}
        request = LaneRequest(
            path="/v1/chat/completions",
            body=orjson.dumps({"truncation": "auto", **body}),
            model=name,
            request_id="r",
            tenant="t",
        )
        return self.gateway.open_lane(request, lambda: None)

    async def answer(self, turns: list[dict[str, str]], **fields: Any) -> Any:
        lane = self.ask(turns, **fields)
        await until(lambda: lane.outcome is not None, within_s=ANSWER_S)
        assert lane.state is LaneState.DONE
        return orjson.loads(self.gateway.take(lane))


@asynccontextmanager
async def served(engine: WatchedEngine) -> AsyncIterator[Ring]:
    """All places and promised cells are given back when the block ends."""
    gateway = Gateway(GatewayConfig())
    worker = Worker(engine, WorkerConfig(), [LocalRing(gateway)])
    worker.start()
    await until(lambda: bool(gateway.models()))
    try:
        yield Ring(gateway, worker, engine)
        await until(lambda: gateway.is_idle and engine.capacity().inflight == 0)
        await until(lambda: engine.capacity().kv_promised_tokens == 0)
        assert worker.snapshot().n_jobs == 0
        assert worker.n_free == engine.info.max_inflight
    finally:
        worker.close()


def conversation(n_turns: int, *, first: int = 0) -> list[dict[str, str]]:
    """Pairs of some 50 tokens."""
    turns: list[dict[str, str]] = []
    for i in range(first, first + n_turns):
        says = f"Marker OLD{i:03}. My duck number {i} sleeps in a box near the stove and eats fish every day."
        turns += [{"role": "user", "content": says}, {"role": "assistant", "content": f"Duck {i} is lovely!"}]
    return turns


def question(marker: str) -> dict[str, str]:
    return {"role": "user", "content": f"Marker {marker}: what do my ducks eat?"}


def has_asked_more(engine: WatchedEngine, n_asked: int) -> bool:
    return len(engine.asked) > n_asked


def text_of(model: Model, prepared: Prepared) -> str:
    """The prompt as the model reads it."""
    return b"".join(model.piece(token) for token in prepared.prompt).decode()


async def test_system_and_last_turn_are_in_the_prompt_word_for_word_and_it_has_shrunk(
    engine: WatchedEngine, model: Model
) -> None:
    turns = [SYSTEM, *conversation(14), question("QUIXOTE-77")]
    async with served(engine) as ring:
        answer = await ring.answer(turns)
        n_summaries = ring.worker.snapshot().n_summaries
    *summaries, final = engine.asked
    prompt = text_of(model, final)
    assert RULE in prompt
    assert turns[-1]["content"] in prompt
    assert OPENING in prompt
    assert "OLD000" not in prompt
    told = answer["usage"]["compaction"]
    assert told["tokens_before"] > N_CTX
    assert len(final.prompt) == told["tokens_after"] == answer["usage"]["prompt_tokens"] <= N_CTX // 2
    assert n_summaries == told["summaries"] == len(summaries) > 0
    for summary in summaries:
        assert SUMMARISE in text_of(model, summary)
        assert len(summary.prompt) + summary.max_tokens <= N_CTX
        assert summary.max_tokens <= N_CTX // 8
    assert "OLD000" in text_of(model, summaries[0])
    assert RULE not in text_of(model, summaries[0])


async def test_later_turns_use_the_summary_and_the_next_overflow_extends_it_with_exactly_one_more(
    engine: WatchedEngine, model: Model
) -> None:
    turns, counts = [SYSTEM, *conversation(11)], []
    async with served(engine) as ring:
        for i in range(8):
            answer = await ring.answer([*turns, question(f"Q{i}")])
            counts.append(answer["usage"]["compaction"]["summaries"])
            if len(counts) > 1 and counts[-1] == 0:
                # The prompt begins as the last one did, so that its KV is used.
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
            turns += conversation(1, first=11 + i)
        assert ring.worker.snapshot().n_summaries == sum(counts)
    assert counts[0] >= 1
    assert sum(counts[1:]) in (1, 2)
    assert max(counts[1:]) == 1
    extending = [text_of(model, asked) for asked in engine.asked if SUMMARISE in text_of(model, asked)][-1]
    assert OPENING in extending
    assert "OLD000" not in extending.split("[Conversation]")[1]


async def test_a_stream_after_compaction_says_what_the_whole_answer_says(engine: WatchedEngine) -> None:
    turns = [SYSTEM, *conversation(14), question("STREAM")]
    async with served(engine) as ring:
        whole = await ring.answer(turns)
        lane = ring.ask(turns, stream=True, stream_options={"include_usage": True})
        await until(lambda: lane.outcome is not None, within_s=ANSWER_S)
        events = ring.gateway.take(lane).split(b"\n\n")
    chunks = [orjson.loads(event[6:]) for event in events if event.startswith(b"data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    told = {**whole["usage"]["compaction"], "summaries": 0}  # the second found what the first had written
    assert chunks[-1]["usage"]["compaction"] == told
    assert lane.head is not None
    assert "turns_replaced=" in dict(lane.head.headers)["x-compaction"]


async def test_clients_that_leave_in_mid_summary_leave_nothing_behind(engine: WatchedEngine) -> None:
    async with served(engine) as ring:
        for i in range(4):
            lane = ring.ask([SYSTEM, *conversation(40, first=100 * i), question("GONE")], stream=bool(i % 2))
            n_asked = len(engine.asked)
            await until(partial(has_asked_more, engine, n_asked))
            ring.gateway.leave(lane)
            await until(lambda: engine.capacity().kv_promised_tokens == 0)
        assert len(engine.asked) == 4


@pytest.mark.slow
async def test_more_conversations_than_places_are_all_answered_each_from_its_own(
    engine: WatchedEngine, model: Model
) -> None:
    async with served(engine) as ring:
        asked = [[SYSTEM, *conversation(11, first=100 * i), question(f"OWN{i}")] for i in OWNERS]
        answers = await asyncio.gather(*(ring.answer(turns) for turns in asked))
    assert all(answer["usage"]["compaction"]["summaries"] >= 1 for answer in answers)
    for prepared in engine.asked:
        prompt = text_of(model, prepared)
        owners = {i for i in OWNERS if f"OWN{i}:" in prompt or f"OLD{i}" in prompt}
        assert len(owners) == 1


async def test_off_by_default_it_is_a_400(engine: WatchedEngine) -> None:
    async with served(engine) as ring:
        refused = await ring.answer([SYSTEM, *conversation(14), question("OFF")], truncation=None)
    assert refused["error"]["code"] == "context_length_exceeded"
    assert engine.asked == []


@pytest.mark.parametrize("kind", ["hybrid_model", "sliding_model"])
async def test_models_that_cannot_trim_their_cache_answer_the_shortened_prompt_as_a_fresh_engine_does(
    request: pytest.FixtureRequest, kind: str
) -> None:
    path = str(request.getfixturevalue(kind))
    turns, answers = [SYSTEM, *conversation(11)], []
    with WatchedEngine.spawn(EngineConfig(model=path, max_inflight=2, ctx_size=N_CTX, threads=1)) as engine:
        engine.asked = []
        async with served(engine) as ring:
            for i in range(10):
                answers.append(await ring.answer([*turns, question(f"Q{i}")], seed=3))
                turns += conversation(1, first=11 + i)
            n_summaries = ring.worker.snapshot().n_summaries
    finals = [asked for asked in engine.asked if SUMMARISE not in asked.request.messages[-1]["content"]]
    assert n_summaries == len(engine.asked) - len(answers) >= 2, "one conversation overflowed twice"
    with Engine.spawn(EngineConfig(model=path, ctx_size=N_CTX, threads=1, cache_prompt=False)) as fresh:
        for answer, final in zip(answers, finals, strict=True):
            said = [event.text async for event in fresh.submit(final) if isinstance(event, Delta)]
            assert answer["choices"][0]["message"]["content"] == "".join(said)
