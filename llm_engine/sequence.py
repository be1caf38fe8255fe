"""The state of one sequence: what it has been told, what of that is computed, what it may still say.

Owns: tokens and counts of one generation on the step thread. Touched by: `scheduler.py`, and its place in the
context by `slots.py`.

    tokens    [ prompt ............ | resumed ... | generated ...... ]
               0                     n_prompt
    computed  [ cells in the context ........ | pending ]
               0                               n_computed
"""

from collections.abc import Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from llm_engine.generation import Finished, StopReason
from llm_engine.sampling import Sampler
from llm_engine.text import TextAssembler


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One generation. `key` names it to its caller; `seq_id` is its slot while it runs."""

    key: Hashable
    tokens: list[int]
    n_prompt: int
    max_tokens: int
    sampler: Sampler
    text: TextAssembler
    seq_id: int | None = None
    n_computed: int = 0
    n_cached: int = 0  # of `tokens`, taken over from an earlier sequence
    paused: bool = False
    stop_reason: StopReason | None = None
    admitted_at: float = 0.0
    first_token_at: float = field(default=0.0)

    @property
    def slot(self) -> int:
        """Its `seq_id`, once it runs."""
        assert self.seq_id is not None, f"sequence {self.key} has no slot"
        return self.seq_id

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def kv_promised_tokens(self) -> int:
        """Cells that it holds or may still fill."""
        return self.n_prompt + self.max_tokens

    @property
    def n_pending(self) -> int:
        """Tokens not yet computed: the rest of the prompt, or the one just sampled."""
        return len(self.tokens) - self.n_computed

    @property
    def is_decoding(self) -> bool:
        return self.first_token_at > 0

    def pending(self, n_tokens: int) -> Items[int]:
        return self.tokens[self.n_computed : self.n_computed + n_tokens]

    def accept(self, token: int, piece: bytes | None) -> str:
        """Take the next generated token; `piece` is None for an end-of-generation token.

        Returns the text that may leave now, and sets `stop_reason` when this was the last token.
        """
        self.tokens.append(token)
        self.sampler.accept(token)
        if piece is None:
            self.stop_reason = StopReason.STOP
            return self.text.flush()
        text = self.text.feed(piece)
        if self.text.stopped:
            self.stop_reason = StopReason.STOP
        elif self.n_generated >= self.max_tokens:
            self.stop_reason = StopReason.LENGTH
            text += self.text.flush()
        return text

    def finished(self, reason: StopReason, now: float) -> Finished:
        """The facts of its end. `now` is monotonic seconds."""
        first = self.first_token_at or now
        return Finished(
            reason=reason,
            n_prompt=self.n_prompt,
            n_cached=self.n_cached,
            n_completion=self.n_generated,
            prefill_ms=1000 * (first - self.admitted_at) if self.seq_id is not None else 0.0,
            decode_ms=1000 * (now - first),
        )
