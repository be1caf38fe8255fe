"""How many prompt tokens the next step may compute, and how many sequences may run.

Owns: what steps have cost so far. Pure. Called by: `loop.py`, on the step thread.

A prompt token costs about as much as a decoded one, so each one put into a step lengthens the gap every
running stream sees. While others decode, a step may take `GAP_STEPS` times the usual one, to which each
prompt adds as much as a sequence that decodes has of it; or `CROWD_STEPS` times that, if more wait for their
first token than decode. While nobody decodes it may take `IDLE_STEP_S`: so long a cancel waits at most.

With a target for the step, slices fill it up and no further, and a sequence more is admitted only where the
step it would take is still within the target.
"""

from typing import NamedTuple

GAP_STEPS = 2.0
CROWD_STEPS = 3.0
IDLE_STEP_S = 0.5
# The part of a target that is left to prompts for as long as there are any: nobody is admitted into it, or
# the last prompt of a full house would move by a token a step.
PROMPT_SHARE = 0.25
_SMOOTHING = 0.2
_FIRST_GUESS_TOKENS = 32  # a slice before anything was measured
_SMALLEST_SLICE = 3  # prompts move on, however slow a step is
# A slice of fewer tokens says less of what one costs: what the step spends on being mixed is spread over
# few, and believing it would make the next slice smaller still.
_TELLING_SLICE = 32
# Steps after which a measured cost is not believed any more: sequences are deeper now, or somebody else has
# the machine. A count that was once too slow would otherwise never be tried again.
_FRESH_STEPS = 500
_SURPRISE = 3.0  # a step that took more than so many times what it should was somebody else's doing


class Load(NamedTuple):
    """What the next step has to do: sequences that decode, and those still in their prompts."""

    n_decoding: int
    n_prompts: int


class _Cost(NamedTuple):
    """The smoothed time of a step's decoding part, and the number of the step that told it last."""

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
        self._decode_s: list[_Cost | None] = [None] * (n_slots + 1)  # by sequences decoding
        self._prompt_token_s = 0.0  # 0: not measured yet

    def n_admissible(self, n_running: int, n_prompts: int) -> int:
        """Sequences that may run at once: one at least.

        Now `n_running` do, `n_prompts` of them still in their prompts.
        """
        if self._target_s is None:
            return self._n_slots
        if not self._prompt_token_s:
            return max(1, n_running)  # nobody knows yet what one more would take
        limit_s = self._target_s * (1 - PROMPT_SHARE if n_prompts else 1.0)
        n = max(1, n_running)
        while n < self._n_slots and self._usual_s(n + 1) <= limit_s:
            n += 1
        return n

    @property
    def prompt_tokens_per_second(self) -> float:
        """How fast prompts are computed; 0 before anything was measured."""
        return 1 / self._prompt_token_s if self._prompt_token_s else 0.0

    def prompt_tokens(self, load: Load) -> int:
        """Tokens of prompts that the next step may hold beside the sequences that decode."""
        room = self._batch_size - load.n_decoding
        if self._chunk is not None:
            return min(room, self._chunk)
        if not self._prompt_token_s:
            return min(room, _FIRST_GUESS_TOKENS)
        spare_s = self._allowed_s(load) - self._usual_s(load.n_decoding)
        # Within a target one for the oldest prompt, and one for the shortest.
        smallest = _SMALLEST_SLICE if self._target_s is None else min(2, load.n_prompts)
        return min(room, max(smallest, int(spare_s / self._prompt_token_s)))

    def observe(self, n_decoding: int, n_prompt_tokens: int, elapsed_s: float) -> None:
        """Learn from a step that took `elapsed_s`.

        What a step with prompts in it took beyond its decoding part is theirs: a prompt's tokens take longer
        the deeper it is, and a decoding part that was blamed for that would allow longer steps still.
        """
        self._n_steps += 1
        if not n_prompt_tokens:
            self._observe_decoding(n_decoding, elapsed_s)
            return
        usual_s, prompts_s = self._usual_s(n_decoding), n_prompt_tokens * self._prompt_token_s
        if n_decoding and prompts_s and not self._is_measured(n_decoding):
            # A count that never decodes alone: the step is shared out as was expected.
            usual_s *= min(elapsed_s / (usual_s + prompts_s), _SURPRISE)
            self._decode_s[n_decoding] = _Cost(usual_s, self._n_steps)
        self._observe_prompts(n_prompt_tokens, max(elapsed_s - usual_s, 1e-6))

    def _observe_decoding(self, n_decoding: int, elapsed_s: float) -> None:
        if self._is_measured(n_decoding):
            usual_s = self._usual_s(n_decoding)
            surprise = min(elapsed_s / usual_s, _SURPRISE) - 1
            elapsed_s = usual_s * (1 + _SMOOTHING * surprise)
        self._decode_s[n_decoding] = _Cost(elapsed_s, self._n_steps)

    def _observe_prompts(self, n_tokens: int, elapsed_s: float) -> None:
        token_s = elapsed_s / n_tokens
        if not self._prompt_token_s:
            self._prompt_token_s = token_s
            return
        surprise = min(token_s / self._prompt_token_s, _SURPRISE) - 1
        self._prompt_token_s *= 1 + _SMOOTHING * min(1.0, n_tokens / _TELLING_SLICE) * surprise

    def _allowed_s(self, load: Load) -> float:
        """How long a step with prompts in it may take."""
        if self._target_s is not None:
            return self._target_s
        if not load.n_decoding:
            return IDLE_STEP_S
        n_steps = CROWD_STEPS if load.n_prompts > load.n_decoding else GAP_STEPS
        # Not what the batch took when they had joined: by then a deep prompt is a deep sequence.
        usual_s = self._usual_s(load.n_decoding)
        joined_s = self._joined_s(usual_s, load.n_decoding, load.n_prompts)
        return min(n_steps * joined_s, IDLE_STEP_S)

    def _usual_s(self, n_decoding: int) -> float:
        """The usual step of so many sequences.

        One not yet measured is guessed from the nearest smaller.
        """
        for n in range(n_decoding, 0, -1):
            cost = self._decode_s[n]
            if cost is not None and self._is_measured(n):
                return self._joined_s(cost.seconds, n, n_decoding - n)
        return n_decoding * self._prompt_token_s

    def _joined_s(self, usual_s: float, n: int, n_more: int) -> float:
        """The step of `n` sequences with `n_more` in it.

        Each of those costs about what a prompt token does, and no more than each of the others, if a prompt
        is so deep that its tokens do.
        """
        return usual_s + n_more * min(self._prompt_token_s, usual_s / n)

    def _is_measured(self, n_decoding: int) -> bool:
        cost = self._decode_s[n_decoding]
        return cost is not None and self._n_steps - cost.seen_at <= _FRESH_STEPS
