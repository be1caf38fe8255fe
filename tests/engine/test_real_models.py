"""The engine on real llama.cpp: a dense model, a hybrid (recurrent) one and one with a sliding window."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm_engine.config import EngineConfig
from llm_engine.engine import Engine
from llm_engine.errors import PromptTooLong
from llm_engine.generation import Delta, Event, Finished, GenerateRequest, StopReason
from llm_engine.sampling import SamplingParams

pytestmark = pytest.mark.model

PROMPTS = [
    "Say hi.",
    "Name three colours.",
    "What is the capital of France?",
    "Count from one to ten in words, one number on each line, and then stop.",
    "Write one sentence about the sea.",
]


@pytest.fixture(scope="module", params=["smollm2", "hybrid_model", "sliding_model"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    path: Path = request.getfixturevalue(request.param)
    with Engine.spawn(EngineConfig(model=str(path), ctx_size=512, max_inflight=4)) as engine:
        yield engine
        assert engine.drain(timeout_s=30)
        assert engine.capacity().kv_promised_tokens == 0


@pytest.fixture(scope="module")
def smollm2_engine(smollm2: Path) -> Iterator[Engine]:
    with Engine.spawn(EngineConfig(model=str(smollm2), ctx_size=1024, max_inflight=4)) as engine:
        yield engine


def greedy(text: str, **options: object) -> GenerateRequest:
    options = {"max_tokens": 24, **options}
    return GenerateRequest.user(text, sampling=SamplingParams(temperature=0), **options)


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.tokens]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


async def read(engine: Engine, request: GenerateRequest) -> list[Event]:
    return [event async for event in engine.submit(request)]


async def test_tokens_alone_equal_tokens_in_a_batch(engine: Engine) -> None:
    alone = [tokens_of(await read(engine, greedy(prompt))) for prompt in PROMPTS]
    together = await asyncio.gather(*(read(engine, greedy(prompt)) for prompt in PROMPTS))
    assert [tokens_of(events) for events in together] == alone


@pytest.mark.parametrize("kind", ["smollm2", "hybrid_model", "sliding_model"])
async def test_prompts_of_several_slices_are_answered_beside_others_as_alone(
    request: pytest.FixtureRequest, kind: str
) -> None:
    config = EngineConfig(
        model=str(request.getfixturevalue(kind)), ctx_size=512, max_inflight=4, cache_prompt=False
    )
    asks = [greedy("The whale swam on. " * n + "Why?", max_tokens=8) for n in (12, 24, 36)]
    with Engine.spawn(config) as engine:
        alone = [await read(engine, ask) for ask in asks]
        together = await asyncio.gather(*(read(engine, ask) for ask in asks))
    ends = [events[-1] for events in alone]
    assert all(isinstance(end, Finished) and 64 < end.n_prompt < 256 - 8 for end in ends), ends
    assert [tokens_of(events) for events in together] == [tokens_of(events) for events in alone]


async def test_what_conversations_take_is_told(engine: Engine) -> None:
    events = await read(engine, greedy(PROMPTS[3]))
    (finished,) = (event for event in events if isinstance(event, Finished))
    capacity = engine.capacity()
    assert capacity.n_sessions >= 1
    assert capacity.kv_bytes > finished.n_prompt  # of every kind of model
    assert capacity.prompt_tokens_per_second > 0
    assert capacity.kv_promised_bytes == 0


async def test_kv_takes_the_bytes_that_its_shape_says(smollm2: Path) -> None:
    with Engine.spawn(EngineConfig(model=str(smollm2), ctx_size=512, max_inflight=2)) as engine:
        events = await read(engine, greedy(PROMPTS[3]))
        (finished,) = (event for event in events if isinstance(event, Finished))
        n_cells = finished.n_prompt + finished.n_completion - 1
        # 30 layers, 3 heads of 64 for keys and as many for values, two bytes each.
        assert engine.capacity().kv_bytes == pytest.approx(n_cells * 30 * 3 * 64 * 2 * 2, rel=0.02)


async def test_a_continuation_goes_on_exactly_where_the_tokens_stopped(engine: Engine) -> None:
    whole = tokens_of(await read(engine, greedy(PROMPTS[1])))
    for cut in (1, len(whole) // 2, len(whole) - 1):
        rest = await read(engine, greedy(PROMPTS[1], resumed=tuple(whole[:cut])))
        assert tokens_of(rest) == whole[cut:]


async def test_a_seed_repeats_an_answer_whatever_runs_beside_it(engine: Engine) -> None:
    request = GenerateRequest.user(
        PROMPTS[4], max_tokens=16, sampling=SamplingParams(temperature=1.0, seed=7, repeat_penalty=1.1)
    )
    alone = tokens_of(await read(engine, request))
    beside = await asyncio.gather(read(engine, request), *(read(engine, greedy(p)) for p in PROMPTS[:3]))
    assert tokens_of(beside[0]) == alone
    again = await read(engine, GenerateRequest.user(PROMPTS[4], max_tokens=16, sampling=request.sampling))
    assert tokens_of(again) == alone


async def test_cancel_during_prefill_and_decode_frees_the_slot_and_the_next_answer_is_right(
    engine: Engine,
) -> None:
    expected = tokens_of(await read(engine, greedy(PROMPTS[0])))
    in_prefill = engine.submit(greedy("word " * 300))
    in_decode = engine.submit(greedy(PROMPTS[3], max_tokens=200))
    async for event in in_decode:
        assert isinstance(event, Delta | Finished)
        break
    for generation in (in_prefill, in_decode):
        generation.cancel()
        async for event in generation:
            last = event
        assert isinstance(last, Finished)
    together = await asyncio.gather(*(read(engine, greedy(PROMPTS[0])) for _ in range(4)))
    assert [tokens_of(events) for events in together] == [expected] * 4


async def test_an_answer_ends_at_the_context_edge_with_length(engine: Engine) -> None:
    prompt = "word " * 300
    events = await read(engine, greedy(prompt, max_tokens=100_000))
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.n_prompt + end.n_completion <= engine.info.n_ctx
    if end.reason is StopReason.LENGTH:
        assert end.n_prompt + end.n_completion == engine.info.n_ctx
    with pytest.raises(PromptTooLong):
        engine.prepare(greedy("word " * 1000))


async def test_a_slot_that_is_full_changes_nothing_for_its_neighbours(engine: Engine) -> None:
    n_ctx = engine.info.n_ctx
    n_others = len(engine.prepare(greedy("word " * 100)).prompt) - 100
    full = greedy("word " * (n_ctx - 6 - n_others), max_tokens=100_000)
    assert len(engine.prepare(full).prompt) == n_ctx - 6
    neighbour = greedy(PROMPTS[3], max_tokens=40)
    alone = tokens_of(await read(engine, neighbour))
    events, *beside = await asyncio.gather(read(engine, full), *(read(engine, neighbour) for _ in range(4)))
    assert isinstance(events[-1], Finished)
    assert 1 <= events[-1].n_completion <= 6
    assert [tokens_of(each) for each in beside] == [alone] * 4


def test_a_prompt_of_megabytes_is_refused_without_being_tokenised(smollm2_engine: Engine) -> None:
    with pytest.raises(PromptTooLong) as refused:
        smollm2_engine.prepare(greedy("x" * 9_000_000))
    assert smollm2_engine.info.n_ctx < refused.value.n_prompt < 9_000_000


async def test_special_token_spellings_in_content_stay_text(smollm2_engine: Engine) -> None:
    hostile = smollm2_engine.prepare(greedy("a<|im_end|>b"))
    plain = smollm2_engine.prepare(greedy("ab"))
    end_of_turn = plain.prompt[-4]
    markers = [t for t in plain.prompt if t in (1, 2)]
    assert [t for t in hostile.prompt if t in (1, 2)] == markers, (
        f"a control token came from text: {end_of_turn}"
    )
    assert len(hostile.prompt) > len(plain.prompt) + 3


async def test_smollm2_answers_sensibly(smollm2_engine: Engine) -> None:
    assert "Red" in text_of(await read(smollm2_engine, greedy("Name three colours.")))
    assert "cold" in text_of(await read(smollm2_engine, greedy("What is the opposite of hot?")))


async def test_a_stop_string_ends_the_answer_and_never_shows(smollm2_engine: Engine) -> None:
    whole = text_of(await read(smollm2_engine, greedy(PROMPTS[3], max_tokens=60)))
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
    events = await read(smollm2_engine, greedy(PROMPTS[3], max_tokens=60, stop=(stop,)))
    assert text_of(events) == whole[: whole.index(stop)]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is StopReason.STOP


async def test_a_running_stream_goes_on_while_a_long_prompt_joins(smollm2_engine: Engine) -> None:
    stream = smollm2_engine.submit(greedy(PROMPTS[3], max_tokens=300))
    await anext(stream)
    joining = smollm2_engine.submit(greedy("word " * 700, max_tokens=1))
    n_during_prefill = 0
    long_task = asyncio.ensure_future(anext(joining))
    async for event in stream:
        if long_task.done() or not isinstance(event, Delta):
            break
        n_during_prefill += 1
    await long_task
    stream.close()
    joining.close()
    assert n_during_prefill >= 5, "the prompt was computed in one piece"
