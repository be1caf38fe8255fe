"""How much of the next step prompts may have, and how many sequences may run.

Owns: what steps have cost so far. Pure. Called by: `loop.py`, on the step thread.

A prompt token costs about as much as a decoded one, and the more the deeper it is, so each one put into a
step lengthens the gap every running stream sees. While others decode, a step may take `GAP_STEPS` times the
usual one, to which each prompt adds as much as a sequence that decodes has of it; or `CROWD_STEPS` times
that, if more wait for their first token than decode. While nobody decodes it may take `IDLE_STEP_S`: so long
a cancel waits at most.

With a target for the step, slices fill it up and no further, and a sequence more is admitted only where the
step it would take is still within the target.
"""

import math
from typing import NamedTuple

GAP_STEPS = 2.0
CROWD_STEPS = 3.0
IDLE_STEP_S = 0.5
# The part of a target that is left to prompts for as long as there are any: nobody is admitted into it, or
# the last prompt of a full house would move by a token a step.
PROMPT_SHARE = 0.25
_SMOOTHING = 0.2
_FIRST_GUESS_TOKENS = 32  # a slice before anything was measured
_SMALLEST_SLICE = 2  # prompts move on, however slow a step is
_CELLS_A_TOKEN = 1000  # a first guess: at this depth a token takes twice as long
_TOLD_DEPTH = 1000  # of the tokens whose speed is told: the middle of a long prompt
_CLOCK_S = 1e-6  # nothing takes less
# Steps after which a measured cost is not believed any more: sequences are deeper now, or somebody else has
# the machine. A count that was once too slow would otherwise never be tried again.
_FRESH_STEPS = 500
_SURPRISE = 3.0  # what took more than so many times what it should was somebody else's doing


class Load(NamedTuple):
    """What the next step has to do: sequences that decode, and those still in their prompts."""

    n_decoding: int
    n_prompts: int
    depth: int = 0  # tokens of the prompts that are computed, on average


class PromptCost(NamedTuple):
    """What prompts take: seconds for each token, and for each cell that a token attends to."""

    token_s: float
    cell_s: float

    def at(self, depth: int) -> float:
        """Seconds for a token that has `depth` others before it."""
        return self.token_s + depth * self.cell_s


class Allowance(NamedTuple):
    """What a step may spend on prompts: tokens at most, and seconds; some tokens whatever they take."""

    n_tokens: int
    n_at_least: int = 0
    seconds: float = math.inf
    cost: PromptCost = PromptCost(0.0, 0.0)

    def n_at(self, depth: int) -> int:
        """Tokens that a prompt of which so many are computed may have."""
        token_s = self.cost.at(depth)
        n_in_time = int(self.seconds / token_s) if self.seconds < math.inf else self.n_tokens
        return min(self.n_tokens, max(self.n_at_least, n_in_time))

    def after(self, n_tokens: int, depth: int) -> "Allowance":
        """What is left once so many have been given to a prompt."""
        left_s = max(0.0, self.seconds - n_tokens * self.cost.at(depth))
        return Allowance(self.n_tokens - n_tokens, max(0, self.n_at_least - n_tokens), left_s, self.cost)


class _Cost(NamedTuple):
    """The smoothed time of a call with so many sequences, and the number of the step that told it last."""

    seconds: float
    seen_at: int


