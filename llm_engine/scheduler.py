"""Which tokens the next step computes, and what its results mean.

Owns: the waiting and the running sequences. Pure: no clock, no library, no logging.
Called by: `loop.py`, on the step thread. `plan` decides, `commit` takes the sampled tokens; the events of
both are (key, event) pairs for the callers. Which slot a sequence gets, and what of its prompt is computed
already, is the business of `slots.py`.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, Self, TypeAlias

from llm_engine.budget import Allowance, Load
from llm_engine.errors import EngineError
from llm_engine.generation import Delta, Event, Failed, StopReason
from llm_engine.sequence import Sequence
from llm_engine.slots import Slots

Addressed: TypeAlias = tuple[Hashable, Event]

# The part of a step's prompt tokens kept for the prompt with the least left, so that a short question
# behind a long document does not wait for all of it.
_SHORTEST_SHARE = 4

# Up to so many cells llama.cpp's CPU backend computes a token that is alone in its call as it does beside
# others; from there on it takes another path through attention, and rounds differently.
# Source: ggml_compute_forward_flash_attn_ext_f16, `use_split_kv_path`; caches are padded to 256 cells.
_ALIKE_UP_TO = 256


class Vocabulary(Protocol):
    """What the scheduler must know of tokens."""

    def piece(self, token: int) -> bytes: ...
    def is_end_of_generation(self, token: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class Slice:
    """The next `n_tokens` pending tokens of one sequence; `samples` if they are all that is pending."""

    sequence: Sequence
    n_tokens: int
    samples: bool

    @classmethod
    def of(cls, sequence: Sequence, n_tokens: int, n_before: int = 0) -> Self:
        """`n_before`: pending tokens that another call of the same step computes first."""
        return cls(sequence, n_tokens, n_before + n_tokens == sequence.n_pending)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one `llama_decode` computes.

    The slices are in the order of their slots: llama.cpp computes sequences together only where their
    numbers follow each other in the batch, and splits the batch wherever they do not.
    """

    slices: list[Slice]
    sampled: list[Slice]  # those that yield a token, in the order of their rows of logits
    n_decoding: int  # 0: prompts only
    n_prompt_tokens: int
    n_prompt_cells: int  # that the prompts' tokens attend to, together

    @classmethod
    def of(cls, decoding: Iterable[Slice], prompts: Iterable[Slice]) -> Self:
        decoding, prompts = list(decoding), list(prompts)
        slices = sorted((*decoding, *prompts), key=lambda part: part.sequence.slot)
        return cls(
            slices,
            [part for part in slices if part.samples],
            len(decoding),
            sum(part.n_tokens for part in prompts),
            sum(part.n_tokens * (part.sequence.n_computed + part.n_tokens // 2) for part in prompts),
        )


class Scheduler:
    """Continuous batching: sequences join and leave at any step."""

    def __init__(self, slots: Slots, vocabulary: Vocabulary, prompt_slice: int | None) -> None:
        self._slots = slots
        self._prompt_slice = prompt_slice  # tokens of one prompt in a step at most, to be batch-invariant
        self._vocabulary = vocabulary
        self._waiting: deque[Sequence] = deque()
        self._running: dict[Hashable, Sequence] = {}  # in order of admission
        self._last: Plan | None = None  # the last step's only plan, while it still holds
        self.kv_promised_tokens = 0  # cells that the running sequences hold or may still fill

    # -- entering and leaving --

    def enqueue(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def admit(self, now: float, n_admissible: int) -> list[Addressed]:
        """Give free slots to waiting sequences, so that at most `n_admissible` run.

        A continuation that was complete already ends here.
        """
        events: list[Addressed] = []
        while self._waiting and self._slots.has_free and self.n_running < n_admissible:
            sequence = self._waiting.popleft()
            self._slots.claim(sequence)
            sequence.admitted_at = now
            self._running[sequence.key] = sequence
            self.kv_promised_tokens += sequence.kv_promised_tokens
            self._last = None
            if sequence.n_generated:
                events += self._resume(sequence, now)
        self._slots.start_ready(now, gently=self.load().n_decoding > 0)
        return events

    def cancel(self, key: Hashable, now: float) -> list[Addressed]:
        """End a sequence wherever it is; nothing for one that ended before."""
        sequence = self._find(key)
        if sequence is None:
            return []
        finished = sequence.finished(StopReason.CANCELLED, now)
        self._remove(sequence, keep_cells=True)
        return [(key, finished)]

    def set_paused(self, key: Hashable, paused: bool) -> None:
        """Leave a sequence out of the batch, or take it in again; its cells stay."""
        sequence = self._find(key)
        if sequence is not None:
            sequence.paused = paused
            self._last = None

    def fail(self, sequences: Iterable[Sequence], error: EngineError) -> list[Addressed]:
        """End sequences with an error; nobody knows what their cells hold."""
        failed = list(sequences)
        for sequence in failed:
            self._remove(sequence, keep_cells=False)
        return [(sequence.key, Failed(error)) for sequence in failed]

    def all_sequences(self) -> list[Sequence]:
        return [*self._running.values(), *self._waiting]

    # -- counts --

    def load(self) -> Load:
        """What the next step has to do; paused sequences are no part of it."""
        if self._last is not None:
            return Load(n_decoding=self._last.n_decoding, n_prompts=0)
        active = [s for s in self._running.values() if not s.paused]
        depths = [s.n_computed for s in active if not s.is_decoding]
        depth = sum(depths) // len(depths) if depths else 0
        return Load(n_decoding=len(active) - len(depths), n_prompts=len(depths), depth=depth)

    @property
    def n_running(self) -> int:
        """Sequences that hold a slot, paused ones too."""
        return len(self._running)

    # -- the step --

    @property
    def steady(self) -> Plan | None:
        """The last step's only plan, if it is the next one's too: all decode, nobody joined, left or paused.

        Most steps are like that, and between two steps nothing is in the processor's caches.
        """
        may_join = self._waiting and self._slots.has_free
        return None if may_join else self._last

    def plan(self, allowance: Allowance) -> list[Plan]:
        """What the next step computes: every running sequence's next token, and then a part of the prompts.

        In two calls, so that the tokens of the first leave before the second begins.
        """
        active = [s for s in self._running.values() if not s.paused]
        decoding = [Slice.of(s, 1) for s in active if s.is_decoding]
        ready = {s: n for s in active if not s.is_decoding and (n := self._slots.n_ready(s))}
        n_most = self._prompt_slice or allowance.n_tokens
        shares = _share({s: min(n, n_most) for s, n in ready.items()}, allowance)
        joining = _joining(shares, ready, decoding)
        first = Plan.of(decoding, [Slice.of(s, 1) for s in joining])
        rest = {s: n for s, share in shares.items() if (n := share - (s in joining))}
        if self._prompt_slice is not None:
            left = {s: ready[s] - (s in joining) for s in rest}
            rest = _in_company(rest, left, joining, allowance.n_tokens - sum(rest.values()))
        second = Plan.of([], [Slice.of(s, n, n_before=int(s in joining)) for s, n in rest.items() if n])
        self._last = first if decoding and len(decoding) == len(active) else None
        return [plan for plan in (first, second) if plan.slices]

    def commit(self, plan: Plan, tokens: Iterable[int | EngineError], now: float) -> list[Addressed]:
        """Take a computed plan: one token, or what went wrong with it, for each slice that samples."""
        for part in plan.slices:
            self._slots.advance(part.sequence, part.n_tokens, now)
        events: list[Addressed] = []
        for part, token in zip(plan.sampled, tokens, strict=True):
            if isinstance(token, EngineError):
                events += self.fail([part.sequence], token)
            else:
                events += self._accept(part.sequence, token, now)
        return events

    def _accept(self, sequence: Sequence, token: int, now: float) -> list[Addressed]:
        if not sequence.is_decoding:
            sequence.first_token_at = now
        text = sequence.accept(token, self._piece(token))
        delta: Addressed = (sequence.key, Delta(text, (token,)))
        return [delta, *self._end_if_over(sequence, now)]

    def _resume(self, sequence: Sequence, now: float) -> list[Addressed]:
        """Replay tokens delivered by an earlier attempt: state is rebuilt, nothing is sent again."""
        replayed = sequence.tokens[sequence.n_prompt :]
        del sequence.tokens[sequence.n_prompt :]
        for token in replayed:
            sequence.accept(token, self._piece(token))
        return self._end_if_over(sequence, now)

    def _piece(self, token: int) -> bytes | None:
        return None if self._vocabulary.is_end_of_generation(token) else self._vocabulary.piece(token)

    def _end_if_over(self, sequence: Sequence, now: float) -> list[Addressed]:
        if sequence.stop_reason is None:
            return []
        finished = sequence.finished(sequence.stop_reason, now)
        self._remove(sequence, keep_cells=True)
        return [(sequence.key, finished)]

    def _find(self, key: Hashable) -> Sequence | None:
        running = self._running.get(key)
        return running or next((s for s in self._waiting if s.key == key), None)

    def _remove(self, sequence: Sequence, *, keep_cells: bool) -> None:
        if sequence.seq_id is None:
            self._waiting.remove(sequence)
            return
        del self._running[sequence.key]
        self.kv_promised_tokens -= sequence.kv_promised_tokens
        self._last = None
        self._slots.release(sequence, keep=keep_cells)


def _share(prompts: dict[Sequence, int], allowance: Allowance) -> dict[Sequence, int]:
    """Divide what a step may spend: the oldest prompt first, but a part for the one with least left.

    `prompts` says how many tokens each can take; the result is without those that get none.
    """
    shares = dict.fromkeys(prompts, 0)

    def give(sequence: Sequence, n_tokens: int) -> None:
        nonlocal allowance
        shares[sequence] += n_tokens
        allowance = allowance.after(n_tokens, sequence.n_computed)

    if len(prompts) > 1:
        shortest = min(prompts, key=lambda s: s.n_pending)
        n_tokens = allowance.n_at(shortest.n_computed)
        if n_tokens > 1:
            give(shortest, min(prompts[shortest], max(1, n_tokens // _SHORTEST_SHARE)))
            # The oldest moves on, too, even if it is so deep that a token of it takes all the time left.
            allowance = allowance._replace(n_at_least=max(1, allowance.n_at_least))
    for sequence, n_ready in prompts.items():
        give(sequence, min(allowance.n_at(sequence.n_computed), n_ready - shares[sequence]))
    return {sequence: share for sequence, share in shares.items() if share}


def _joining(
    shares: dict[Sequence, int], ready: dict[Sequence, int], decoding: Iterable[Slice]
) -> set[Sequence]:
    """Prompts of which a token is computed in the call of those that decode.

    One that has a single token, and a neighbour there; and those that fill a hole between them, which would
    split the batch. A prompt whose last two tokens are its turn fills none: the second would be alone.
    """
    slots = sorted(part.sequence.slot for part in decoding)
    fit = {s.slot for s in shares if ready[s] != 2}
    holes = [range(left + 1, right) for left, right in pairwise(slots)]
    filled = {slot for hole in holes if fit.issuperset(hole) for slot in hole}
    beside = {slot + step for slot in slots for step in (-1, 1)}
    return {s for s, n in shares.items() if s.slot in filled or (n == 1 and s.slot in beside)}


def _in_company(
    shares: dict[Sequence, int], ready: dict[Sequence, int], joining: set[Sequence], n_spare: int
) -> dict[Sequence, int]:
    """These shares, changed where llama.cpp would compute a token of a long prompt by itself.

    It computes slots that follow each other together, as far as the shortest of their slices goes, and then
    what is left of the others. So of a slice one longer than both its neighbours a token is left alone, and
    so is the last token of a prompt; if possible not even two are left, of which one could go with a
    neighbour's last. A slice gets smaller for that; if no smaller one fits it gets a token more, of the
    `n_spare` that the batch has room for.
    """
    lengths: dict[int, int] = {}  # by slot
    is_long = {s: s.n_computed + ready[s] >= _ALIKE_UP_TO for s in shares}  # but for one that has joined
    for sequence in sorted(shares, key=lambda s: (is_long[s], s.slot)):
        share = shares[sequence]
        beside = [lengths.get(sequence.slot + step, 0) for step in (-1, 1)]
        longer = range(share + 1, min(ready[sequence], share + n_spare, max(share, 2) + 1) + 1)
        fit = [
            n
            for n in (*range(share, 1, -1), *longer)
            if n - max(beside) != 1 and n + 1 not in beside and ready[sequence] - n != 1
        ]
        fit.sort(key=lambda n: ready[sequence] - n == 2)
        if is_long[sequence]:
            # Of very few tokens none may fit: it moves on all the same, unless it has by its first one.
            share = next(iter(fit), 0 if share == 1 and sequence in joining else share)
        n_spare -= max(0, share - shares[sequence])
        lengths[sequence.slot] = share
    return {sequence: lengths[sequence.slot] for sequence in shares}
