"""A backend and a vocabulary with behaviour: bytes are tokens, and a prompt decides its answer.

The backend keeps its own record of every slot's cells and refuses what llama.cpp would refuse or abort on,
so a scheduler that plans a gap, a reuse of a dirty slot or too large a batch fails here too.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from llm_engine.errors import BackendError
from llm_engine.llama import Logits
from llm_engine.scheduler import Plan, Slice

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


class FakeBackend:
    """Computes plans over bytes."""

    def __init__(self, reply: Reply = echo, *, n_batch: int = 512, n_slots: int = 8) -> None:
        self.reply = reply
        self.n_batch = n_batch
        self.n_slots = n_slots
        self.cells: dict[int, list[int]] = {}
        self.plans: list[list[tuple[int, int]]] = []  # (seq_id, tokens) of each slice of each step
        self.fail_next = False
        self.token_s = 0.0  # how long a token takes to compute
        self.closed = False

    def run(self, plan: Plan) -> Logits:
        if self.fail_next:
            self.fail_next = False
            raise BackendError("made to fail")
        n_tokens = sum(part.n_tokens for part in plan.slices)
        assert 0 < n_tokens <= self.n_batch, f"{n_tokens} tokens in a batch of {self.n_batch}"
        time.sleep(self.token_s * n_tokens)
        rows = [self._compute(part.sequence.slot, part) for part in plan.slices]
        self.plans.append([(part.sequence.slot, part.n_tokens) for part in plan.slices])
        wanted = [row for row in rows if row is not None]
        return np.stack(wanted) if wanted else np.empty((0, N_VOCAB), np.float32)

    def _compute(self, seq_id: int, part: Slice) -> Logits | None:
        assert 0 <= seq_id < self.n_slots, f"slot {seq_id} of {self.n_slots}"
        cells = self.cells.setdefault(seq_id, [])
        assert len(cells) == part.sequence.n_computed, "positions must continue"
        cells.extend(part.sequence.pending(part.n_tokens))
        if not part.samples:
            return None
        row = np.zeros(N_VOCAB, np.float32)
        row[self.reply(cells)] = 20.0
        return row

    def drop(self, seq_id: int) -> None:
        self.cells.pop(seq_id, None)

    def close(self) -> None:
        self.closed = True


class ByteVocabulary:
    """Bytes are tokens."""

    path = Path("fake.gguf")
    n_params = 1
    n_ctx_train = 4096

    def piece(self, token: int) -> bytes:
        return bytes([token])

    def is_end_of_generation(self, token: int) -> bool:
        return token == END
