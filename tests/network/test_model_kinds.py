"""Workers killed in mid-answer whose models cannot trim their cache: another goes on as a fresh engine would.

The workers are processes; the ingress is in the test, which so sees the progress that is handed over. What
follows the loss equals what an engine that never saw the request makes of its prompt and that progress.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from llm_engine.config import EngineConfig
from llm_engine.engine import Engine
from llm_engine.generation import Delta, Finished
from llm_engine.model import Model
from llm_engine.text import TextAssembler
from llm_ingress.certs import CertificateFiles
from llm_ingress.control import Control
from llm_ingress.gateway import Gateway, GatewayConfig, Lane, LaneRequest, LaneState
from llm_ingress.wire import Grant, LaneRef
from llm_worker.progress import unpack
from tests.certificates import Issued
from tests.fakes import prepare
from tests.network.fleet import MODEL, Fleet, Worker, until
from tests.ring_network import controlled

pytestmark = pytest.mark.model

PATH = "/v1/chat/completions"
N_TOKENS = 300
N_BEFORE = 40  # tokens until text is held back
N_HELD = 120  # tokens of it: so many steps there are to kill its worker in
POLL_S = 0.001
ENGINE = EngineConfig(ctx_size=512, max_inflight=2, threads=1)  # as WORKER_FLAGS
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "Tell a story."}], "stream": True}
SAMPLED = {"temperature": 1, "seed": 7, "max_tokens": N_TOKENS}
PENALISED = {**SAMPLED, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repeat_penalty": 1.1}
GREEDY = {"temperature": 0, "max_tokens": N_TOKENS}


@dataclass(frozen=True, slots=True)
class Said:
    """What a generation said."""

    texts: tuple[str, ...]  # one a token
    tokens: tuple[int, ...]
    reason: str

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class Chunks:
    """What a client reads."""

    ids: frozenset[str]
    n_roles: int
    text: str
    reason: str | None

    @classmethod
    def of(cls, data: bytes) -> "Chunks":
        events = [event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event]
        chunks = [orjson.loads(event) for event in events if event != b"[DONE]"]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return cls(
            ids=frozenset(chunk["id"] for chunk in chunks),
            n_roles=sum("role" in choice["delta"] for choice in choices),
            text="".join(choice["delta"].get("content") or "" for choice in choices),
            reason=next((choice["finish_reason"] for choice in choices if choice["finish_reason"]), None),
        )


@pytest.fixture(params=["hybrid_model", pytest.param("sliding_model", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture
def engine(kind: Path) -> Iterator[Engine]:
    """An engine that has seen none of the requests before."""
    with Engine.spawn(replace(ENGINE, model=str(kind))) as engine:
        yield engine


async def say(engine: Engine, body: bytes, progress: bytes = b"") -> Said:
    """What an engine makes of a request, from where its progress has come to."""
    grant = Grant(ref=LaneRef(1, 1), path=PATH, body=body, request_id="r", queued_ms=0.0, progress=progress)
    events = [event async for event in engine.submit(prepare(grant, engine, 0).prepared)]
    deltas = [event for event in events if isinstance(event, Delta)]
    assert isinstance(events[-1], Finished)
    return Said(
        tuple(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.tokens),
        events[-1].reason,
    )


def read_at_once(kind: Path, tokens: tuple[int, ...], stop: tuple[str, ...]) -> str:
    """What tokens read as, by one who takes them all in one go."""
    model = Model.load(kind)
    try:
        text = TextAssembler(stop)
        pieces = [model.piece(token) for token in tokens if not model.is_end_of_generation(token)]
        return "".join(map(text.feed, pieces)) + text.flush()
    finally:
        model.close()


@asynccontextmanager
async def ring_of_two(fleet: Fleet, pki: Path, kind: Path) -> AsyncIterator[tuple[Gateway, Worker, Worker]]:
    """A gateway whose workers are two processes; the first of them is granted what comes."""
    gateway = Gateway(GatewayConfig(heartbeat_timeout_s=60.0))
    files = CertificateFiles.in_folder(pki)
    async with controlled(gateway, Issued(ingress=files, worker=files)) as control:
        first, second = (new_worker(fleet, control, name, kind) for name in ("gpu-1", "gpu-2"))
        for worker in (first, second):
            worker.launch()
            await worker.until_attached()
        yield gateway, first, second


def new_worker(fleet: Fleet, control: Control, name: str, kind: Path) -> Worker:
    flags = ("--model", str(kind), "--ingress-url", f"https://localhost:{control.port}")
    return fleet.new_worker(name, flags=flags)


def open_lane(gateway: Gateway, body: bytes) -> Lane:
    return gateway.open_lane(
        LaneRequest(path=PATH, body=body, model=MODEL, request_id="r", tenant="t"), lambda: None
    )


async def until_generated(lane: Lane, n_tokens: int) -> None:
    """Wait until a lane's progress holds so many tokens."""
    while not lane.progress or len(unpack(bytes(lane.progress)).choice(0).tokens) < n_tokens:
        assert lane.is_open, lane.outcome
        await asyncio.sleep(POLL_S)


def half_held_back(undisturbed: Said) -> str:
    """A stop string that an answer nearly comes to say, over many tokens."""
    return "".join(undisturbed.texts[N_BEFORE : N_BEFORE + N_HELD]) + "\u2603"


@pytest.mark.parametrize(
    ("fields", "is_held_back"),
    [
        pytest.param(GREEDY, False, marks=pytest.mark.slow),
        pytest.param(SAMPLED, False, marks=pytest.mark.slow),
        (PENALISED, True),
    ],
    ids=["greedy", "sampled", "penalised and held back"],
)
async def test_what_follows_a_loss_is_what_a_fresh_engine_makes_of_prompt_and_progress(
    fleet: Fleet, pki: Path, kind: Path, engine: Engine, fields: dict[str, Any], is_held_back: bool
) -> None:
    stop: tuple[str, ...] = ()
    if is_held_back:
        stop = (half_held_back(await say(engine, orjson.dumps({**QUESTION, **fields}))),)
    body = orjson.dumps({**QUESTION, **fields, "stop": stop})
    async with ring_of_two(fleet, pki, kind) as (gateway, first, second):
        lane = open_lane(gateway, body)
        await until_generated(lane, N_BEFORE + N_HELD // 2)
        second.freeze()  # it is granted the lane, and does not begin before the progress has been read
        await first.kill()
        await until(lambda: lane.claim == 2)
        progress, before = bytes(lane.progress), Chunks.of(gateway.take(lane))
        second.thaw()
        await until(lambda: lane.state is LaneState.DONE, lane)
        after = Chunks.of(gateway.take(lane))

    n_before = len(unpack(progress).choice(0).tokens)
    assert N_BEFORE + N_HELD // 2 <= n_before < N_TOKENS
    expected = await say(engine, body, progress)
    assert (after.text, after.reason) == (expected.text, expected.reason)
    assert n_before + len(expected.tokens) == N_TOKENS

    # One answer, of which nothing is missing and nothing comes twice.
    tokens = (*unpack(progress).choice(0).tokens, *expected.tokens)
    assert before.text + after.text == read_at_once(kind, tokens, stop)
    assert len(before.ids | after.ids) == before.n_roles + after.n_roles == 1
    if is_held_back:
        assert len(before.text) < len(read_at_once(kind, tokens[:n_before], ()))
