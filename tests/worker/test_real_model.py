"""The worker over a real engine and a real gateway: answers, refusals, and a continuation in mid-stream."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from llm_engine.config import EngineConfig
from llm_engine.engine import Engine
from llm_ingress.gateway import Gateway, GatewayConfig, Lane, LaneRequest, LaneState
from llm_worker.local import LocalRing
from llm_worker.worker import Worker, WorkerConfig
from tests.worker.ring_contract import until

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "Name three colours and say what they remind you of."}]


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    with Engine.spawn(EngineConfig(model=str(smollm2), max_inflight=2, ctx_size=512)) as engine:
        yield engine


@asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[Gateway]:
    gateway = Gateway(GatewayConfig())
    worker = Worker(engine, WorkerConfig(), [LocalRing(gateway)])
    worker.start()
    await until(lambda: bool(gateway.models()))
    try:
        yield gateway
        await until(lambda: engine.capacity().inflight == 0)
    finally:
        worker.close()


def ask(gateway: Gateway, engine: Engine, **fields: Any) -> Lane:
    body = {"model": engine.info.name, "messages": QUESTION, "max_tokens": 24, "seed": 3, **fields}
    request = LaneRequest(
        path="/v1/chat/completions",
        body=orjson.dumps(body),
        model=engine.info.name,
        request_id="r",
        tenant="t",
    )
    return gateway.open_lane(request, lambda: None)


def chunks(data: bytes) -> list[Any]:
    return [orjson.loads(event[6:]) for event in data.split(b"\n\n") if event.startswith(b"data: {")]


def text(data: bytes) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks(data))


async def test_a_stream_says_what_the_whole_answer_says(engine: Engine) -> None:
    async with served(engine) as gateway:
        stream, whole = ask(gateway, engine, stream=True), ask(gateway, engine)
        await until(lambda: gateway.is_idle)
        answer = orjson.loads(gateway.take(whole))
        assert text(gateway.take(stream)) == answer["choices"][0]["message"]["content"] != ""


async def test_a_prompt_that_does_not_fit_is_a_400(engine: Engine) -> None:
    async with served(engine) as gateway:
        lane = ask(gateway, engine, messages=[{"role": "user", "content": "word " * 600}])
        await until(lambda: lane.state is LaneState.DONE)
        assert lane.head is not None
        assert lane.head.status == 400
        assert orjson.loads(gateway.take(lane))["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_worker_lost_in_mid_stream_is_not_noticed(engine: Engine, temperature: int) -> None:
    async with served(engine) as gateway:
        undisturbed = ask(gateway, engine, stream=True, temperature=temperature)
        await until(lambda: gateway.is_idle)
        expected = gateway.take(undisturbed)

    gateway = Gateway(GatewayConfig())
    first = Worker(engine, WorkerConfig(), [LocalRing(gateway)])
    first.start()
    await until(lambda: bool(gateway.models()))
    lane = ask(gateway, engine, stream=True, temperature=temperature)
    await until(lambda: len(lane.progress) > 200)
    first.close()
    assert lane.state is LaneState.WAITING
    second = Worker(engine, WorkerConfig(), [LocalRing(gateway)])
    second.start()
    await until(lambda: lane.state is LaneState.DONE)
    second.close()
    continued = gateway.take(lane)
    assert text(continued) == text(expected)
    assert len(chunks(continued)) == len(chunks(expected))
    assert len({chunk["id"] for chunk in chunks(continued)}) == 1
