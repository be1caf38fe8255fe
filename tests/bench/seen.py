"""Answers as a client might have seen them."""

from collections.abc import Sequence

from bench.answers import Answer


def answer(
    *,
    status: int = 200,
    asked_at: float = 0.0,
    text_at: Sequence[float] = (),
    ended_at: float | None = None,
    n_prompt: int = 10,
    n_cached: int = 0,
    n_tokens: int | None = None,
) -> Answer:
    """One that ends with its last text and has a token for each, unless told otherwise."""
    return Answer(
        status=status,
        asked_at=asked_at,
        text_at=tuple(text_at),
        ended_at=ended_at if ended_at is not None else text_at[-1],
        text="x" * len(text_at),
        n_prompt=n_prompt,
        n_cached=n_cached,
        n_tokens=len(text_at) if n_tokens is None else n_tokens,
    )
