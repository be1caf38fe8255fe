"""Threads meet: submitting, reading, cancelling, draining, over the fake backend."""

import asyncio
import gc
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llm_engine.config import EngineConfig, count_cores
from llm_engine.engine import Engine
from llm_engine.errors import (
    BackendError,
    ConfigError,
    EngineBusy,
    EngineClosed,
    ModelError,
    PromptTooLong,
    RequestError,
    TemplateRefused,
)
from llm_engine.generation import Delta, Event, Failed, Finished, GenerateRequest, StopReason
from llm_engine.info import EngineInfo, Kept, Tier
from llm_engine.prefix import N_COMPUTED_ANEW
from llm_engine.sampling import SamplingParams
from llm_engine.sessiondir import SessionDir
from tests.engine.fake_backend import END, ByteVocabulary, FakeBackend, Reply, echo, forever


class PlainTemplate:
    """A template of one line: the last message's text."""

    def render(self, messages: Any, think: bool) -> tuple[str, ...]:
        if messages[-1]["content"] == "refuse":
            raise TemplateRefused("not this")
        return (messages[-1]["content"] + ("!" if think else "") + "\n",)


class FakeModel(ByteVocabulary):
    template: PlainTemplate | None = PlainTemplate()
    closed = False

    def n_tokens_at_least(self, segments: tuple[str, ...]) -> int:
        return sum(map(len, segments)) // 100

    def tokenize(self, segments: tuple[str, ...]) -> list[int]:
        return list("".join(segments).encode())

    def close(self) -> None:
        self.closed = True


@contextmanager
def running(reply: Reply = echo, *, n_ctx: int = 256, **options: Any) -> Iterator[tuple[Engine, FakeBackend]]:
    config = EngineConfig(**{"max_inflight": 4, "max_waiting": 4, **options})
    backend = FakeBackend(reply, n_batch=config.batch_size, n_slots=config.n_slots, n_ctx=n_ctx)
    info = EngineInfo(
        name="fake",
        aliases=(),
        file="fake.gguf",
        n_params=1,
        n_ctx=n_ctx,
        n_ctx_train=n_ctx,
        max_inflight=config.n_slots,
        fingerprint="f",
    )
    model: Any = FakeModel()
    with Engine(model, backend, config, info) as engine:
        yield engine, backend
    assert backend.closed
    assert model.closed
    assert engine.capacity().inflight == 0


def ask(text: str, **options: Any) -> GenerateRequest:
    return GenerateRequest.user(text, sampling=SamplingParams(temperature=0), **options)


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def test_a_generation_is_a_plain_iterator() -> None:
    with running() as (engine, _):
        events = list(engine.submit(ask("hello")))
    assert text_of(events) == "hello"
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is StopReason.STOP
    assert (events[-1].n_prompt, events[-1].n_completion) == (6, 6)


async def test_a_generation_is_an_async_iterator_and_many_run_at_once() -> None:
    async def read(engine: Engine, text: str) -> str:
        return text_of([event async for event in engine.submit(ask(text))])

    with running() as (engine, backend):
        words = [f"word {i}" * i for i in range(1, 9)]
        assert await asyncio.gather(*(read(engine, word) for word in words)) == words
        assert max(len(plan) for plan in backend.plans) == 4


async def test_a_listener_hears_every_event_on_its_own_loop() -> None:
    heard: list[Event] = []
    threads: set[int] = set()
    over = asyncio.Event()

    def listen(event: Event) -> None:
        heard.append(event)
        threads.add(threading.get_ident())
        if not isinstance(event, Delta):
            over.set()

    with running() as (engine, _):
        handle = engine.submit(ask("hello"), listen)
        await over.wait()
        handle.close()
    assert text_of(heard) == "hello"
    assert threads == {threading.get_ident()}


async def test_a_listener_that_raises_keeps_nobody_from_theirs(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_event: Event) -> None:
        raise ValueError

    with running() as (engine, _):
        handle = engine.submit(ask("bad"), broken)
        assert text_of([event async for event in engine.submit(ask("good"))]) == "good"
        handle.close()
    assert "a listener failed" in caplog.text


def test_cancel_ends_an_endless_generation() -> None:
    with running(forever) as (engine, _):
        generation = engine.submit(ask("go"))
        next(generation)
        generation.cancel()
        *_, last = generation
        assert isinstance(last, Finished)
        assert last.reason is StopReason.CANCELLED


def test_dropping_a_generation_cancels_it() -> None:
    with running(forever) as (engine, _):
        next(engine.submit(ask("go")))
        gc.collect()
        assert engine.drain(timeout_s=10)


