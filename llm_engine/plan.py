"""What one step computes, cut into the calls of `llama_decode` that compute it.

Pure. Called by: `scheduler.py`, which says who runs; `budget.py` has said what prompts may have.

A step is every running sequence's next token, and then a part of the prompts: in two calls, so that the
tokens of the first leave before the second begins.
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
    joining = _joining(shares, next_tokens)
    rest = {s: n for s, share in shares.items() if (n := share - (s in joining))}
    first = Plan.of(next_tokens, [Slice.of(s, 1) for s in joining])
    second = Plan.of([], [Slice.of(s, n, n_before=int(s in joining)) for s, n in rest.items()])
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


def _joining(shares: dict[Sequence, int], decoding: Iterable[Slice]) -> set[Sequence]:
    """Prompts of which a token is computed in the call of those that decode.

    One that has a single token, and a neighbour there; and those that fill a hole between them, which would
    split the batch.
    """
    slots = sorted(part.sequence.slot for part in decoding)
    holes = [range(left + 1, right) for left, right in pairwise(slots)]
    joinable = {s.slot for s in shares}
    filled = {slot for hole in holes if joinable.issuperset(hole) for slot in hole}
    beside = {slot + step for slot in slots for step in (-1, 1)}
    return {s for s, n in shares.items() if s.slot in filled or (n == 1 and s.slot in beside)}
