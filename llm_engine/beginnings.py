"""Where the beginning of a prompt is to be had: in a slot, in host memory, on disk, or soon.

Owns: nothing. It looks, and neither moves nor marks anything. Called by: `slots.py`, whose slots it sees.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from llm_engine.diskcache import Stored
from llm_engine.hostcache import Saved
from llm_engine.prefix import N_COMPUTED_ANEW, WORTH_TOKENS, Run, Trim, count_common
from llm_engine.sequence import Sequence
from llm_engine.store import Recall, Store


@dataclass(slots=True, eq=False)
class Slot:
    """One place in the context. Once `is_started`, its run is that of `holder`; before, an earlier one's."""

    seq_id: int
    run: Run
    last_used: float = 0.0  # monotonic seconds
    holder: Sequence | None = None
    is_started: bool = False
    waits_for: "Wait | Recall | None" = None
    has_recalled: bool = False  # what the disk had for its holder
    stops: set[int] = field(default_factory=set)  # lengths at which a slice has to end

    @property
    def n_computed(self) -> int:
        """Of its holder's tokens."""
        return self.run.n_cells if self.is_started else 0


@dataclass(frozen=True, slots=True)
class Wait:
    """Until `sequence` in `slot` has computed `n_tokens`."""

    slot: Slot
    sequence: Sequence
    n_tokens: int

    @property
    def is_on(self) -> bool:
        is_coming = self.slot.holder is self.sequence and not self.sequence.paused
        return is_coming and self.slot.n_computed < self.n_tokens


@dataclass(frozen=True, slots=True)
class Source:
    """Where the first `n_tokens` of a prompt can be had from; with a checkpoint, if cutting takes one."""

    place: Slot | Saved | Stored
    n_tokens: int
    checkpoint: Saved | Stored | None

    @property
    def on_disk(self) -> tuple[Stored, ...]:
        """What of it has to be read first."""
        return tuple(part for part in (self.place, self.checkpoint) if isinstance(part, Stored))


class Beginnings:
    """What lies in `slots` and in `store`; nothing of it is to be had unless the engine `reuses`."""

    def __init__(self, slots: Items[Slot], store: Store, trim: Trim, *, reuses: bool) -> None:
        self._slots = slots
        self._store = store
        self._trim = trim
        self._reuses = reuses

    def find(self, tokens: list[int], target: Slot | None, *, on_disk: bool) -> Source | None:
        """The longest beginning of `tokens` to be had, for a sequence in `target` or yet in any free slot."""
        checkpoints = self.checkpoints_of(tokens, on_disk=on_disk)
        best: Source | None = None
        for place in self._places(on_disk=on_disk):
            in_place = place is target if target else isinstance(place, Slot) and place.holder is None
            run = place.run if in_place else place.run.moved(self._trim)
            n_tokens = run.n_usable(_n_same(run, tokens), checkpoints)
            more = WORTH_TOKENS if isinstance(place, Stored) else 1
            least = best.n_tokens + more if best else 1 if in_place else WORTH_TOKENS
            if n_tokens >= least:
                checkpoint = checkpoints[n_tokens] if run.needs_checkpoint(n_tokens) else None
                best = Source(place, n_tokens, checkpoint)
        return best

    def to_come(self, tokens: list[int], earlier: Iterable[Slot], n_now: int) -> Wait | None:
        """The longest beginning that one of these has yet to compute, if it is worth the wait.

        So many tokens are to be had at once.
        """
        best: Wait | None = None
        for slot in earlier if self._reuses else ():
            other = slot.holder
            assert other is not None, f"slot {slot.seq_id} has no holder"
            n_tokens = count_common(other.tokens, tokens, limit(tokens))
            least = best.n_tokens + 1 if best else n_now + WORTH_TOKENS
            if n_tokens >= least and n_tokens > slot.n_computed and not other.paused:
                best = Wait(slot, other, n_tokens)
        return best

    def lies_elsewhere(self, slot: Slot) -> bool:
        """Whether all that lies in `slot` can be had from another place."""
        run = slot.run
        others = (place.run.moved(self._trim) for place in self._places() if place is not slot)
        return any(
            other.n_usable(count_common(other.tokens, run.tokens, min(run.n_cells, other.n_cells)))
            == run.n_cells
            for other in others
        )

    def longest_in_common(self, tokens: list[int]) -> int:
        """How many tokens of a prompt lie anywhere, whether they can be cut out there or not."""
        return max((_n_same(place.run, tokens) for place in self._places()), default=0)

    def checkpoints_of(self, tokens: list[int], *, on_disk: bool = True) -> dict[int, Saved | Stored]:
        """Those taken after a beginning of `tokens`, by its length."""
        return {
            kept.run.n_cells: kept
            for kept in self._store.checkpoints(on_disk=on_disk)
            if _n_same(kept.run, tokens) == kept.run.n_cells
        }

    def _places(self, *, on_disk: bool = True) -> list[Slot | Saved | Stored]:
        return [*self._slots, *self._store.runs(on_disk=on_disk)] if self._reuses else []


def limit(tokens: list[int]) -> int:
    """How much of a prompt may come from earlier cells."""
    return len(tokens) - N_COMPUTED_ANEW


def _n_same(run: Run, tokens: list[int]) -> int:
    """How many of its cells hold a beginning of the prompt `tokens`."""
    return count_common(run.tokens, tokens, min(run.n_cells, limit(tokens)))