async def test_after_cancel_a_listener_hears_nothing_more() -> None:
    heard: list[Event] = []
    first = asyncio.Event()

    def listen(event: Event) -> None:
        heard.append(event)
        first.set()

    with running(forever) as (engine, _):
        handle = engine.submit(ask("go"), listen)
        await first.wait()
        handle.cancel()
        n_heard = len(heard)
        assert await asyncio.to_thread(engine.drain, 10)
        await asyncio.sleep(0)
        assert len(heard) == n_heard


async def test_who_watches_hears_when_the_place_of_a_cancelled_generation_is_free() -> None:
    first, free = asyncio.Event(), asyncio.Event()
    with running(forever) as (engine, _):
        handle = engine.submit(ask("go"), lambda _: first.set())
        await first.wait()
        engine.watch(lambda: None if engine.capacity().inflight else free.set())
        handle.cancel()
        async with asyncio.timeout(5):
            await free.wait()
        assert engine.capacity().decoding == 0


def test_a_paused_generation_holds_its_slot_and_goes_on_after_resume() -> None:
    with running(forever, n_ctx=10_000, max_tokens=5000) as (engine, backend):
        held = engine.submit(ask("held"))
        next(held)
        held.pause()
        list(engine.submit(ask("other", max_tokens=50)))
        n_held = sum(1 for plan in backend.plans for seq_id, _ in plan if seq_id == 0)
        list(engine.submit(ask("other", max_tokens=50)))
        assert sum(1 for plan in backend.plans for seq_id, _ in plan if seq_id == 0) == n_held
        assert engine.capacity().inflight == 1
        held.resume()
        *_, last = held
        assert isinstance(last, Finished)
        assert last.n_completion == 5000


def test_a_failed_step_fails_its_sequences_and_the_next_request_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running() as (engine, backend):
        backend.fail_next = True
        (failed,) = list(engine.submit(ask("hello")))
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, BackendError)
        assert text_of(list(engine.submit(ask("hello")))) == "hello"


