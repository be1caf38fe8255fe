"""A request made ready for the engine, with its older turns replaced where it would not fit.

What a summary needs is another generation, so this is a generator: it yields each generation that writes a
summary, and takes what that wrote. Whoever drives it has the engine run them, one after another.

Called by: `preparation.py`, on the preparation thread. What is decided, and within which bounds, is in
`compaction.py`.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from llm_engine.errors import PromptTooLong
from llm_engine.generation import GenerateRequest, Prepared
from llm_engine.sampling import SamplingParams
from llm_worker.compaction import (
    Bounds,
    Compaction,
    Measure,
    Outline,
    Recall,
    Turns,
    digests_of,
    find_known,
    n_replaced,
    outline,
    shortened,
    summarising,
)
from llm_worker.engine import TextEngine

_GREEDY = SamplingParams(temperature=0, seed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A request that fits. `digest` is that of the turns its summary stands for, None without one."""

    prepared: Prepared
    compaction: Compaction | None = None
    digest: bytes | None = None


Fitting: TypeAlias = Generator[Prepared, str, Fitted]


def fit(request: GenerateRequest, engine: TextEngine, recall: Recall, *, share: float = 1.0) -> Fitting:
    """Prepare a request, shortened if its prompt leaves the answer no room or too little.

    With a `share` below 1, no more than that part of it may stay, whatever the context has room for.

    Raises: what `prepare` of the engine does; PromptTooLong where no shortening helps.
    """
    turns, n_ctx = tuple(request.messages), engine.info.n_ctx
    whole = _prepared(engine, request)
    n_most = int(len(whole.prompt) * share) if isinstance(whole, Prepared) and share < 1 else n_ctx
    bounds = Bounds.of(n_ctx, request.max_tokens, n_most)
    if isinstance(whole, Prepared) and bounds.hold(len(whole.prompt)):
        return Fitted(prepared=whole)
    todo = outline(turns, bounds, find_known(turns, recall), _measure(engine, request))
    if todo is None:
        if isinstance(whole, PromptTooLong):
            raise whole
        return Fitted(prepared=whole)
    summary = yield from _summary(todo, engine)
    prepared, summary = _with_summary(engine, summary, partial(_shortened, request, todo.n_older))
    compaction = Compaction(
        n_older=todo.n_older,
        summary=summary,
        n_replaced=n_replaced(turns, todo.n_older),
        n_before=whole.n_prompt if isinstance(whole, PromptTooLong) else len(whole.prompt),
        n_after=len(prepared.prompt),
        n_summaries=len(todo.pieces),
    )
    digest = digests_of(turns)[todo.n_older] if summary else None
    return Fitted(prepared=prepared, compaction=compaction, digest=digest)


def _summary(todo: Outline, engine: TextEngine) -> Generator[Prepared, str, str]:
    """Have each piece summarised. A model that has nothing to say leaves the summary as it was."""
    summary = todo.summary
    for piece in todo.pieces:
        prepared, summary = _with_summary(engine, summary, partial(_writing, piece, todo.n_summary))
        said = yield prepared
        summary = said.strip() or summary
    return summary


def _writing(piece: str, n_summary: int, summary: str) -> GenerateRequest:
    """The generation that goes on from a summary with a piece. Units: tokens."""
    return GenerateRequest(messages=summarising(piece, summary), max_tokens=n_summary, sampling=_GREEDY)


def _shortened(request: GenerateRequest, n_older: int, summary: str) -> GenerateRequest:
    return replace(request, messages=shortened(tuple(request.messages), n_older, summary))


def _with_summary(
    engine: TextEngine, summary: str, request_of: Callable[[str], GenerateRequest]
) -> tuple[Prepared, str]:
    """Prepare what holds a summary; without it where, read, it has far more tokens than it was written in."""
    prepared = _prepared(engine, request_of(summary))
    if isinstance(prepared, Prepared):
        return prepared, summary
    return engine.prepare(request_of("")), ""


def _prepared(engine: TextEngine, request: GenerateRequest) -> Prepared | PromptTooLong:
    try:
        return engine.prepare(request)
    except PromptTooLong as error:
        return error


def _measure(engine: TextEngine, request: GenerateRequest) -> Measure:
    """The measure of this engine for prompts that are rendered as the request's own."""

    def measure(turns: Turns) -> int | None:
        prepared = _prepared(engine, replace(request, messages=turns))
        return len(prepared.prompt) if isinstance(prepared, Prepared) else None

    return measure
