"""How many prompt tokens the next step may compute, and how many sequences may run.

Owns: what steps have cost so far. Pure. Called by: `loop.py`, on the step thread.

A prompt token costs about as much as a decoded one, so each one put into a step lengthens the gap every
running stream sees. While others decode, a step may take `GAP_STEPS` times the usual step of the batch as it
will be once the prompts have joined; while nobody does, `IDLE_STEP_S`, which is how long a cancel waits at
most.

With a target for the step, slices fill it up and no further, and a sequence more is admitted only where the
step it would take is still within the target.
"""

from dataclasses import dataclass

GAP_STEPS = 2.5
IDLE_STEP_S = 0.25
_SMOOTHING = 0.2
_FIRST_GUESS_TOKENS = 32  # a slice before anything was measured
_SMALLEST_SLICE = 4  # prompts move on, however slow a step is
# A slice of fewer tokens says less of what one costs: what the step spends on being mixed is spread over
# few, and believing it would make the next slice smaller still.
_TELLING_SLICE = 32
# Steps after which a measured cost is not believed any more: sequences are deeper now, or somebody else has
# the machine. A count that was once too slow would otherwise never be tried again.
_FRESH_STEPS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the next step has to do: sequences that decode, and those still in their prompts."""

    n_decoding: int
    n_prompts: int


@dataclass(frozen=True, slots=True)
class _Cost:
    """The smoothed time of a step, and the number of the step that told it last."""

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
        self._decode_s: list[_Cost | None] = [None] * (n_slots + 1)  # usual step by sequences decoding
        self._prompt_token_s: float | None = None

    def n_admissible(self, n_running: int) -> int:
        """Sequences that may run at once, now that `n_running` do: one at least."""
        if self._target_s is None:
            return self._n_slots
        n = max(1, n_running)
        while n < self._n_slots and self._usual_s(n + 1) <= self._target_s:
            n += 1
        return n

    def prompt_tokens(self, load: Load) -> int:
        """Tokens of prompts that the next step may hold beside the sequences that decode."""
        room = self._batch_size - load.n_decoding
        if self._chunk is not None:
            return min(room, self._chunk)
        if self._prompt_token_s is None:
            return min(room, _FIRST_GUESS_TOKENS)
        spare_s = self._allowed_s(load) - self._usual_s(load.n_decoding)
        return min(room, max(_SMALLEST_SLICE, int(spare_s / self._prompt_token_s)))

    def observe(self, n_decoding: int, n_prompt_tokens: int, elapsed_s: float) -> None:
        """Learn from a step that took `elapsed_s`."""
        self._n_steps += 1
        if n_prompt_tokens == 0:
            usual_s = _smooth(self._measured_s(n_decoding), elapsed_s, 1.0)
            self._decode_s[n_decoding] = _Cost(usual_s, self._n_steps)
        elif n_decoding == 0 or self._measured_s(n_decoding) is not None:
            prompt_s = elapsed_s - self._usual_s(n_decoding)
            token_s = max(prompt_s / n_prompt_tokens, 1e-7)
            weight = min(1.0, n_prompt_tokens / _TELLING_SLICE)
            self._prompt_token_s = _smooth(self._prompt_token_s, token_s, weight)

    def _allowed_s(self, load: Load) -> float:
        """How long a step with prompts in it may take."""
        if self._target_s is not None:
            return self._target_s
        if not load.n_decoding:
            return IDLE_STEP_S
        return min(GAP_STEPS * self._usual_s(load.n_decoding + load.n_prompts), IDLE_STEP_S)

    def _usual_s(self, n_decoding: int) -> float:
        """The usual step of so many sequences.

        One not yet measured is guessed from the nearest smaller: each sequence more costs about what a
        prompt token does.
        """
        for n in range(n_decoding, 0, -1):
            measured_s = self._measured_s(n)
            if measured_s is not None:
                return measured_s + (n_decoding - n) * (self._prompt_token_s or 0.0)
        return n_decoding * (self._prompt_token_s or 0.0)

    def _measured_s(self, n_decoding: int) -> float | None:
        cost = self._decode_s[n_decoding]
        fresh = cost is not None and self._n_steps - cost.seen_at <= _FRESH_STEPS
        return cost.seconds if cost is not None and fresh else None


def _smooth(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + _SMOOTHING * weight * (new - old)
