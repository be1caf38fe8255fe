"""What one step computes, cut into the calls of `llama_decode` that compute it.

Pure. Called by: `scheduler.py`, which says who runs; `budget.py` has said what prompts may have.

A step is every running sequence's next token, and then a part of the prompts: in two calls, so that the
tokens of the first leave before the second begins. A part of a prompt is chosen so that llama.cpp computes
it as it would if nobody else were there.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from llm_engine.budget import Allowance
from llm_engine.sequence import Sequence

# The part of a step's prompt tokens kept for the prompt with the least left, so that a short question
# behind a long document does not wait for all of it.
_SHORTEST_SHARE = 4

# Up to so many cells llama.cpp's CPU backend computes a token that is alone in its call as it does beside
# others; from there on it takes another path through attention, and rounds differently.
# Source: ggml_compute_forward_flash_attn_ext_f16, `use_split_kv_path`; caches are padded to 256 cells.
_ALIKE_UP_TO = 256


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


def step_plans(
    decoding: Iterable[Sequence], ready: dict[Sequence, int], allowance: Allowance, prompt_slice: int | None
) -> list[Plan]:
    """The calls of the next step: one or two, or none where there is nothing to compute.

    `ready` says how many tokens each prompt could have; `prompt_slice` how many it may have at most, where
    its answer must not depend on who else is there.
    """
    next_tokens = [Slice.of(s, 1) for s in decoding]
    n_most = prompt_slice or allowance.n_tokens
    shares = _share({s: min(n, n_most) for s, n in ready.items()}, allowance)
    joining = _joining(shares, ready, next_tokens)
    rest = {s: n for s, share in shares.items() if (n := share - (s in joining))}
    if prompt_slice is not None:
        left = {s: ready[s] - (s in joining) for s in rest}
        rest = _in_company(rest, left, joining, allowance.n_tokens - sum(rest.values()))
    first = Plan.of(next_tokens, [Slice.of(s, 1) for s in joining])
    second = Plan.of([], [Slice.of(s, n, n_before=int(s in joining)) for s, n in rest.items() if n])
    return [plan for plan in (first, second) if plan.slices]


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
