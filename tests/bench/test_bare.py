"""The bare loop is what an engine of the same options would be without Python."""

from pathlib import Path
from typing import Any

import pytest
from llama_cpp import llama_cpp as c

from bench.bare import BareLoop, BareProcess
from llm_engine.config import EngineConfig
from llm_engine.errors import ModelError

pytestmark = pytest.mark.model


def test_its_layers_lie_where_the_engines_do(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(c, "llama_model_load_from_file", lambda _path, given: told.append(given))
    with pytest.raises(ModelError):
        BareLoop(EngineConfig(model=str(smollm2), n_gpu_layers=-1))
    assert told[0].n_gpu_layers == -1


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_process() -> None:
    """A pool would have started another process, and another."""
    with pytest.raises(ModelError, match="no such file"), BareProcess(EngineConfig(model="no/such.gguf")):
        pytest.fail("it has begun")


def test_a_context_that_is_full_is_told(smollm2: Path) -> None:
    config = EngineConfig(model=str(smollm2), max_inflight=1, ctx_size=256, threads=1)
    with BareLoop(config) as loop:
        loop.prefill(0, [1] * 256)
        with pytest.raises(RuntimeError, match="more tokens than a context holds"):
            loop.step({0: 1}, [256])