class Budget:
    """Learns from step times. Without `target_s` every slot may be taken; `chunk` fixes the slices."""

    def __init__(
        self, batch_size: int, n_slots: int, *, target_s: float | None = None, chunk: int | None = None
    ) -> None:
        self._batch_size = batch_size
        self._n_slots = n_slots
        self._target_s = target_s
        self._chunk = chunk
        self._n_steps = 0
        self._decode_s: list[_Cost | None] = [None] * (n_slots + 1)  # by sequences
        self._fastest_s = math.inf  # the shortest call there ever was with one sequence
        self._prompts: PromptCost | None = None  # not measured yet

    def n_admissible(self, n_running: int, n_prompts: int) -> int:
        """Sequences that may run at once: one at least.

        Now `n_running` do, `n_prompts` of them still in their prompts.
        """
        if self._target_s is None:
            return self._n_slots
        if self._prompts is None:
            return max(1, n_running)  # nobody knows yet what one more would take
        limit_s = self._target_s * (1 - PROMPT_SHARE if n_prompts else 1.0)
        n = max(1, n_running)
        n_known = self._nearest_measured(n)
        while n < self._n_slots:
            n_known = n + 1 if self._is_measured(n + 1) else n_known
            if self._guessed_s(n + 1, n_known) > limit_s:
                break
            n += 1
        return n

    @property
    def prompt_tokens_per_second(self) -> float:
        """How fast a prompt of some 2,000 tokens is computed; 0 before anything was measured."""
        return 1 / self._prompts.at(_TOLD_DEPTH) if self._prompts else 0.0

    def allowance(self, load: Load) -> Allowance:
        """What prompts may have of the next step, beside the sequences that decode."""
        if self._chunk is not None:
            return Allowance(min(self._batch_size, self._chunk))
        if self._prompts is None:
            return Allowance(min(self._batch_size, _FIRST_GUESS_TOKENS))
        spare_s = self._allowed_s(load) - self._usual_s(load.n_decoding) - self._call_s
        if self._target_s is not None:
            # One for the oldest prompt, and one for the shortest.
            return Allowance(self._batch_size, min(2, load.n_prompts), max(0.0, spare_s), self._prompts)
        # Tokens that take less than their call would hold up everybody for next to nothing.
        return Allowance(self._batch_size, _SMALLEST_SLICE, max(self._call_s, spare_s), self._prompts)

    def observe_decoding(self, n_sequences: int, elapsed_s: float) -> None:
        """Learn from a call with one token of each of so many sequences."""
        elapsed_s = max(elapsed_s, _CLOCK_S)
        self._n_steps += 1
        if n_sequences == 1:
            self._fastest_s = min(self._fastest_s, elapsed_s)
        if self._is_measured(n_sequences):
            usual_s = self._usual_s(n_sequences)
            elapsed_s = usual_s * (1 + _SMOOTHING * _surprise(elapsed_s, usual_s))
        self._decode_s[n_sequences] = _Cost(elapsed_s, self._n_steps)

    def observe_joined(self, n_decoding: int, n_tokens: int, n_cells: int, elapsed_s: float) -> None:
        """Learn from single tokens of prompts in the call of so many that decode.

        Where a target leaves no more to them, nothing else tells what prompts take.
        """
        self._learn_prompts(n_tokens, n_cells, elapsed_s - self._usual_s(n_decoding))

    def observe_prompts(self, n_tokens: int, n_cells: int, elapsed_s: float) -> None:
        """Learn from a call with tokens of prompts, which attended to `n_cells` together."""
        self._learn_prompts(n_tokens, n_cells, elapsed_s - self._call_s)

    def _learn_prompts(self, n_tokens: int, n_cells: int, elapsed_s: float) -> None:
        """From what the tokens took themselves.

        A few say less of what one takes: most of their time is their call's.
        """
        elapsed_s = max(elapsed_s, _CLOCK_S)
        if self._prompts is None:
            token_s = elapsed_s / (n_tokens + n_cells / _CELLS_A_TOKEN)
            self._prompts = PromptCost(token_s, token_s / _CELLS_A_TOKEN)
            return
        # Tokens and cells each answer for the part of a surprise that they were expected to take.
        token_s, cell_s = self._prompts
        tokens_s, cells_s = n_tokens * token_s, n_cells * cell_s
        expected_s = tokens_s + cells_s
        weight = _SMOOTHING * expected_s / (expected_s + self._call_s)
        learned = weight * _surprise(elapsed_s, expected_s) / expected_s
        self._prompts = PromptCost(token_s * (1 + learned * tokens_s), cell_s * (1 + learned * cells_s))

    def _allowed_s(self, load: Load) -> float:
        """How long a step with prompts in it may take."""
        if self._target_s is not None:
            return self._target_s
        if not load.n_decoding:
            return IDLE_STEP_S
        n_steps = CROWD_STEPS if load.n_prompts > load.n_decoding else GAP_STEPS
        # Not what the batch took when they had joined: by then a deep prompt is a deep sequence.
        usual_s = self._usual_s(load.n_decoding)
        joined_s = self._joined_s(usual_s, load.n_decoding, load.n_prompts, load.depth)
        return min(n_steps * joined_s, IDLE_STEP_S)

    def _usual_s(self, n_decoding: int) -> float:
        """The usual step of so many sequences.

        One not yet measured is guessed from the nearest smaller.
        """
        return self._guessed_s(n_decoding, self._nearest_measured(n_decoding))

    def _nearest_measured(self, n_decoding: int) -> int:
        """So many sequences or fewer; 0 if none is."""
        return next((n for n in range(n_decoding, 0, -1) if self._is_measured(n)), 0)

    def _guessed_s(self, n_decoding: int, n_known: int) -> float:
        """The usual step of so many, from what is known of `n_known`; of 0 nothing is."""
        cost = self._decode_s[n_known]
        if cost is None:
            return n_decoding * self._token_s()
        return self._joined_s(cost.seconds, n_known, n_decoding - n_known)

    def _joined_s(self, usual_s: float, n: int, n_more: int, depth: int = 0) -> float:
        """The step of `n` sequences with `n_more` in it.

        Each of those costs about what a token of a prompt of that depth does, and no more than each of the
        others.
        """
        return usual_s + n_more * min(self._token_s(depth), usual_s / n)

    def _token_s(self, depth: int = 0) -> float:
        return self._prompts.at(depth) if self._prompts else 0.0

    @property
    def _call_s(self) -> float:
        """What `llama_decode` takes whatever is in it: a step of one sequence without its token."""
        return max(0.0, self._fastest_s - self._token_s()) if self._fastest_s < math.inf else 0.0

    def _is_measured(self, n_decoding: int) -> bool:
        cost = self._decode_s[n_decoding]
        return cost is not None and self._n_steps - cost.seen_at <= _FRESH_STEPS


def _surprise(elapsed_s: float, expected_s: float) -> float:
    """How much longer than expected something took, as a part of that, within reason."""
    return min(elapsed_s / expected_s, _SURPRISE) - 1
