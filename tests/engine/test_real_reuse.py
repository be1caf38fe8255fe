"""Prefix reuse on real llama.cpp: warm text equals cold text, and only what is new is computed.

On a dense model, a hybrid (recurrent) one and one with a sliding window. Contexts with earlier answers in
them stay within 256 cells: beyond, a sequence that decodes alone takes another path through attention than
when its answer is part of a prompt.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from llm_engine.backend import LlamaBackend, context_params
from llm_engine.config import EngineConfig
from llm_engine.engine import Engine
from llm_engine.errors import BackendError
from llm_engine.generation import Delta, Event, Finished, GenerateRequest, Message, Prepared
from llm_engine.model import Model
from llm_engine.sampling import SamplingParams

pytestmark = pytest.mark.model

N_OUT = 8
SYSTEM = (
    "You are the guide of a small museum of clocks. You answer in one short sentence, you never mention "
    "prices, you are polite to children, and where you do not know something, you say so at once. The museum "
    "opens at nine and closes at five; it has three rooms, and the oldest clock in it is of the year 1602."
)
QUESTIONS = (
    "When do you open?",
    "How many rooms are there?",
    "Who made the oldest clock?",
    "May I touch one?",
)


@pytest.fixture(scope="module", params=["smollm2", "hybrid_model", "sliding_model"])
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def cold(model: Path) -> Iterator[Engine]:
    """Computes every prompt anew."""
    with Engine.spawn(config(model, max_inflight=1, cache_prompt=False)) as engine:
        yield engine


@pytest.fixture
def warm(model: Path) -> Iterator[Engine]:
    with Engine.spawn(config(model, max_inflight=4)) as engine:
        yield engine


@pytest.fixture
def warm_on_two_slots(model: Path) -> Iterator[Engine]:
    with Engine.spawn(config(model, max_inflight=2)) as engine:
        yield engine


def config(model: Path, **options: object) -> EngineConfig:
    return EngineConfig(model=str(model), **{"ctx_size": 512, **options})  # type: ignore[arg-type]


class Answer:
    """Tokens of one generation, and how much of its prompt was cached."""

    def __init__(self, prompt: Sequence[int], events: list[Event]) -> None:
        self.tokens = [token for event in events if isinstance(event, Delta) for token in event.tokens]
        end = events[-1]
        assert isinstance(end, Finished)
        self.end = end
        self.conversation = (*prompt, *self.tokens)


async def answer(engine: Engine, prompt: Sequence[int], *, n_out: int = N_OUT) -> Answer:
    """Of tokens rather than text, since what random weights say is not text that tokenises back."""
    request = GenerateRequest.user("", sampling=SamplingParams(temperature=0))
    prepared = Prepared(request=request, prompt=tuple(prompt), max_tokens=n_out)
    return Answer(prompt, [event async for event in engine.submit(prepared)])


def first_turn(engine: Engine, question: str, *, system: str = SYSTEM) -> tuple[int, ...]:
    messages = ({"role": "system", "content": system}, {"role": "user", "content": question})
    return engine.prepare(GenerateRequest(messages=messages)).prompt


def next_turn(engine: Engine, earlier: Sequence[int], question: str) -> tuple[int, ...]:
    """The conversation so far and another user turn, in tokens."""
    turn = engine.prepare(GenerateRequest.user(question)).prompt
    return (*earlier, *turn[-(len(turn) // 2) :])


async def expect(cold: Engine, got: Answer, prompt: Sequence[int]) -> None:
    """What the same prompt says when nothing of it is known."""
    expected = await answer(cold, prompt)
    assert expected.end.n_cached == 0
    assert got.tokens == expected.tokens
    assert len(got.conversation) <= 256


async def test_turns_of_a_conversation(warm: Engine, cold: Engine) -> None:
    prompt, n_before = first_turn(warm, QUESTIONS[0]), 1
    for question in QUESTIONS[1:]:
        got = await answer(warm, prompt)
        assert got.end.n_cached == n_before - 1  # of the last token drawn nothing is computed yet
        await expect(cold, got, prompt)
        prompt, n_before = next_turn(warm, got.conversation, question), len(got.conversation)


async def test_the_same_prompt_again(warm: Engine, cold: Engine) -> None:
    prompt = first_turn(warm, QUESTIONS[0])
    first, again = await answer(warm, prompt), await answer(warm, prompt)
    assert again.end.n_cached > 0.9 * len(prompt)
    assert again.tokens == first.tokens
    await expect(cold, again, prompt)


async def test_sessions_with_one_system_prompt_one_after_another(warm: Engine, cold: Engine) -> None:
    n_cached = []
    for question in QUESTIONS:
        prompt = first_turn(warm, question)
        got = await answer(warm, prompt)
        await expect(cold, got, prompt)
        n_cached.append(got.end.n_cached)
    assert n_cached[0] == 0
    assert min(n_cached[1:]) > 0.8 * len(prompt)


async def test_sessions_with_one_system_prompt_at_once(warm: Engine, cold: Engine) -> None:
    prompts = [first_turn(warm, question) for question in QUESTIONS]
    together = await asyncio.gather(*(answer(warm, prompt) for prompt in prompts))
    n_cached = sorted(got.end.n_cached for got in together)
    assert n_cached[0] == 0
    assert n_cached[1] > 0.8 * len(prompts[0])
    for got, prompt in zip(together, prompts, strict=True):
        await expect(cold, got, prompt)


async def test_sessions_with_one_long_system_prompt(warm: Engine, cold: Engine) -> None:
    system = f"{SYSTEM} {SYSTEM} {SYSTEM} {SYSTEM}"
    prompts = [first_turn(warm, question, system=system) for question in QUESTIONS[:2]]
    assert len(prompts[0]) > 256 + N_OUT
    for prompt in prompts:
        got, expected = await answer(warm, prompt), await answer(cold, prompt)
        assert got.tokens == expected.tokens
    assert got.end.n_cached > 0.8 * len(prompts[0])


async def test_three_sessions_on_two_slots(warm_on_two_slots: Engine, cold: Engine) -> None:
    warm = warm_on_two_slots
    prompts = {
        name: first_turn(warm, QUESTIONS[i], system=f"{name}. {SYSTEM}") for i, name in enumerate("ABC")
    }
    totals = dict.fromkeys(prompts, 0)
    for name in "ABABCA":
        prompt = prompts[name]
        got = await answer(warm, prompt)
        assert got.end.n_cached >= 0.9 * totals[name]
        await expect(cold, got, prompt)
        prompts[name], totals[name] = next_turn(warm, got.conversation, "And?"), len(got.conversation)


async def test_a_history_that_was_edited(warm: Engine, cold: Engine) -> None:
    """As by templates that leave an old answer's reasoning out: it parts from the cells inside the answer."""
    first = first_turn(warm, QUESTIONS[0])
    await answer(warm, first)
    prompt = next_turn(warm, first, "And?")
    got = await answer(warm, prompt)
    assert got.end.n_cached > 0.9 * len(first)
    await expect(cold, got, prompt)


