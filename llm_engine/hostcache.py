"""KV kept in host memory, bounded, least recently used out first.

Two kinds lie here: the whole of a run whose slot another took, and checkpoints: the part of a sequence's
state that cannot be cut (recurrent state, the last sliding window), as it was after so many tokens. What
has to leave for want of room is spilled, to disk if there is one; what was not used for long is dropped.

Owns: the saved states. Pure: it holds the bytes and never looks at them. Called by: `slots.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_engine.info import Tier

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from llm_engine.prefix import Run


@dataclass(frozen=True, slots=True, eq=False)
class KvState:
    """llama.cpp's bytes for one sequence, good only in a context of the same fingerprint."""

    data: "npt.NDArray[np.uint8]"
    is_checkpoint: bool
    fingerprint: str

    @property
    def n_bytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A run in host memory; of a checkpoint, the tokens after which it was taken."""

    run: "Run"
    state: KvState


class HostCache:
    """States within `limit_bytes`; 0 keeps none. `spill` takes what has to leave, with its last use."""

    def __init__(self, limit_bytes: int, spill: Callable[[Saved, float], None]) -> None:
        self._limit_bytes = limit_bytes
        self._spill = spill
        self._saved: dict[Saved, float] = {}  # and when it was last used
        self.n_bytes = 0
        self._n_runs = 0

    @property
    def is_on(self) -> bool:
        return self._limit_bytes > 0

    @property
    def runs(self) -> list[Saved]:
        return [saved for saved in self._saved if not saved.state.is_checkpoint]

    @property
    def checkpoints(self) -> list[Saved]:
        return [saved for saved in self._saved if saved.state.is_checkpoint]

    @property
    def uses(self) -> list[tuple[Saved, float]]:
        """Everything, with its last use."""
        return [*self._saved.items()]

    @property
    def tier(self) -> Tier:
        """Thread: any."""
        return Tier(self._n_runs, self.n_bytes)

    def make_room(self, n_bytes: int) -> bool:
        """Let the least recently used go until `n_bytes` more fit; False if they never will."""
        if n_bytes > self._limit_bytes:
            return False
        while self.n_bytes + n_bytes > self._limit_bytes:
            oldest = min(self._saved, key=self._saved.__getitem__)
            used_at = self._saved[oldest]
            self.drop(oldest)
            self._spill(oldest, used_at)
        return True

    def add(self, saved: Saved, used_at: float) -> None:
        """Keep what `make_room` made room for."""
        n_bytes = self.n_bytes + saved.state.n_bytes
        assert n_bytes <= self._limit_bytes, f"{n_bytes} bytes in a cache of {self._limit_bytes}"
        self._saved[saved] = used_at
        self.n_bytes = n_bytes
        self._n_runs += not saved.state.is_checkpoint

    def touch(self, saved: Saved, now: float) -> None:
        """It is used now."""
        del self._saved[saved]
        self._saved[saved] = now

    def drop(self, saved: Saved) -> None:
        """Keep it no longer, if it still is."""
        if saved in self._saved:
            del self._saved[saved]
            self.n_bytes -= saved.state.n_bytes
            self._n_runs -= not saved.state.is_checkpoint

    def expire(self, before: float) -> None:
        """Drop what was last used at `before` or earlier."""
        for saved, used_at in self.uses:
            if used_at <= before:
                self.drop(saved)
