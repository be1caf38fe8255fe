"""What calls of llama.cpp leave behind in Python."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from llm_engine.backend import LlamaBackend, context_params
from llm_engine.config import EngineConfig
from llm_engine.errors import BackendError
from llm_engine.model import Model

pytestmark = pytest.mark.model

N_TIMES = 100


@pytest.fixture
def model(smollm2: Path) -> Iterator[Model]:
    model = Model.load(smollm2)
    yield model
    model.close()


def n_left_by(work: Callable[[], None]) -> int:
    """How many objects stay until the garbage collector comes by; a few may be somebody else's."""
    gc.collect()
    gc.disable()
    try:
        work()
        return gc.collect()
    finally:
        gc.enable()


def test_tokenising_leaves_nothing_behind_whatever_the_length_of_a_text(model: Model) -> None:
    """Every length had an array type of its own in ctypes."""

    def work() -> None:
        for n in range(N_TIMES):
            model.tokenize(("word " * (n + 1),))

    assert n_left_by(work) < N_TIMES


def test_moving_states_leaves_nothing_behind(model: Model) -> None:
    config = EngineConfig(max_inflight=2, ctx_size=256)
    backend = LlamaBackend.create(model, context_params(config, 256), "fingerprint")

    def work() -> None:
        for _ in range(N_TIMES):
            backend.restore(0, backend.fetch(1, checkpoint=False))
            backend.copy(0, 1)

    assert n_left_by(work) < N_TIMES
    backend.close()


def test_a_state_for_which_there_is_no_memory_is_not_moved(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a copy from slot to slot the loop would have heard a MemoryError, and ended."""
    config = EngineConfig(max_inflight=2, ctx_size=256)
    backend = LlamaBackend.create(model, context_params(config, 256), "fingerprint")

    def refuse(n_bytes: int) -> NoReturn:
        raise MemoryError(f"{n_bytes} bytes")

    monkeypatch.setattr("llm_engine.pages.state_buffer", refuse)
    for move in (lambda: backend.copy(0, 1), lambda: backend.fetch(0, checkpoint=False)):
        with pytest.raises(BackendError, match="no memory"):
            move()
    backend.close()