async def test_a_continuation_after_a_cancelled_attempt(warm: Engine, cold: Engine) -> None:
    prompt = first_turn(warm, QUESTIONS[0])
    whole = (await answer(cold, prompt)).tokens
    attempt = await answer(warm, prompt, n_out=len(whole) // 2)
    resumed = tuple(attempt.tokens)
    request = GenerateRequest.user("", sampling=SamplingParams(temperature=0), resumed=resumed)
    prepared = Prepared(request=request, prompt=prompt, max_tokens=len(whole))
    rest = Answer((), [event async for event in warm.submit(prepared)])
    assert [*resumed, *rest.tokens] == whole
    assert rest.end.n_cached > 0.9 * len(prompt)


def test_a_state_of_another_model_or_context_is_refused(model: Path) -> None:
    loaded = Model.load(model)
    backend = LlamaBackend.create(loaded, context_params(config(model, max_inflight=2), 256), "this one")
    state = backend.fetch(0, checkpoint=False)
    backend.restore(1, state)
    with pytest.raises(BackendError, match="another model"):
        backend.restore(1, replace(state, fingerprint="another"))
    backend.close()
    loaded.close()


# --- on disk ------------------------------------------------------------------------------------------------


async def test_conversations_go_on_after_a_restart(model: Path, cold: Engine, tmp_path: Path) -> None:
    """One is put away from its slot, the other from host memory."""
    settings = config(model, max_inflight=1, session_dir=tmp_path)
    with Engine.spawn(settings) as engine:
        talks = [
            await answer(engine, first_turn(engine, QUESTIONS[0], system=f"{i}. {SYSTEM}")) for i in "AB"
        ]
    with Engine.spawn(settings) as engine:
        assert engine.kept().disk.n_sessions == 2
        for talk in talks:
            prompt = next_turn(engine, talk.conversation, QUESTIONS[1])
            got = await answer(engine, prompt)
            assert got.end.n_cached == len(talk.conversation) - 1
            await expect(cold, got, prompt)


async def test_a_history_that_was_edited_after_a_restart(model: Path, cold: Engine, tmp_path: Path) -> None:
    """What parts from the kept run inside it begins with a checkpoint, where it takes one."""
    settings = config(model, max_inflight=1, session_dir=tmp_path)
    with Engine.spawn(settings) as engine:
        first = first_turn(engine, QUESTIONS[0])
        await answer(engine, first)
    with Engine.spawn(settings) as engine:
        prompt = next_turn(engine, first, "And?")
        got = await answer(engine, prompt)
        assert got.end.n_cached > 0.9 * len(first)
        await expect(cold, got, prompt)


async def test_what_host_memory_had_no_room_for_comes_back_from_disk(
    model: Path, cold: Engine, tmp_path: Path
) -> None:
    with Engine.spawn(config(model, max_inflight=1, cache_ram_mib=6, session_dir=tmp_path)) as engine:
        talk = await answer(engine, first_turn(engine, QUESTIONS[0], system=f"The first. {SYSTEM}"))
        n_others = 0
        while not engine.kept().disk.n_sessions and n_others < 200:
            await answer(engine, tuple(range(1000 + n_others, 1160 + n_others)), n_out=1)
            n_others += 1
        prompt = next_turn(engine, talk.conversation, QUESTIONS[1])
        got = await answer(engine, prompt)
        assert got.end.n_cached == len(talk.conversation) - 1
        await expect(cold, got, prompt)


async def test_a_broken_file_is_computed_anew(
    model: Path, cold: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(model, max_inflight=1, session_dir=tmp_path)
    with Engine.spawn(settings) as engine:
        prompt = first_turn(engine, QUESTIONS[0])
        await answer(engine, prompt)
    for path in tmp_path.rglob("*.kv"):
        whole = bytearray(path.read_bytes())
        whole[-len(whole) // 3] ^= 1
        path.write_bytes(whole)
    n_files = len(list(tmp_path.rglob("*.kv")))
    with Engine.spawn(settings) as engine:
        got = await answer(engine, prompt)
        assert got.end.n_cached == 0
        await expect(cold, got, prompt)
        engine.close(keep_sessions=False)
    n_left = len(list(tmp_path.rglob("*.kv")))
    assert n_left < n_files
    removals = [line for line in caplog.messages if "is of no use and removed" in line]
    assert len(removals) == n_files - n_left


async def test_what_another_context_kept_is_neither_used_nor_touched(model: Path, tmp_path: Path) -> None:
    settings = config(model, max_inflight=1, session_dir=tmp_path)
    with Engine.spawn(settings) as engine:
        prompt = first_turn(engine, QUESTIONS[0])
        await answer(engine, prompt)
    with Engine.spawn(config(model, max_inflight=1, session_dir=tmp_path, ctx_size=768)) as engine:
        assert (await answer(engine, prompt)).end.n_cached == 0
    with Engine.spawn(settings) as engine:
        assert (await answer(engine, prompt)).end.n_cached > 0.9 * len(prompt)


# --- a chat, in text ----------------------------------------------------------------------------------------


async def say(engine: Engine, messages: list[Message], question: str) -> Finished:
    """Another turn of a chat: its question and its answer are appended."""
    messages.append({"role": "user", "content": question})
    request = GenerateRequest(messages=tuple(messages), max_tokens=24, sampling=SamplingParams(temperature=0))
    text = ""
    async for event in engine.submit(request):
        if isinstance(event, Delta):
            text += event.text
    assert isinstance(event, Finished)
    messages.append({"role": "assistant", "content": text})
    return event


async def test_a_chat_computes_only_what_is_new_in_each_turn(smollm2: Path) -> None:
    with Engine.spawn(config(smollm2, max_inflight=4, ctx_size=1024)) as engine:
        chat: list[Message] = []
        total = 0
        for turn in range(6):
            end = await say(engine, chat, f"{QUESTIONS[turn % 4]} Tell me more of it, part {turn}.")
            assert end.n_cached >= 0.9 * total
            total = end.n_prompt + end.n_completion


async def test_three_chats_alternate_on_two_slots(smollm2: Path) -> None:
    with Engine.spawn(config(smollm2, max_inflight=2, ctx_size=1024)) as engine:
        chats: dict[str, list[Message]] = {
            name: [{"role": "system", "content": f"{name}. {SYSTEM}"}] for name in "ABC"
        }
        totals = dict.fromkeys(chats, 0)
        for turn, name in enumerate("ABABCABC"):
            end = await say(engine, chats[name], QUESTIONS[turn % 4])
            assert end.n_cached >= 0.9 * totals[name]
            totals[name] = end.n_prompt + end.n_completion
