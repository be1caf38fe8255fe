"""What must be known before a claim can start: the request parsed, templated, tokenised, and found to fit.

A fresh lane gets its id, seed and token limit here; a lane with progress keeps the ones it has, and the
tokens it has are computed again without being sent again. A conversation that outgrew the context may first
need a summary, which is a generation of its own: the steps to a claim that is ready are a generator.

Called by: `worker.py`; its steps are done on the preparation thread. Pure.
"""

import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from llm_engine.errors import PromptTooLong, RequestError
from llm_engine.generation import GenerateRequest, Prepared
from llm_ingress.api.errors import prompt_too_long
from llm_ingress.api.schemas import ChatRequest, Truncation, parse_chat
from llm_ingress.dialects import INFER
from llm_ingress.wire import Grant
from llm_worker.compaction import Policy, Recall, shortened
from llm_worker.conversation import Turn, read_turn
from llm_worker.engine import TextEngine
from llm_worker.errors import ProgressError
from llm_worker.overflow import Fitted, Fitting, fit
from llm_worker.progress import ChoiceProgress, Start, unpack
from llm_worker.translate import generate_request

SEED_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A claim that is ready for the engine. `earlier` is None for one that nobody began.

    `turn` is the turn of a conversation that it asks for, if it does.
    `digest` is that of the turns for which the summary in `start` stands; None without one.
    """

    chat: ChatRequest
    prepared: Prepared
    start: Start
    earlier: ChoiceProgress | None
    turn: Turn | None = None
    digest: bytes | None = None


Steps: TypeAlias = Generator[Prepared, str, PreparedJob]


@dataclass(frozen=True, slots=True)
class Unsummarised:
    """A claim that waits for a summary, which `prepared` writes; its text is for the next of the steps."""

    prepared: Prepared
    steps: Steps


def advance(steps: Steps, summary: str | None = None) -> PreparedJob | Unsummarised:
    """Take the next step to a claim that is ready, from the summary asked for last; without one, the first.

    Raises: what `preparation` does.
    """
    try:
        prepared = next(steps) if summary is None else steps.send(summary)
    except StopIteration as done:
        job: PreparedJob = done.value
        return job
    return Unsummarised(prepared, steps)


def preparation(
    grant: Grant, engine: TextEngine, created: int, recall: Recall, policy: Policy = Policy.NONE
) -> Steps:
    """Make a claim ready. Units: `created` in unix seconds.

    Raises: ApiError or RequestError if the request can never be honoured, ProgressError if what came with it
    cannot be continued here.
    """
    if grant.path == INFER:
        return (yield from _turn_steps(grant, read_turn(grant.body), engine, created, recall))
    chat = parse_chat(grant.body)
    return (yield from _steps(grant, chat, engine, created, partial(_fitted, chat, policy, engine, recall)))


def _turn_steps(grant: Grant, turn: Turn, engine: TextEngine, created: int, recall: Recall) -> Steps:
    to_fit = partial(fit, engine=engine, recall=recall, share=turn.share)
    try:
        ready = yield from _steps(grant, turn.chat(), engine, created, to_fit)
    except PromptTooLong as error:
        raise prompt_too_long(error.n_prompt, error.n_ctx) from error
    return replace(ready, turn=turn)


def _steps(
    grant: Grant,
    chat: ChatRequest,
    engine: TextEngine,
    created: int,
    to_fit: Callable[[GenerateRequest], Fitting],
) -> Steps:
    if grant.progress:
        return _continuation(grant, chat, engine)
    seed = secrets.randbits(SEED_BITS) if chat.seed is None else chat.seed
    request = generate_request(chat, seed=seed, max_tokens=chat.token_limit)
    fitted = yield from to_fit(request)
    start = Start(
        id=f"chatcmpl-{grant.request_id}",
        created=created,
        seed=seed,
        max_tokens=fitted.prepared.max_tokens,
        fingerprint=engine.info.fingerprint,
        n_prompt=len(fitted.prepared.prompt),
        compaction=fitted.compaction,
    )
    return PreparedJob(chat=chat, prepared=fitted.prepared, start=start, earlier=None, digest=fitted.digest)


def _fitted(
    chat: ChatRequest, policy: Policy, engine: TextEngine, recall: Recall, request: GenerateRequest
) -> Fitting:
    """The request, shortened if it has to be and may be."""
    by_default = Truncation.AUTO if policy is Policy.SUMMARY else Truncation.DISABLED
    if (chat.truncation or by_default) is Truncation.AUTO:
        return (yield from fit(request, engine, recall))
    return Fitted(prepared=engine.prepare(request))


def _continuation(grant: Grant, chat: ChatRequest, engine: TextEngine) -> PreparedJob:
    progress = unpack(grant.progress)
    start, earlier = progress.start, progress.choice(0)
    if start.fingerprint != engine.info.fingerprint:
        raise ProgressError(f"progress is of model {start.fingerprint}, this is {engine.info.fingerprint}")
    request = generate_request(
        chat, seed=start.seed, max_tokens=start.max_tokens, resumed=tuple(earlier.tokens)
    )
    if (made := start.compaction) is not None:
        # Not decided again: the prompt must be the one whose answer goes on.
        request = replace(request, messages=shortened(chat.turns, made.n_older, made.summary))
    try:
        prepared = engine.prepare(request)
    except RequestError as error:  # the request itself was taken before
        raise ProgressError(str(error)) from error
    return PreparedJob(chat=chat, prepared=prepared, start=start, earlier=earlier)