@pytest.mark.parametrize(("n_more", "n_warnings"), [(0, 0), (1, 1)])
def test_more_threads_than_cores_are_warned_of(
    n_more: int, n_warnings: int, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    config = EngineConfig(model=str(tmp_path / "none.gguf"), threads=count_cores() + n_more)
    with pytest.raises(ModelError):
        Engine.spawn(config)
    assert sum("will wait for each other" in line for line in caplog.messages) == n_warnings


async def test_a_step_over_its_target_admits_nobody_and_says_so_at_once() -> None:
    with running(forever, n_ctx=100_000, max_tokens=90_000, max_inflight=8, target_step_ms=22) as (
        engine,
        backend,
    ):
        backend.token_s = 0.005
        changed = asyncio.Event()
        engine.watch(changed.set)
        first = engine.submit(ask("go"))
        await changed.wait()
        others = [engine.submit(ask("go")) for _ in range(7)]
        for _ in range(30):
            await anext(first)
        assert 1 < max(map(len, backend.plans)) <= 4
        assert engine.capacity().available_slots == 0
        first.close()
        for generation in others:
            generation.close()


def test_the_waiting_list_is_bounded_and_counts_as_inflight() -> None:
    with running(forever, n_ctx=100_000, max_tokens=90_000) as (engine, _):
        held = [engine.submit(ask("go")) for _ in range(8)]
        capacity = engine.capacity()
        assert (capacity.inflight, capacity.available_slots, capacity.max_inflight) == (8, 0, 4)
        with pytest.raises(EngineBusy):
            engine.submit(ask("one more"))
        for generation in held:
            generation.close()
        assert engine.drain(timeout_s=10)


def test_max_tokens_is_clamped_to_the_room_left() -> None:
    with running(forever, n_ctx=32) as (engine, _):
        prepared = engine.prepare(ask("0123456789", max_tokens=1000))
        assert prepared.max_tokens == 32 - 11
        *_, last = engine.submit(prepared)
        assert isinstance(last, Finished)
        assert (last.reason, last.n_completion) == (StopReason.LENGTH, 21)
        with pytest.raises(PromptTooLong) as refused:
            engine.prepare(ask("x" * 31))
        assert (refused.value.n_prompt, refused.value.n_ctx) == (32, 32)


def test_a_template_refusal_and_a_model_without_template_are_the_callers_errors() -> None:
    with running() as (engine, _):
        with pytest.raises(TemplateRefused, match="not this"):
            engine.submit(ask("refuse"))
        engine._model.template = None
        with pytest.raises(TemplateRefused, match=r"fake\.gguf carries no chat template"):
            engine.submit(ask("hello"))


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"max_tokens": -5}, {"stop": ("",)}])
def test_a_request_out_of_its_range_names_the_field(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        ask("hello", **options)


def test_half_a_surrogate_pair_is_the_callers_error() -> None:
    with running() as (engine, _), pytest.raises(RequestError, match="surrogate"):
        engine.submit(ask("\udcff"))


def test_think_reaches_the_template() -> None:
    with running() as (engine, _):
        assert text_of(list(engine.submit(ask("hello", think=True)))) == "hello!"


def test_a_continuation_delivers_only_what_follows() -> None:
    with running() as (engine, _):
        events = list(engine.submit(ask("hello", resumed=tuple(b"he"))))
        assert text_of(events) == "llo"
        assert isinstance(events[-1], Finished)
        assert events[-1].n_completion == 6


def test_a_step_that_does_not_end_grows_old_the_first_one_too() -> None:
    begun, end = threading.Event(), threading.Event()

    def stuck(_tokens: Sequence[int]) -> int:
        begun.set()
        assert end.wait(10)
        return END

    with running(stuck) as (engine, _):
        assert engine.capacity().step_age_s == 0
        generation = engine.submit(ask("go"))
        assert begun.wait(10)
        first = engine.capacity().step_age_s
        assert engine.capacity().step_age_s > first > 0
        end.set()
        list(generation)
        while engine.capacity().step_age_s:
            threading.Event().wait(0.001)


def test_drain_takes_nothing_new_and_waits_for_what_runs() -> None:
    with running(forever, n_ctx=100_000, max_tokens=90_000) as (engine, _):
        generation = engine.submit(ask("go"))
        assert not engine.drain(timeout_s=0.01)
        with pytest.raises(EngineClosed):
            engine.submit(ask("late"))
        generation.cancel()
        assert engine.drain(timeout_s=10)


def test_close_answers_everyone_it_holds() -> None:
    with running(forever, n_ctx=100_000, max_tokens=90_000, max_inflight=1) as (engine, _):
        held = [engine.submit(ask("go")) for _ in range(3)]
        engine.close()
        for generation in held:
            *_, last = generation
            assert isinstance(last, Failed)
            assert isinstance(last.error, EngineClosed)
        with pytest.raises(EngineClosed):
            engine.submit(ask("late"))


def test_a_fault_of_the_step_loop_answers_everyone_and_ends_the_engine(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object) -> None:
        raise ZeroDivisionError

    with running(forever, n_ctx=100_000, max_tokens=90_000) as (engine, _):
        held = engine.submit(ask("go"))
        next(held)
        assert not engine.fault
        monkeypatch.setattr("llm_engine.scheduler.Scheduler.commit", broken)
        *_, last = held
        assert isinstance(last, Failed)
        assert isinstance(last.error, EngineClosed)
        assert isinstance(engine.fault, ZeroDivisionError)
        assert engine.capacity().available_slots == 0
        with pytest.raises(EngineClosed):
            engine.submit(ask("late"))
    assert "the step loop failed" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_inflight", 0), ("max_inflight", 257), ("ctx_size", 0), ("batch_size", 2), ("flash_attn", "maybe")],
)
def test_an_option_out_of_range_names_field_and_value(field: str, value: object) -> None:
    options: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError, match=f"{field} .*{value}"):
        EngineConfig(**options)


async def test_a_sequence_at_the_edge_of_its_context_shortens_no_neighbour() -> None:
    async def read(text: str) -> list[Event]:
        return [event async for event in engine.submit(ask(text))]

    with running(forever, n_ctx=64) as (engine, _):
        # All begin together; the edge comes for each in another step, and for those that queue last.
        answers = await asyncio.gather(*(read("x" * n) for n in (62, 50, 30, 5, 61, 1)))
    for n_prompt, events in zip((63, 51, 31, 6, 62, 2), answers, strict=True):
        assert isinstance(events[-1], Finished)
        assert (events[-1].reason, events[-1].n_completion) == (StopReason.LENGTH, 64 - n_prompt)


def test_a_continuation_that_does_not_fit_is_refused_and_its_neighbour_goes_on() -> None:
    with running(echo, n_ctx=64) as (engine, _):
        neighbour = engine.submit(ask("a word"))
        with pytest.raises(PromptTooLong) as refused:
            engine.submit(ask("0123456789", resumed=tuple(b"x" * 54)))
        assert (refused.value.n_prompt, refused.value.n_ctx) == (65, 64)
        assert text_of(list(neighbour)) == "a word"
        # Up to the last cell it does.
        *_, last = engine.submit(ask("0123456789", resumed=tuple(b"x" * 53)))
        assert isinstance(last, Finished)


@pytest.mark.parametrize("token", [-1, END + 1])
def test_a_token_that_the_model_does_not_have_is_refused(token: int) -> None:
    with running(echo) as (engine, _), pytest.raises(RequestError, match="resumed holds a token"):
        engine.prepare(ask("a word", resumed=(ord("a"), token)))


