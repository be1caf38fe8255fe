"""How many prompt tokens the next step may compute.

Owns: what steps have cost so far. Pure. Called by: `loop.py`, on the step thread.

A prompt token costs about as much as a decoded one, so each one put into a step lengthens the gap every
running stream sees. While others decode, a step may take `GAP_STEPS` times the usual step of the batch as it
will be once the prompts have joined; while nobody does, `IDLE_STEP_S`, which is how long a cancel waits at
most.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the next step has to do: sequences that decode, and those still in their prompts."""

    n_decoding: int
    n_prompts: int


class Budget:
    """Learns from step times."""

    def __init__(self, batch_size: int, n_slots: int) -> None:
        self._batch_size = batch_size
        self._decode_s: list[float | None] = [None] * (n_slots + 1)  # usual step by sequences decoding
        self._prompt_token_s: float | None = None

    def prompt_tokens(self, load: Load) -> int:
        """Tokens of prompts that the next step may hold beside the sequences that decode."""
        room = self._batch_size - load.n_decoding
        if self._prompt_token_s is None:
            return min(room, _FIRST_GUESS_TOKENS)
        allowed_s = IDLE_STEP_S
        if load.n_decoding:
            usual_s = self._usual_s(load.n_decoding + load.n_prompts)
            allowed_s = min(GAP_STEPS * usual_s, IDLE_STEP_S)
        spare_s = allowed_s - self._usual_s(load.n_decoding)
        return min(room, max(_SMALLEST_SLICE, int(spare_s / self._prompt_token_s)))

    def observe(self, n_decoding: int, n_prompt_tokens: int, elapsed_s: float) -> None:
        """Learn from a step that took `elapsed_s`."""
        if n_prompt_tokens == 0:
            self._decode_s[n_decoding] = _smooth(self._decode_s[n_decoding], elapsed_s, 1.0)
        elif n_decoding == 0 or self._decode_s[n_decoding] is not None:
            prompt_s = elapsed_s - self._usual_s(n_decoding)
            token_s = max(prompt_s / n_prompt_tokens, 1e-7)
            weight = min(1.0, n_prompt_tokens / _TELLING_SLICE)
            self._prompt_token_s = _smooth(self._prompt_token_s, token_s, weight)

    def _usual_s(self, n_decoding: int) -> float:
        """The usual step of so many sequences.

        One not yet measured is guessed from the nearest smaller: each sequence more costs about what a
        prompt token does.
        """
        for n in range(n_decoding, 0, -1):
            measured = self._decode_s[n]
            if measured is not None:
                return measured + (n_decoding - n) * (self._prompt_token_s or 0.0)
        return n_decoding * (self._prompt_token_s or 0.0)


def _smooth(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + _SMOOTHING * weight * (new - old)
