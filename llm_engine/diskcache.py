"""KV that host memory had no room for, on disk: what lies there, what is on its way, what is worth its place.

A run lies in one place only: read back, it leaves the disk for host memory. This is the step thread's view.
The files are written, read and removed elsewhere: `order` takes what is to be done, in its order, and what
came of it returns as an outcome. Until a state is written it is held here, within a bound of its own; what
goes beyond that is lost rather than waited for.

Owns: the index of the files, and the states not yet written. Pure. Called by: `slots.py`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from llm_engine.hostcache import KvState, Saved
from llm_engine.info import Tier
from llm_engine.prefix import Run

WRITING_BYTES = 256 << 20  # of states that wait for the disk; one is taken whatever its size
MAX_FILES = 1000  # each is compared with every prompt


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A run on disk; of a checkpoint, the tokens after which it was taken. `number` names its file."""

    number: int
    run: Run
    is_checkpoint: bool
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Write:
    """Keep this state; `used_at` is monotonic seconds."""

    stored: Stored
    state: KvState
    used_at: float


@dataclass(frozen=True, slots=True)
class Read:
    """Bring this state back."""

    stored: Stored


@dataclass(frozen=True, slots=True)
class Remove:
    """It is of no use any more."""

    stored: Stored


@dataclass(frozen=True, slots=True)
class Sweep:
    """Remove what has outlived its time in places that are nobody's now."""


Order: TypeAlias = Write | Read | Remove | Sweep


@dataclass(frozen=True, slots=True)
class Written:
    """It lies on disk."""

    stored: Stored


@dataclass(frozen=True, slots=True)
class Loaded:
    """It is back."""

    stored: Stored
    state: KvState


@dataclass(frozen=True, slots=True)
class Lost:
    """It could not be written, or cannot be read; its file is gone."""

    stored: Stored


Outcome: TypeAlias = Written | Loaded | Lost


class DiskCache:
    """States on disk within `limit_bytes`; 0 keeps none. `found` is what lay there, with its last use."""

    def __init__(
        self,
        limit_bytes: int = 0,
        order: Callable[[Order], None] | None = None,
        found: Iterable[tuple[Stored, float]] = (),
    ) -> None:
        self._limit_bytes = limit_bytes
        self._order = order or _refuse
        self._stored: dict[Stored, float] = {}  # and when it was last used
        self._writing: dict[Stored, KvState] = {}
        self._writing_bytes = 0
        self._reading: set[Stored] = set()
        self._last_number = 0
        self._n_runs = 0
        self.n_bytes = 0
        for stored, used_at in found:
            self._last_number = max(self._last_number, stored.number)
            self._enter(stored, used_at)
        self._make_room(0, math.inf)

    @property
    def is_on(self) -> bool:
        return self._limit_bytes > 0

    @property
    def is_writing(self) -> bool:
        return bool(self._writing)

    @property
    def runs(self) -> list[Stored]:
        return [stored for stored in self._stored if not stored.is_checkpoint]

    @property
    def checkpoints(self) -> list[Stored]:
        return [stored for stored in self._stored if stored.is_checkpoint]

    @property
    def tier(self) -> Tier:
        """Thread: any."""
        return Tier(self._n_runs, self.n_bytes)

    # -- in and out --

    def add(self, saved: Saved, used_at: float) -> None:
        """Have it written, unless the disk is too far behind, or full of what was used later."""
        n_bytes = saved.state.n_bytes
        is_behind = self._writing and self._writing_bytes + n_bytes > WRITING_BYTES
        if n_bytes > self._limit_bytes or is_behind or not self._make_room(n_bytes, used_at):
            return
        self._last_number += 1
        stored = Stored(self._last_number, saved.run, saved.state.is_checkpoint, n_bytes)
        self._enter(stored, used_at)
        self._writing[stored] = saved.state
        self._writing_bytes += n_bytes
        self._order(Write(stored, saved.state, used_at))

    def recall(self, stored: Stored) -> Saved | None:
        """Take it from here: at once if it is not written yet, else it comes as an outcome."""
        state = self._writing.get(stored)
        if state is not None:
            self._drop(stored)
            return Saved(stored.run, state)
        if stored not in self._reading:
            self._reading.add(stored)
            self._order(Read(stored))
        return None

    def is_reading(self, stored: Stored) -> bool:
        return stored in self._reading

    def take(self, outcome: Outcome) -> Saved | None:
        """What came of an order; returns what was read, which lies here no longer."""
        stored = outcome.stored
        match outcome:
            case Written():
                self._forget_state(stored)
            case Loaded(_, state):
                self._drop(stored)
                return Saved(stored.run, state)
            case Lost():
                self._forget_state(stored)
                self._leave(stored)
        return None

    # -- what is not worth its place --

    def expire(self, before: float) -> None:
        """Drop what was last used at `before` or earlier, here and where nobody is left to do so."""
        for stored, used_at in self.uses:
            if used_at <= before:
                self._drop(stored)
        if self.is_on:
            self._order(Sweep())

    @property
    def uses(self) -> list[tuple[Stored, float]]:
        """Everything but what is being read, with its last use."""
        return [(stored, used_at) for stored, used_at in self._stored.items() if stored not in self._reading]

    def _make_room(self, n_bytes: int, used_at: float) -> bool:
        """For one file more, of so many bytes; whether that took only what was last used before `used_at`."""
        idle = [stored for stored, at in self.uses if at <= used_at]
        idle.sort(key=self._stored.__getitem__, reverse=True)
        while len(self._stored) >= MAX_FILES or self.n_bytes + n_bytes > self._limit_bytes:
            if not idle:
                return False
            self._drop(idle.pop())
        return True

    # -- bookkeeping --

    def _enter(self, stored: Stored, used_at: float) -> None:
        self._stored[stored] = used_at
        self.n_bytes += stored.n_bytes
        self._n_runs += not stored.is_checkpoint

    def _drop(self, stored: Stored) -> None:
        self._leave(stored)
        self._order(Remove(stored))

    def _leave(self, stored: Stored) -> None:
        """The index, if it is there: what was dropped while it was written may still have an outcome."""
        self._reading.discard(stored)
        if stored in self._stored:
            del self._stored[stored]
            self.n_bytes -= stored.n_bytes
            self._n_runs -= not stored.is_checkpoint

    def _forget_state(self, stored: Stored) -> None:
        if stored in self._writing:
            del self._writing[stored]
            self._writing_bytes -= stored.n_bytes


def _refuse(order: Order) -> None:
    raise AssertionError(f"{type(order).__name__} without a disk")
