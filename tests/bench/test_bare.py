"""The bare loop is what an engine of the same options would be without Python."""

from pathlib import Path
from typing import Any

import pytest
from llama_cpp import llama_cpp as c

from bench.bare import BareLoop
from llm_engine.config import EngineConfig
from llm_engine.errors import ModelError

pytestmark = pytest.mark.model


def test_its_layers_lie_where_the_engines_do(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(c, "llama_model_load_from_file", lambda _path, given: told.append(given))
    with pytest.raises(ModelError):
        BareLoop(EngineConfig(model=str(smollm2), n_gpu_layers=-1))
    assert told[0].n_gpu_layers == -1
