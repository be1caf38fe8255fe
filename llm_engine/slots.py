"""Who holds which slot, what lies in each, and who waits for whose prefix.

A sequence claims a slot and starts in it with the longest beginning of its prompt that lies anywhere: in that
slot, in another one, in host memory. Where another sequence is about to compute a longer one, it waits for
that instead, and takes a copy. So a prefix is computed once, however many ask for it at once.

Which slot: the one with most neighbours in use, because llama.cpp splits a batch wherever its sequence
numbers have a hole, in every step, while cells are moved once, a thousand times faster than they are
computed. Among equals: the slot in which the prompt's beginning lies, if little else is lost with it; else
one that holds nothing worth keeping; else the least recently used, whose cells go to host memory first. Where
none is set apart for that, no slot is taken that holds something, as long as there is another.

What lies on disk is read back into host memory first, elsewhere than here; the sequence waits for that. What
nobody used for `ttl_s` is dropped, wherever it lies.

Owns: the slots and their runs. Acts on cells through `Cells`, at once. Called by: `scheduler.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from llm_engine.beginnings import Beginnings, Slot, Source, Wait, limit
from llm_engine.diskcache import Stored
from llm_engine.errors import BackendError
from llm_engine.hostcache import KvState, Saved
from llm_engine.info import Tier
from llm_engine.prefix import WORTH_TOKENS, Run, Trim
from llm_engine.sequence import Sequence
from llm_engine.store import Store

# KV that is moved within one step beside running streams: some milliseconds.
GENTLE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class KvCost:
    """What the KV of a sequence takes: as much for each, and for each of its tokens."""

    sequence_bytes: int
    token_bytes: int

    def of(self, n_sequences: int, n_tokens: int) -> int:
        """Return the bytes of so many sequences with so many tokens together."""
        return n_sequences * self.sequence_bytes + n_tokens * self.token_bytes


class Cells(Protocol):
    """What can be done with the cells of a context. All of it happens at once.

    Raises: BackendError; nothing can be said then of the slot that was to be written.
    """

    @property
    def trim(self) -> Trim: ...
    @property
    def cost(self) -> KvCost: ...
    def n_state_bytes(self, slot: int, *, checkpoint: bool) -> int: ...
    def fetch(self, slot: int, *, checkpoint: bool) -> KvState: ...
    def restore(self, slot: int, state: KvState) -> None: ...
    def copy(self, source: int, target: int) -> None: ...

    def cut(self, slot: int, n_tokens: int) -> None:
        """Keep the first `n_tokens`."""


class Slots:
    """The slots of one context. Unless it `reuses`, every sequence starts from nothing."""

    def __init__(
        self,
        n_slots: int,
        cells: Cells,
        store: Store,
        *,
        is_end_of_turn: Callable[[int], bool],
        reuses: bool = True,
        ttl_s: float | None = None,
    ) -> None:
        self._cells = cells
        self.store = store
        self._is_end_of_turn = is_end_of_turn
        self._reuses = reuses
        self._ttl_s = ttl_s
        self._slots = [Slot(seq_id, Run()) for seq_id in range(n_slots)]
        self._beginnings = Beginnings(self._slots, store, cells.trim, reuses=reuses)
        self._held: dict[Sequence, Slot] = {}  # in order of their claims
        self._n_moved_bytes = 0  # copied, saved or restored

    @property
    def has_free(self) -> bool:
        return len(self._held) < len(self._slots)

    @property
    def tier(self) -> Tier:
        """What is kept in slots that are free. Thread: any."""
        return self._tier_of(slot.run for slot in self._slots if slot.holder is None and slot.run.is_loss(0))

    @property
    def running(self) -> Tier:
        """What the sequences that hold slots have in them. Thread: any."""
        return self._tier_of(slot.run for slot in self._slots if slot.holder is not None)

    def _tier_of(self, runs: Iterable[Run]) -> Tier:
        sizes = [run.n_cells for run in runs]
        return Tier(len(sizes), self.n_bytes_of(len(sizes), sum(sizes)))

    def n_bytes_of(self, n_sequences: int, n_tokens: int) -> int:
        """Return what the KV of so many sequences with so many tokens together takes."""
        return self._cells.cost.of(n_sequences, n_tokens)

    # -- a sequence's way --

    def claim(self, sequence: Sequence) -> None:
        """Give it a free slot; what lies there stays until it starts."""
        slot = self._choose(self._beginnings.find(sequence.tokens, None, on_disk=False))
        slot.holder = sequence
        sequence.seq_id = slot.seq_id
        self._held[sequence] = slot

    def start_ready(self, now: float, *, gently: bool = False) -> None:
        """Start whoever has nothing better to wait for.

        `gently`, because streams are running: once `GENTLE_BYTES` were moved, the rest start a step later.
        """
        most = self._n_moved_bytes + GENTLE_BYTES
        for sequence, slot in self._held.items():
            if gently and self._n_moved_bytes >= most:
                break
            if not slot.is_started and not (slot.waits_for and slot.waits_for.is_on):
                self._start_or_wait(slot, sequence, now)

    def n_ready(self, sequence: Sequence) -> int:
        """How many of its pending tokens the next slice may hold."""
        slot = self._held[sequence]
        if not slot.is_started:
            return 0
        n_cells = slot.run.n_cells
        return min((n - n_cells for n in slot.stops if n > n_cells), default=sequence.n_pending)

    def advance(self, sequence: Sequence, n_tokens: int, now: float) -> None:
        """So many more are computed."""
        slot = self._held[sequence]
        slot.last_used = now
        slot.run.n_cells += n_tokens
        sequence.n_computed = slot.run.n_cells
        if slot.run.n_cells in slot.stops:
            self._take_checkpoint(slot)

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """Its slot is free again; its cells stay there for others, if `keep`."""
        slot = self._held.pop(sequence)
        if slot.is_started:
            slot.run = slot.run.frozen()
            if not (keep and self._reuses):
                self._empty(slot)
        slot.holder, slot.is_started, slot.waits_for, slot.has_recalled = None, False, None, False
        slot.stops.clear()

    # -- choosing a slot --

    def _choose(self, source: Source | None) -> Slot:
        free = [slot for slot in self._slots if slot.holder is None]
        if not self.store.host.is_on:  # what gives way is gone
            harmless = [slot for slot in free if not _loses(slot, source)]
            free = harmless or [min(free, key=lambda slot: slot.last_used)]
        most = max(map(self._n_neighbours, free))
        fit = [slot for slot in free if self._n_neighbours(slot) == most]
        for slot in fit:
            if source is not None and slot is source.place and not _loses(slot, source):
                return slot
        return min(fit, key=lambda slot: (slot.run.is_loss(0), slot.last_used, slot.seq_id))

    def _n_neighbours(self, slot: Slot) -> int:
        beside = (slot.seq_id - 1, slot.seq_id + 1)
        return sum(self._slots[i].holder is not None for i in beside if 0 <= i < len(self._slots))

    # -- waiting --

    def _start_or_wait(self, slot: Slot, sequence: Sequence, now: float) -> None:
        source = self._beginnings.find(sequence.tokens, slot, on_disk=not slot.has_recalled)
        slot.waits_for = self._better_to_come(sequence, source.n_tokens if source else 0)
        if slot.waits_for is not None:
            return
        if source is None or not source.on_disk:
            self._start(slot, sequence, source, now)
            return
        slot.has_recalled = True  # once for each sequence, since one may drive out the other in host memory
        slot.waits_for = self.store.recall(source.on_disk, now)
        if slot.waits_for is None:
            self._start_or_wait(slot, sequence, now)

    def _better_to_come(self, sequence: Sequence, n_now: int) -> Wait | None:
        """The longest beginning that another has yet to compute, if it is worth the wait.

        Only those who claimed earlier are waited for, so that nobody waits in a circle.
        """
        earlier = takewhile(lambda slot: slot.holder is not sequence, self._held.values())
        wait = self._beginnings.to_come(sequence.tokens, earlier, n_now)
        return wait if wait is None or self._cells.trim is Trim.ANYWHERE else _stopping(wait)

    # -- starting --

    def _start(self, slot: Slot, sequence: Sequence, source: Source | None, now: float) -> None:
        stops = self._checkpoints_to_take(sequence.tokens)
        if source is not None:
            self._use_host(source, now)
        self._save_what_is_lost(slot, source)
        run = self._brought(slot, source) if source else None
        if run is None:
            self._cells.cut(slot.seq_id, 0)
            run = Run.begun(self._cells.trim)
        slot.run = run.continued(sequence.tokens, run.n_cells)
        slot.is_started, slot.last_used = True, now
        slot.stops.update(n for n in stops if n > run.n_cells)
        sequence.n_cached = sequence.n_computed = run.n_cells

    def _brought(self, slot: Slot, source: Source) -> Run | None:
        """The source's run, in `slot` and cut for the prompt; None if llama.cpp does not take it."""
        place = source.place
        assert not isinstance(place, Stored), f"file {place.number} is still to be read"
        if place is not slot:
            self._n_moved_bytes += self.n_bytes_of(1, place.run.n_cells)
        try:
            if isinstance(place, Saved):
                self._cells.restore(slot.seq_id, place.state)
            elif place is not slot:
                self._cells.copy(place.seq_id, slot.seq_id)
            if isinstance(source.checkpoint, Saved):
                self._cells.restore(slot.seq_id, source.checkpoint.state)
            self._cells.cut(slot.seq_id, source.n_tokens)
        except BackendError:
            self._forget(source)
            return None
        run = place.run if place is slot else place.run.moved(self._cells.trim)
        if isinstance(place, Slot) and place is not slot:
            self._leave(place, source.n_tokens)
        return run.continued(run.tokens, source.n_tokens)

    def _leave(self, place: Slot, n_tokens: int) -> None:
        """So much of what lies there lies somewhere else now."""
        if not place.is_started and not place.run.is_loss(n_tokens):
            self._empty(place)

    def _forget(self, source: Source) -> None:
        for saved in (source.place, source.checkpoint):
            if isinstance(saved, Saved):
                self.store.host.drop(saved)

    def _empty(self, slot: Slot) -> None:
        self._cells.cut(slot.seq_id, 0)
        slot.run = Run()

    # -- keeping in host memory --

    def _use_host(self, source: Source, now: float) -> None:
        """What moves out whole leaves its room to what it displaces; the rest is used now."""
        place, checkpoint = source.place, source.checkpoint
        if isinstance(checkpoint, Saved):
            self.store.host.touch(checkpoint, now)
        if isinstance(place, Saved):
            if place.run.is_loss(source.n_tokens):
                self.store.host.touch(place, now)
            else:
                self.store.host.drop(place)

    def _save_what_is_lost(self, slot: Slot, source: Source | None) -> None:
        """Keep the run in `slot`, unless most of it stays in use there or lies elsewhere too."""
        if _loses(slot, source) and not self._beginnings.lies_elsewhere(slot):
            self._save(slot, slot.run.moved(self._cells.trim), checkpoint=False)

    def _checkpoints_to_take(self, tokens: list[int]) -> set[int]:
        """Where prompts that begin like this one are likely to part from it.

        After its first turn, which is often a system prompt that many share; after its last, because
        templates write an old answer otherwise than a new one; and where one parted before. But not just
        behind another one, which does as well.
        """
        if not self.store.host.is_on or self._cells.trim is Trim.ANYWHERE:
            return set()
        ends = [n for n in range(1, limit(tokens) + 1) if self._is_end_of_turn(tokens[n - 1])]
        kept = self._beginnings.checkpoints_of(tokens)
        return {
            n
            for n in (*ends[:1], *ends[-1:], self._beginnings.longest_in_common(tokens))
            if n >= max((before for before in kept if before <= n), default=0) + WORTH_TOKENS
        }

    def _take_checkpoint(self, slot: Slot) -> None:
        slot.stops.discard(slot.run.n_cells)
        run = slot.run.frozen()
        if run.n_cells not in self._beginnings.checkpoints_of(slot.run.tokens):
            self._save(slot, run, checkpoint=True)

    def _save(self, slot: Slot, run: Run, *, checkpoint: bool) -> None:
        if self.store.host.make_room(self._cells.n_state_bytes(slot.seq_id, checkpoint=checkpoint)):
            saved = self._fetched(slot, run, checkpoint=checkpoint)
            if saved is not None:
                self._n_moved_bytes += self.n_bytes_of(1, run.n_cells)
                self.store.host.add(saved, slot.last_used)

    def _fetched(self, slot: Slot, run: Run, *, checkpoint: bool) -> Saved | None:
        """None if llama.cpp does not give it; it is not kept, then."""
        try:
            return Saved(run, self._cells.fetch(slot.seq_id, checkpoint=checkpoint))
        except BackendError:
            return None

    def put_away(self) -> Iterator[None]:
        """Give the disk everything kept in slots and host memory, the last used first, one at each turn."""
        if not self.store.disk.is_on:
            return
        kept: list[tuple[Slot | Saved, float]] = [(slot, slot.last_used) for slot in self._slots]
        kept += self.store.host.uses
        for place, used_at in sorted(kept, key=lambda item: item[1], reverse=True):
            saved = self._put_away_of(place) if isinstance(place, Slot) else place
            if saved is not None:
                self.store.disk.add(saved, used_at)
                yield

    def _put_away_of(self, slot: Slot) -> Saved | None:
        if not slot.run.is_loss(0):
            return None
        if self._beginnings.lies_elsewhere(slot):
            self._empty(slot)  # of two that are equal only this one is left out
            return None
        return self._fetched(slot, slot.run.moved(self._cells.trim), checkpoint=False)

    # -- expiring --

    def expire(self, now: float) -> float | None:
        """Drop what nobody used for `ttl_s`; returns when to look again, None for never."""
        if self._ttl_s is None:
            return None
        before = now - self._ttl_s
        idle = [slot for slot in self._slots if slot.holder is None]
        for slot in idle:
            if slot.last_used <= before and slot.run.n_cells:
                self._empty(slot)
        self.store.expire(before)
        uses = [*self.store.uses, *(slot.last_used for slot in idle if slot.run.n_cells)]
        return min(uses, default=now) + self._ttl_s


def _loses(slot: Slot, source: Source | None) -> bool:
    """Whether something of use gives way, in `slot`, to a sequence that begins with `source`."""
    return slot.run.is_loss(source.n_tokens if source is not None and source.place is slot else 0)


def _stopping(wait: Wait) -> Wait:
    """Have a slice of the other end where this prompt parts from it; a stop just before does as well."""
    stops = wait.slot.stops
    first = max(wait.n_tokens - WORTH_TOKENS, wait.slot.n_computed) + 1
    stop = max((n for n in stops if first <= n <= wait.n_tokens), default=wait.n_tokens)
    stops.add(stop)
    return Wait(wait.slot, wait.sequence, stop)
