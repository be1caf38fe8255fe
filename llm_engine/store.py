"""What is kept outside the context: in host memory, and on disk what has no room there.

What lies on disk is brought to host memory before it is used. That takes its time, which is not the step's:
whoever needs it waits for a `Recall`.

Owns: both caches. Pure. Called by: `slots.py`, and by `loop.py` with what the disk has done.
"""

from dataclasses import dataclass

from llm_engine.diskcache import DiskCache, Outcome, Stored
from llm_engine.hostcache import HostCache, Saved


@dataclass(frozen=True, slots=True)
class Recall:
    """Until all of `wanted` has been read from `disk`."""

    disk: DiskCache
    wanted: tuple[Stored, ...]

    @property
    def is_on(self) -> bool:
        return any(map(self.disk.is_reading, self.wanted))


class Store:
    """States in at most `ram_bytes` of host memory, 0 for none, and on `disk`."""

    def __init__(self, ram_bytes: int, disk: DiskCache) -> None:
        self.disk = disk
        self.host = HostCache(ram_bytes, spill=disk.add)

    def runs(self, *, on_disk: bool) -> list[Saved | Stored]:
        return [*self.host.runs, *(self.disk.runs if on_disk else ())]

    def checkpoints(self, *, on_disk: bool) -> list[Saved | Stored]:
        """Those at hand come last."""
        return [*(self.disk.checkpoints if on_disk else ()), *self.host.checkpoints]

    def recall(self, wanted: tuple[Stored, ...], now: float) -> Recall | None:
        """Bring this to host memory; None if it is there already."""
        for stored in wanted:
            self._take_back(self.disk.recall(stored), now)
        recall = Recall(self.disk, wanted)
        return recall if recall.is_on else None

    def take(self, outcome: Outcome, now: float) -> None:
        """What came of an order to the disk."""
        self._take_back(self.disk.take(outcome), now)

    def expire(self, before: float) -> None:
        """Drop what was last used at `before` or earlier."""
        self.host.expire(before)
        self.disk.expire(before)

    @property
    def uses(self) -> list[float]:
        """When what may expire was last used."""
        return [used_at for _, used_at in (*self.host.uses, *self.disk.uses)]

    def _take_back(self, saved: Saved | None, now: float) -> None:
        if saved is not None and self.host.make_room(saved.state.n_bytes):
            self.host.add(saved, now)
