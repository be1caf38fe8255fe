"""The step: drain commands, admit, plan, decode, sample, commit, deliver.

Owns: nothing but the order of things. Thread: `run` is the step thread; `step` is a plain method, so that
tests turn it with no thread. Called by: `engine.py`, which starts the thread and takes the events.
"""

import logging
import queue
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from llm_engine.backend import Backend
from llm_engine.budget import Budget, Load
from llm_engine.errors import BackendError, EngineClosed, EngineError
from llm_engine.llama import Logits
from llm_engine.sampling import argmax_rows
from llm_engine.scheduler import Addressed, Plan, Scheduler
from llm_engine.sequence import Sequence
from llm_engine.slots import Kept

logger = logging.getLogger(__name__)

COMMANDS_PER_STEP = 256


@dataclass(frozen=True, slots=True)
class Start:
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Cancel:
    key: Hashable


@dataclass(frozen=True, slots=True)
class SetPaused:
    key: Hashable
    paused: bool


@dataclass(frozen=True, slots=True)
class Close:
    pass


Command: TypeAlias = Start | Cancel | SetPaused | Close


class StepStats(NamedTuple):
    """How the last steps went; published after each for any thread to read."""

    n_admissible: int  # sequences that may be in the engine before more would slow the step too far
    kv_promised_tokens: int
    kv_promised_bytes: int
    prompt_tokens_per_second: float
    kept: Kept
    n_decoding: int = 0
    step_ms: float = 0.0  # smoothed
    ended_at: float | None = None  # monotonic; of the first, when it was due; None while idle
    tokens_per_second: float = 0.0  # smoothed


class Loop:
    """One engine's step loop."""

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        budget: Budget,
        deliver: Callable[[list[Addressed]], None],
        on_admission: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._backend = backend
        self._scheduler = scheduler
        self._budget = budget
        self._deliver = deliver
        self._on_admission = on_admission  # called when `stats.n_admissible` has changed
        self._clock = clock
        self._closing = False
        self.stats = self._idle_stats()

    def run(self) -> None:
        """Step until closed; waits for a command when there is nothing to compute."""
        while not self._closing:
            events, computed = self.step()
            is_idle = not computed and not self._closing
            if is_idle:
                self._set_stats(self._idle_stats())
            if events:
                self._deliver(events)
            if is_idle:
                command = self.commands.get()
                # A first step that never ends is told by its age, as any other.
                self.stats = self.stats._replace(ended_at=self._clock())
                self._deliver(self._apply(command))

    def end(self) -> None:
        """Answer everyone who still waits, in the queue of commands too, and free the context."""
        events: list[Addressed] = []
        while not self.commands.empty():
            events += self._apply(self.commands.get_nowait())
        ended = EngineClosed("the engine has ended")
        events += self._scheduler.fail(self._scheduler.all_sequences(), ended)
        self._deliver(events)
        self._backend.close()

    def step(self) -> tuple[list[Addressed], bool]:
        """One turn, one `llama_decode` at most: its events, and whether anything was computed."""
        events = self._drain_commands()
        plan = self._scheduler.steady
        if plan is None:
            events += self._scheduler.admit(self._clock(), self._n_admissible(self._scheduler.load()))
            plan = self._scheduler.plan(self._budget.prompt_tokens(self._scheduler.load()))
        if not plan.slices:
            return events, False
        events += self._compute(plan)
        return events, True

    def _compute(self, plan: Plan) -> list[Addressed]:
        started = self._clock()
        try:
            tokens = _sample(plan, self._backend.run(plan))
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(plan.slices))
            failure = error if isinstance(error, EngineError) else BackendError("the step failed")
            return self._scheduler.fail((part.sequence for part in plan.slices), failure)
        ended = self._clock()
        self._budget.observe(plan.n_decoding, plan.n_prompt_tokens, ended - started)
        events = self._scheduler.commit(plan, tokens, ended)
        self._publish(plan, len(tokens), started, ended)
        return events

    def _drain_commands(self) -> list[Addressed]:
        events: list[Addressed] = []
        for _ in range(min(COMMANDS_PER_STEP, self.commands.qsize())):  # this thread alone takes from it
            events += self._apply(self.commands.get_nowait())
        return events

    def _apply(self, command: Command) -> list[Addressed]:
        match command:
            case Start(sequence):
                self._scheduler.enqueue(sequence)
            case Cancel(key):
                return self._scheduler.cancel(key, self._clock())
            case SetPaused(key, paused):
                self._scheduler.set_paused(key, paused)
            case Close():
                self._closing = True
        return []

    def _n_admissible(self, load: Load) -> int:
        return self._budget.n_admissible(self._scheduler.n_running, load.n_prompts)

    def _idle_stats(self) -> StepStats:
        return StepStats(
            n_admissible=self._n_admissible(self._scheduler.load()),
            kv_promised_tokens=self._scheduler.kv_promised_tokens,
            kv_promised_bytes=self._scheduler.kv_promised_bytes,
            prompt_tokens_per_second=self._budget.prompt_tokens_per_second,
            kept=self._scheduler.kept(),
        )

    def _publish(self, plan: Plan, n_sampled: int, started: float, ended: float) -> None:
        old, load = self.stats, self._scheduler.load()
        since = old.ended_at if old.ended_at is not None else started
        rate = n_sampled / max(ended - since, 1e-6)
        stats = StepStats(
            n_decoding=load.n_decoding,
            n_admissible=self._n_admissible(load),
            kv_promised_tokens=self._scheduler.kv_promised_tokens,
            kv_promised_bytes=self._scheduler.kv_promised_bytes,
            prompt_tokens_per_second=self._budget.prompt_tokens_per_second,
            kept=self._scheduler.kept(),
            step_ms=_smooth(old.step_ms, 1000 * (ended - started)),
            ended_at=ended,
            tokens_per_second=_smooth(old.tokens_per_second, rate),
        )
        self._set_stats(stats)

    def _set_stats(self, stats: StepStats) -> None:
        changed = stats.n_admissible != self.stats.n_admissible
        self.stats = stats
        if changed:
            self._on_admission()


def _sample(plan: Plan, rows: Logits) -> list[int | EngineError]:
    """Draw the next token of each slice that samples; one that cannot be drawn fails alone.

    Shapes: `rows` is (slices that sample, vocabulary).
    """
    if not len(rows):
        return []
    greedy = argmax_rows(rows)
    return [
        int(greedy[i]) if part.sequence.sampler.is_greedy else _draw(part.sequence, rows[i])
        for i, part in enumerate(plan.sampled)
    ]


def _draw(sequence: Sequence, row: Logits) -> int | EngineError:
    try:
        return sequence.sampler.pick(row, sequence.n_generated)
    except Exception:
        logger.exception("sampling for sequence %s failed", sequence.key)
        return BackendError("sampling failed")


def _smooth(old: float, new: float) -> float:
    return old + 0.1 * (new - old) if old else new
