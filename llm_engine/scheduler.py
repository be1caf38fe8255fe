"""Who waits, who runs, and what the results of a step mean.

Owns: the waiting and the running sequences. Pure: no clock, no library, no logging.
Called by: `loop.py`, on the step thread. `plan` decides, `commit` takes the sampled tokens; the events of
both are (key, event) pairs for the callers. Which slot a sequence gets, and what of its prompt is computed
already, is the business of `slots.py`; how a step is cut that of `plan.py`.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Protocol, TypeAlias

from llm_engine.budget import Allowance, Load
from llm_engine.errors import BackendError, EngineError
from llm_engine.generation import Delta, Event, Failed, StopReason
from llm_engine.plan import Plan, step_plans
from llm_engine.sequence import Sequence
from llm_engine.slots import Slots

Addressed: TypeAlias = tuple[Hashable, Event]


class Vocabulary(Protocol):
    """What the scheduler must know of tokens."""

    def piece(self, token: int) -> bytes: ...
    def is_end_of_generation(self, token: int) -> bool: ...


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
        """What the next step computes, call by call."""
        active = [s for s in self._running.values() if not s.paused]
        decoding = [s for s in active if s.is_decoding]
        ready = {s: n for s in active if not s.is_decoding and (n := self._slots.n_ready(s))}
        plans = step_plans(decoding, ready, allowance, self._prompt_slice)
        self._last = plans[0] if decoding and len(decoding) == len(active) else None
        return plans

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
        try:
            text = self._text_of(sequence, token)
        except EngineError as error:
            return self.fail([sequence], error)
        delta: Addressed = (sequence.key, Delta(text, (token,)))
        return [delta, *self._end_if_over(sequence, now)]

    def _resume(self, sequence: Sequence, now: float) -> list[Addressed]:
        """Replay tokens delivered by an earlier attempt: state is rebuilt, nothing is sent again."""
        replayed = sequence.tokens[sequence.n_prompt :]
        del sequence.tokens[sequence.n_prompt :]
        try:
            for token in replayed:
                self._text_of(sequence, token)
        except EngineError as error:
            return self.fail([sequence], error)
        return self._end_if_over(sequence, now)

    def _text_of(self, sequence: Sequence, token: int) -> str:
        """The text that may leave with its next token. Raises: BackendError, by which it fails alone."""
        try:
            return sequence.accept(token, self._piece(token))
        except Exception as error:
            raise BackendError(f"token {token} could not be taken") from error

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
