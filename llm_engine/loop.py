"""The step: drain commands, expire, admit, plan, decode, sample, commit, deliver.

Owns: nothing but the order of things. Thread: `run` is the step thread; `step` is a plain method, so that
tests turn it with no thread. Called by: `engine.py`, which starts the thread and takes the events.
"""

import logging
import queue
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from llm_engine.backend import Backend
from llm_engine.budget import Budget, Load
from llm_engine.diskcache import Outcome
from llm_engine.errors import BackendError, EngineClosed, EngineError
from llm_engine.llama import Logits
from llm_engine.plan import Plan
from llm_engine.sampling import argmax_rows
from llm_engine.scheduler import Addressed, Scheduler
from llm_engine.sequence import Sequence
from llm_engine.slots import Slots

logger = logging.getLogger(__name__)

COMMANDS_PER_STEP = 256
PUT_AWAY_S = 5.0  # for writing what is kept, at the end


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
class Disk:
    """The disk has done something."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Close:
    keep_sessions: bool  # on disk, if there is one


Command: TypeAlias = Start | Cancel | SetPaused | Disk | Close


class StepStats(NamedTuple):
    """How the last steps went; published after each for any thread to read."""

    n_admissible: int  # sequences that may be in the engine before more would slow the step too far
    kv_promised_tokens: int
    prompt_tokens_per_second: float
    n_decoding: int = 0
    step_ms: float = 0.0  # smoothed
    ended_at: float | None = None  # monotonic; of the first, when it was due; None while idle
    tokens_per_second: float = 0.0  # smoothed


class Loop:
    """One engine's step loop."""

    def __init__(
        self,
        backend: Backend,
        slots: Slots,
        scheduler: Scheduler,
        budget: Budget,
        deliver: Callable[[list[Addressed]], None],
        on_admission: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._backend = backend
        self._slots = slots
        self._scheduler = scheduler
        self._budget = budget
        self._deliver = deliver
        self._on_admission = on_admission  # called when `stats.n_admissible` has changed
        self._clock = clock
        self._closing = False
        self._keeps_sessions = False
        self._expires_at: float | None = clock()  # when something kept may have outlived its time
        self._events: list[Addressed] = []  # not yet delivered
        self.stats = self._idle_stats()

    def run(self) -> None:
        """Step until closed; sleeps when there is nothing to compute."""
        while not self._closing:
            if not self.step() and not self._closing:
                self._sleep()

    def end(self) -> None:
        """Answer everyone who still waits, in the queue of commands too, and free the context."""
        keeps_sessions = self._keeps_sessions  # not if a fault came first: nobody knows what cells hold then
        while not self.commands.empty():
            self._apply(self.commands.get_nowait())
        ended = EngineClosed("the engine has ended")
        self._events += self._scheduler.fail(self._scheduler.all_sequences(), ended)
        self._deliver_events()
        if keeps_sessions:
            self._put_away(self._clock() + PUT_AWAY_S)
        self._backend.close()

    def step(self) -> bool:
        """One turn: what was asked for, the next token of each that runs, a part of the prompts.

        Whether anything was computed. What a call of `llama_decode` gives is delivered before the next.
        """
        self._drain_commands()
        self._expire()
        steady = self._scheduler.steady
        if steady is not None:
            plans = [steady]
        else:
            n_admissible = self._n_admissible(self._scheduler.load())
            self._events += self._scheduler.admit(self._clock(), n_admissible)
            plans = self._scheduler.plan(self._budget.allowance(self._scheduler.load()))
        if plans:
            self._compute(plans)
            return True
        if not self._closing:
            self._set_stats(self._idle_stats())
        self._deliver_events()
        return False

    def _compute(self, plans: list[Plan]) -> None:
        """Compute a step's plans. One that fails ends the step, since the next may go on from it."""
        began, since = self._clock(), self.stats.ended_at
        for plan in plans:
            started = self._clock()
            try:
                tokens = _sample(plan, self._backend.run(plan))
            except Exception as error:
                self._fail(plan, error)
                return
            self._commit(plan, tokens, self._clock() - started)
            self._publish()
            if plan is plans[-1]:
                self._measure(began, began if since is None else since, plans)
            self._deliver_events()

    def _deliver_events(self) -> None:
        events, self._events = self._events, []
        if events:
            self._deliver(events)

    def _commit(self, plan: Plan, tokens: list[int | EngineError], elapsed_s: float) -> None:
        budget, prompts = self._budget, (plan.n_prompt_tokens, plan.n_prompt_cells)
        if not plan.n_decoding:
            budget.observe_prompts(*prompts, elapsed_s)
        else:
            if plan.n_prompt_tokens:
                budget.observe_joined(plan.n_decoding, *prompts, elapsed_s)
            budget.observe_decoding(len(plan.slices), elapsed_s)
        self._events += self._scheduler.commit(plan, tokens, self._clock())

    def _fail(self, plan: Plan, error: Exception) -> None:
        logger.error("a step of %d sequences failed", len(plan.slices), exc_info=error)
        failure = error if isinstance(error, EngineError) else BackendError("the step failed")
        self._events += self._scheduler.fail((part.sequence for part in plan.slices), failure)
        self._deliver_events()

    def _sleep(self) -> None:
        """Until there is a command, or something that is kept has outlived its time."""
        timeout_s = None if self._expires_at is None else max(0.0, self._expires_at - self._clock())
        with suppress(queue.Empty):
            command = self.commands.get(timeout=timeout_s)
            # A first step that never ends is told by its age, as any other.
            self.stats = self.stats._replace(ended_at=self._clock())
            self._apply(command)
            self._deliver_events()

    def _expire(self) -> None:
        now = self._clock()
        if self._expires_at is not None and now >= self._expires_at:
            self._expires_at = self._slots.expire(now)

    def _put_away(self, deadline: float) -> None:
        """Have the disk write what is kept, one after another, as far as that goes."""
        self._await_disk(deadline)
        for _ in self._slots.put_away():
            self._await_disk(deadline)
            if self._clock() >= deadline:
                logger.warning("the disk is too slow to keep every session")
                return

    def _await_disk(self, deadline: float) -> None:
        while self._slots.store.disk.is_writing and (left_s := deadline - self._clock()) > 0:
            with suppress(queue.Empty):
                self._apply(self.commands.get(timeout=left_s))

    def _drain_commands(self) -> None:
        for _ in range(min(COMMANDS_PER_STEP, self.commands.qsize())):  # this thread alone takes from it
            self._apply(self.commands.get_nowait())

    def _apply(self, command: Command) -> None:
        match command:
            case Start(sequence):
                self._scheduler.enqueue(sequence)
            case Cancel(key):
                self._events += self._scheduler.cancel(key, self._clock())
            case SetPaused(key, paused):
                self._scheduler.set_paused(key, paused)
            case Disk(outcome):
                self._slots.store.take(outcome, self._clock())
            case Close(keep_sessions):
                self._closing = True
                self._keeps_sessions = keep_sessions

    def _n_admissible(self, load: Load) -> int:
        return self._budget.n_admissible(self._scheduler.n_running, load.n_prompts)

    def _idle_stats(self) -> StepStats:
        return StepStats(
            n_admissible=self._n_admissible(self._scheduler.load()),
            kv_promised_tokens=self._scheduler.kv_promised_tokens,
            prompt_tokens_per_second=self._budget.prompt_tokens_per_second,
        )

    def _publish(self) -> None:
        """Tell how things stand, before anybody hears of what was computed."""
        load = self._scheduler.load()
        stats = self.stats._replace(
            n_decoding=load.n_decoding,
            n_admissible=self._n_admissible(load),
            kv_promised_tokens=self._scheduler.kv_promised_tokens,
            prompt_tokens_per_second=self._budget.prompt_tokens_per_second,
            ended_at=self._clock(),
        )
        self._set_stats(stats)

    def _measure(self, started: float, since: float, plans: list[Plan]) -> None:
        """Tell how fast steps are, at the end of one; the one before it ended at `since`."""
        old, ended = self.stats, self._clock()
        rate = sum(len(plan.sampled) for plan in plans) / max(ended - since, 1e-6)
        self.stats = old._replace(
            step_ms=_smooth(old.step_ms, 1000 * (ended - started)),
            tokens_per_second=_smooth(old.tokens_per_second, rate),
        )

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
