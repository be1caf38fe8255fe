"""What must be known before a claim can start: the request parsed, templated, tokenised, and found to fit.

A fresh lane gets its id, seed and token limit here; a lane with progress keeps the ones it has, and the
tokens it has are computed again without being sent again.

Called by: `worker.py`, on the preparation thread. Pure.
"""

import secrets
from dataclasses import dataclass, replace

from llm_engine.errors import PromptTooLong
from llm_engine.generation import Prepared
from llm_ingress.api.schemas import ChatRequest, parse_chat
from llm_ingress.dialects import INFER
from llm_ingress.wire import Grant
from llm_worker.conversation import Turn, read_turn, too_long
from llm_worker.engine import TextEngine
from llm_worker.errors import ProgressError
from llm_worker.progress import ChoiceProgress, Start, unpack
from llm_worker.translate import generate_request

SEED_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A claim that is ready for the engine. `earlier` is None for one that nobody began.

    `turn` is the turn of a conversation that it asks for, if it does.
    """

    chat: ChatRequest
    prepared: Prepared
    start: Start
    earlier: ChoiceProgress | None
    turn: Turn | None = None


def prepare(grant: Grant, engine: TextEngine, created: int) -> PreparedJob:
    """Make a claim ready. Units: `created` in unix seconds.

    Raises: ApiError or RequestError if the request can never be honoured, ProgressError if what came with it
    cannot be continued here.
    """
    if grant.path == INFER:
        return _prepare_turn(grant, read_turn(grant.body), engine, created)
    return _prepare(grant, parse_chat(grant.body), engine, created)


def _prepare_turn(grant: Grant, turn: Turn, engine: TextEngine, created: int) -> PreparedJob:
    try:
        return replace(_prepare(grant, turn.chat(), engine, created), turn=turn)
    except PromptTooLong as error:
        raise too_long(turn, error, engine) from error


def _prepare(grant: Grant, chat: ChatRequest, engine: TextEngine, created: int) -> PreparedJob:
    if grant.progress:
        return _continuation(grant, chat, engine)
    seed = secrets.randbits(SEED_BITS) if chat.seed is None else chat.seed
    prepared = engine.prepare(generate_request(chat, seed=seed, max_tokens=chat.token_limit))
    start = Start(
        id=f"chatcmpl-{grant.request_id}",
        created=created,
        seed=seed,
        max_tokens=prepared.max_tokens,
        fingerprint=engine.info.fingerprint,
        n_prompt=len(prepared.prompt),
    )
    return PreparedJob(chat=chat, prepared=prepared, start=start, earlier=None)


def _continuation(grant: Grant, chat: ChatRequest, engine: TextEngine) -> PreparedJob:
    progress = unpack(grant.progress)
    start, earlier = progress.start, progress.choice(0)
    if start.fingerprint != engine.info.fingerprint:
        raise ProgressError(f"progress is of model {start.fingerprint}, this is {engine.info.fingerprint}")
    request = generate_request(
        chat, seed=start.seed, max_tokens=start.max_tokens, resumed=tuple(earlier.tokens)
    )
    return PreparedJob(chat=chat, prepared=engine.prepare(request), start=start, earlier=earlier)