def test_an_empty_prompt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeModel, "tokenize", lambda _self, _segments: [])
    with running(echo) as (engine, _), pytest.raises(RequestError, match="the prompt is empty"):
        engine.submit(ask(""))


# --- kept sessions ------------------------------------------------------------------------------------------

TALK = "a talk of more than thirty-two tokens, so that it is worth its place"


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def n_cached(engine: Engine, text: str) -> int:
    end = list(engine.submit(ask(text)))[-1]
    assert isinstance(end, Finished)
    return end.n_cached


def test_the_next_engine_goes_on_from_what_this_one_put_away(tmp_path: Path) -> None:
    with running(session_dir=tmp_path) as (engine, _):
        assert n_cached(engine, TALK) == 0
    with running(session_dir=tmp_path) as (engine, backend):
        assert engine.kept().disk.n_sessions == 1
        assert n_cached(engine, TALK) == len(TALK) + 1 - N_COMPUTED_ANEW
        assert backend.moves == ["restore"]
        assert engine.kept().disk == Tier(0, 0)


def test_two_engines_in_one_directory_keep_to_their_own(tmp_path: Path) -> None:
    texts = [f"{i}: {TALK}" for i in range(2)]
    with running(session_dir=tmp_path) as (first, _), running(session_dir=tmp_path) as (second, _):
        for engine, text in zip((first, second), texts, strict=True):
            n_cached(engine, text)
    with running(session_dir=tmp_path) as (first, _), running(session_dir=tmp_path) as (second, _):
        kept = [n_cached(engine, text) for engine, text in zip((first, second), texts, strict=True)]
        assert min(kept) > len(TALK)


def test_an_engine_that_is_closed_in_a_hurry_keeps_nothing(tmp_path: Path) -> None:
    with running(session_dir=tmp_path) as (engine, _):
        n_cached(engine, TALK)
        engine.close(keep_sessions=False)
    assert not list(tmp_path.rglob("*.kv"))


def test_a_disk_that_is_full_is_one_line_and_costs_nobody_an_answer(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(session_dir=small_disk, max_inflight=1) as (engine, _):
        n_left = shutil.disk_usage(small_disk).free
        (small_disk / "another's").write_bytes(bytes(n_left))
        for i in range(3):
            assert n_cached(engine, f"{i}: {TALK}") == 0
    assert [line for line in caplog.messages if "No space left" in line] == caplog.messages
    assert len(caplog.messages) == 1
    with running(session_dir=small_disk) as (engine, _):
        assert engine.kept().disk == Tier(0, 0)


def test_a_disk_that_hangs_holds_up_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    monkeypatch.setattr(SessionDir, "write", lambda *_: may_write.wait(20))
    monkeypatch.setattr("llm_engine.loop.PUT_AWAY_S", 0.1)
    monkeypatch.setattr("llm_engine.engine.DISK_CLOSE_S", 0.1)
    with running(session_dir=tmp_path) as (engine, _):
        n_cached(engine, TALK)
        started = time.monotonic()
        engine.close()
        assert time.monotonic() - started < 10
    may_write.set()


def test_what_nobody_uses_is_dropped_while_the_engine_has_nothing_to_do(tmp_path: Path) -> None:
    """Nothing wakes it: it sleeps until the moment."""
    with running(session_dir=tmp_path, session_ttl=1, max_inflight=1) as (engine, backend):
        for i in range(2):
            n_cached(engine, f"{i}: {TALK}")
        kept = engine.kept()
        assert (kept.slots.n_sessions, kept.host.n_sessions) == (1, 1)
        wait_for(lambda: engine.kept() == Kept(slots=Tier(0, 0), host=Tier(0, 0), disk=Tier(0, 0)))
        assert backend.slots[0].tokens == []
        assert n_cached(engine, f"0: {TALK}") == 0


def test_what_expired_while_no_engine_ran_is_not_found(tmp_path: Path) -> None:
    with running(session_dir=tmp_path, session_ttl=600) as (engine, _):
        n_cached(engine, TALK)
    (path,) = tmp_path.rglob("*.kv")
    os.utime(path, (time.time() - 601, time.time() - 601))
    with running(session_dir=tmp_path, session_ttl=600) as (engine, _):
        assert engine.kept().disk == Tier(0, 0)
    assert not path.exists()


def test_a_session_directory_without_anything_to_keep_is_refused_by_name(tmp_path: Path) -> None:
    for lacking in ({"cache_ram_mib": 0}, {"cache_prompt": False}):
        with pytest.raises(
            ConfigError, match=r"session_dir .* needs cache_prompt, and cache_ram_mib above 0"
        ):
            EngineConfig(session_dir=tmp_path, **lacking)
