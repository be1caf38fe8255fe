"""What is decided when a claim is made ready, and what a continuation keeps."""

from typing import Any

import pytest

from llm_ingress.api.errors import ApiError
from llm_worker.errors import ProgressError
from llm_worker.preparation import PreparedJob
from llm_worker.progress import pack_start, pack_tokens
from tests.fakes import FakeEngine, chat_grant, next_claim, prepare, tokenise

ENGINE = FakeEngine()


def ready(text: str, **fields: Any) -> PreparedJob:
    return prepare(chat_grant(text, **fields), ENGINE, 1700000000)


def test_a_fresh_claim_gets_its_id_from_the_request_and_its_limit_from_the_room() -> None:
    job = ready("hello")
    assert job.start.id == "chatcmpl-r1"
    assert job.start.created == 1700000000
    assert job.start.n_prompt == len(tokenise("hello"))
    assert job.start.max_tokens == ENGINE.info.n_ctx - job.start.n_prompt
    assert job.start.fingerprint == ENGINE.info.fingerprint
    assert job.earlier is None


def test_the_seed_asked_for_is_the_seed_used_and_recorded() -> None:
    job = ready("hello", seed=-5)
    assert job.start.seed == job.prepared.request.sampling.seed == -5


def test_without_a_seed_every_claim_draws_one_of_its_own_and_records_it() -> None:
    jobs = [ready("hello") for _ in range(3)]
    assert len({job.start.seed for job in jobs}) == 3
    assert all(job.start.seed == job.prepared.request.sampling.seed for job in jobs)


def test_a_continuation_keeps_what_the_first_worker_decided() -> None:
    grant = chat_grant("hello there", max_tokens=3)
    first = prepare(grant, ENGINE, 1700000000)
    tokens = tokenise("hello there")[:2]
    again = prepare(
        next_claim(grant, pack_start(first.start) + pack_tokens(tokens)), FakeEngine(), 1800000000
    )
    assert again.start == first.start
    assert again.prepared.request.sampling.seed == first.start.seed
    assert again.prepared.request.resumed == tokens
    assert again.prepared.max_tokens == 3


def test_progress_of_another_model_is_refused() -> None:
    grant = chat_grant("hello")
    progress = pack_start(prepare(grant, ENGINE, 0).start)
    with pytest.raises(ProgressError, match="this is 0000"):
        prepare(next_claim(grant, progress), FakeEngine(fingerprint="0000"), 0)


def test_a_malformed_request_is_refused_here_too() -> None:
    with pytest.raises(ApiError):
        ready("hello", temperature="hot")
