"""A backend and a vocabulary with behaviour: bytes are tokens, and a prompt decides its answer.

The backend keeps its own record of every slot's cells and refuses what llama.cpp would refuse or abort on,
so a scheduler that plans a gap, a reuse of a dirty slot or too large a batch fails here too. What llama.cpp
would compute wrongly without a word fails here as well: cells that hold other tokens than the sequence says,
a recurrent state that has seen more, a window with a gap.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llm_engine.errors import BackendError
from llm_engine.hostcache import KvState
from llm_engine.llama import Logits
from llm_engine.plan import Plan, Slice
from llm_engine.prefix import Trim
from llm_engine.slots import KvCost

WINDOW = 16  # tokens of the fake's sliding window
END = 256
N_VOCAB = 257

Reply = Callable[[Sequence[int]], int]  # every token so far -> the next one


def answer(text: str) -> Reply:
    """Reply with `text` after the prompt's final newline, then end."""
    data = text.encode()

    def reply(tokens: Sequence[int]) -> int:
        position = len(tokens) - 1 - _last_newline(tokens)
        return data[position] if position < len(data) else END

    return reply


def _last_newline(tokens: Sequence[int]) -> int:
    return max(i for i, token in enumerate(tokens) if token == ord("\n"))


def echo(tokens: Sequence[int]) -> int:
    """Repeat the prompt's line before its newline, then end."""
    newline = _last_newline(tokens)
    position = len(tokens) - 1 - newline
    return tokens[position] if position < newline else END


def forever(_tokens: Sequence[int]) -> int:
    """Never end."""
    return ord("x")


@dataclass(slots=True)
class SlotCells:
    """What one slot holds: full attention's cells, a recurrent state, a sliding window by position."""

    tokens: list[int] = field(default_factory=list)
    state: list[int] = field(default_factory=list)  # all that the recurrent state has seen
    window: dict[int, int] = field(default_factory=dict)

    def compute(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.window[len(self.tokens)] = token
            self.tokens.append(token)
            self.state.append(token)


class FakeBackend:
    """Computes plans over bytes."""

    def __init__(
        self,
        reply: Reply = echo,
        *,
        n_batch: int = 512,
        n_slots: int = 8,
        n_ctx: int = 4096,
        trim: Trim = Trim.ANYWHERE,
    ) -> None:
        self.reply = reply
        self.n_batch = n_batch
        self.n_ctx = n_ctx
        self.trim = trim
        self.cost = KvCost(sequence_bytes=0, token_bytes=1)
        self.slots = [SlotCells() for _ in range(n_slots)]
        self.plans: list[list[tuple[int, int]]] = []  # (seq_id, tokens) of each slice of each step
        self.moves: list[str] = []  # what was done with cells
        self.fail_next = False
        self.token_s = 0.0  # how long a token takes to compute
        self.takes_no_state = False
        self.closed = False

    @property
    def n_computed(self) -> int:
        """Tokens computed in all plans."""
        return sum(n_tokens for plan in self.plans for _, n_tokens in plan)

    def run(self, plan: Plan) -> Logits:
        if self.fail_next:
            self.fail_next = False
            raise BackendError("made to fail")
        n_tokens = sum(part.n_tokens for part in plan.slices)
        assert 0 < n_tokens <= self.n_batch, f"{n_tokens} tokens in a batch of {self.n_batch}"
        if any(part.sequence.n_computed + part.n_tokens > self.n_ctx for part in plan.slices):
            raise BackendError("a slot is full: nothing of the batch is computed")
        time.sleep(self.token_s * n_tokens)
        rows = [self._compute(self.slots[part.sequence.slot], part) for part in plan.slices]
        self.plans.append([(part.sequence.slot, part.n_tokens) for part in plan.slices])
        wanted = [row for row in rows if row is not None]
        return np.stack(wanted) if wanted else np.empty((0, N_VOCAB), np.float32)

    def _compute(self, cells: SlotCells, part: Slice) -> Logits | None:
        n_computed = part.sequence.n_computed
        assert len(cells.tokens) == n_computed, "positions must continue"
        assert cells.tokens == part.sequence.tokens[:n_computed], "cells of other tokens"
        if self.trim is Trim.NOWHERE:
            assert cells.state == cells.tokens, "a state that has seen other tokens"
        if self.trim is Trim.IN_PLACE:
            seen = range(max(0, n_computed - WINDOW), n_computed)
            assert [cells.window[i] for i in seen] == [cells.tokens[i] for i in seen], "a hole in the window"
        cells.compute(part.sequence.pending(part.n_tokens))
        if not part.samples:
            return None
        row = np.zeros(N_VOCAB, np.float32)
        row[self.reply(cells.tokens)] = 20.0
        return row

    def n_state_bytes(self, slot: int, *, checkpoint: bool) -> int:
        return self._state(slot, checkpoint).nbytes

    def fetch(self, slot: int, *, checkpoint: bool) -> KvState:
        self.moves.append("checkpoint" if checkpoint else "save")
        return KvState(self._state(slot, checkpoint), checkpoint, "f")

    def _state(self, slot: int, checkpoint: bool) -> "np.typing.NDArray[np.uint8]":
        cells = self.slots[slot]
        window = {i: token for i, token in cells.window.items() if i >= len(cells.tokens) - WINDOW}
        parts = {"state": cells.state, "window": list(window.items())}
        if not checkpoint:
            parts["tokens"] = cells.tokens
        return np.frombuffer(json.dumps(parts).encode(), np.uint8)

    def restore(self, slot: int, state: KvState) -> None:
        self.moves.append("wind back" if state.is_checkpoint else "restore")
        if self.takes_no_state:
            self.slots[slot] = SlotCells()
            raise BackendError("made to take no state")
        parts = json.loads(state.data.tobytes())
        cells = self.slots[slot]
        cells.tokens = parts.get("tokens", cells.tokens)
        cells.state, cells.window = parts["state"], dict(parts["window"])

    def copy(self, source: int, target: int) -> None:
        assert source != target, f"slot {source} onto itself"
        self.restore(target, KvState(self._state(source, False), False, "f"))
        self.moves[-1] = "copy"

    def cut(self, slot: int, n_tokens: int) -> None:
        cells = self.slots[slot]
        if n_tokens == 0:
            self.slots[slot] = SlotCells()
            return
        if self.trim is Trim.NOWHERE and len(cells.state) > n_tokens:
            raise BackendError("a recurrent state cannot be cut")
        cells.tokens, cells.state = cells.tokens[:n_tokens], cells.state[:n_tokens]
        cells.window = {i: token for i, token in cells.window.items() if i < n_tokens}

    def close(self) -> None:
        self.closed = True


class ByteVocabulary:
    """Bytes are tokens."""

    path = Path("fake.gguf")
    n_params = 1
    n_vocab = N_VOCAB
    n_ctx_train = 4096

    def piece(self, token: int) -> bytes:
        return bytes([token])

    def is_end_of_generation(self, token: int) -> bool:
        return token == END
