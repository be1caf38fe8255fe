"""What an engine will take, as it is laid out, against what llama.cpp then allocates."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llm_engine import layout, llama
from llm_engine.backend import context_params
from llm_engine.config import EngineConfig
from llm_engine.engine import Engine
from llm_engine.errors import ConfigError, ModelError
from llm_engine.generation import Finished, GenerateRequest, StopReason
from llm_engine.layout import Layout, measure, n_tokens_allowed
from llm_engine.model import Model, model_params

MIB = 1 << 20
ROUNDED = 0.006 * MIB  # llama.cpp writes two digits

HYBRID_LOG = """\
llama_context:        CPU  output buffer size =     0.75 MiB
llama_kv_cache:        CPU KV buffer size =     0.00 MiB
llama_kv_cache: size =    4.00 MiB (  4096 cells,   1 layers,  4/4 seqs), K (f16):    2.00 MiB
llama_memory_recurrent:        CPU RS buffer size =     0.22 MiB
llama_memory_recurrent: size =    0.25 MiB (     4 cells,   4 layers,  4 seqs  0 rs_seq), R (f32):    0.06 MiB
sched_reserve:        CPU compute buffer size =     1.25 MiB
"""

OPTIONS = [
    pytest.param({"max_inflight": 4}, id="defaults"),
    pytest.param({"max_inflight": 3, "ctx_size": 1000}, id="padded"),
    pytest.param({"max_inflight": 2, "cache_type_k": "q8_0", "cache_type_v": "q4_0"}, id="quantised"),
    pytest.param({"max_inflight": 1, "ctx_size": 512, "cache_type_k": "f32"}, id="one slot"),
]


def allocated_bytes(path: Path, config: EngineConfig, n_ctx: int) -> tuple[float, int]:
    """What the buffers of KV and state really take, and how many buffers they are."""
    model = Model.load(path, model_params(config))
    with llama.collected_log() as log:
        context = llama.init_context(model.pointer, context_params(config, n_ctx))
        assert context
        sizes = [float(mib) for mib in re.findall(r"(?:KV|RS) buffer size = +([\d.]+) MiB", log.text)]
    llama.free_context(context)
    model.close()
    return sum(sizes) * MIB, len(sizes)


def test_cells_and_states_are_told_apart() -> None:
    assert Layout.parse(HYBRID_LOG, n_cells=4096) == Layout(
        n_cells=4096, cells_bytes=4 * MIB, state_bytes=MIB // 4, scratch_bytes=2 * MIB
    )


def test_a_conversation_has_its_state_and_so_many_tokens_within_its_bytes() -> None:
    hybrid = Layout.parse(HYBRID_LOG, n_cells=4096)  # 64 KiB of state a slot, 1 KiB a token
    assert n_tokens_allowed(hybrid, EngineConfig(max_inflight=4, max_kv_mib_per_session=1)) == 1024 - 64
    assert n_tokens_allowed(hybrid, EngineConfig(max_inflight=4, max_kv_mib_per_session=3)) == 3072 - 64


def test_a_bound_in_which_no_conversation_has_room_is_refused_by_name() -> None:
    large = Layout(n_cells=512, cells_bytes=100 * MIB, state_bytes=4 * MIB, scratch_bytes=0)
    with pytest.raises(ConfigError, match="max_kv_mib_per_session is 4, must be at least 5 for this model"):
        n_tokens_allowed(large, EngineConfig(max_inflight=4, max_kv_mib_per_session=4))
    least = EngineConfig(max_inflight=4, max_kv_mib_per_session=5)
    assert n_tokens_allowed(large, least) >= 16


@pytest.mark.model
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["smollm2", "hybrid_model", "sliding_model"])
def test_what_is_laid_out_is_what_llama_cpp_allocates(
    request: pytest.FixtureRequest, kind: str, options: dict[str, Any]
) -> None:
    path, config = request.getfixturevalue(kind), EngineConfig(**options)
    footprint = measure(path, config)
    allocated, n_buffers = allocated_bytes(path, config, footprint.n_ctx)
    assert n_buffers == (1 if kind == "smollm2" else 2)
    assert allocated > 0
    assert footprint.kv_bytes == pytest.approx(allocated, abs=2 * n_buffers * ROUNDED)


@pytest.mark.model
@pytest.mark.parametrize("kind", ["smollm2", "hybrid_model", "sliding_model"])
def test_a_long_context_is_scaled_from_a_shorter_one(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path, config = request.getfixturevalue(kind), EngineConfig(max_inflight=4, ctx_size=2048)
    exact = measure(path, config)
    monkeypatch.setattr(layout, "N_CELLS_LAID_OUT", 4 * 512)
    scaled = measure(path, config)
    assert scaled.kv_bytes == pytest.approx(exact.kv_bytes, abs=5 * 2 * ROUNDED)
    assert scaled.scratch_bytes >= exact.scratch_bytes


@pytest.mark.model
def test_slots_hold_no_more_than_the_model_was_made_for(sliding_model: Path) -> None:
    footprint = measure(sliding_model, EngineConfig(max_inflight=2, ctx_size=1_000_000))
    assert (footprint.n_slots, footprint.n_ctx) == (2, 2048)
    assert footprint.weights_bytes == pytest.approx(sliding_model.stat().st_size, rel=0.3)


@pytest.mark.model
@pytest.mark.parametrize("kind", ["smollm2", "sliding_model"])
def test_a_slot_holds_no_more_tokens_than_their_kv_may_take(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    path, config = request.getfixturevalue(kind), EngineConfig(max_inflight=2, ctx_size=2048)
    whole = measure(path, config)
    footprint = measure(path, replace(config, max_kv_mib_per_session=1))
    assert 0.9 * MIB < footprint.n_ctx * whole.kv_bytes / (2 * whole.n_ctx) <= MIB
    assert caplog.messages == [
        f"a slot holds {footprint.n_ctx} tokens, not 2048: KV of one conversation takes 1 MiB at most"
    ]


@pytest.mark.model
def test_a_conversation_ends_where_its_kv_would_take_more_than_it_may(smollm2: Path) -> None:
    config = EngineConfig(model=str(smollm2), max_inflight=1, max_kv_mib_per_session=1)
    with Engine.spawn(config) as engine:
        *_, end = engine.submit(GenerateRequest.user("Tell a long story.", max_tokens=1000))
        assert isinstance(end, Finished)
        assert (end.reason, end.n_prompt + end.n_completion) == (StopReason.LENGTH, engine.info.n_ctx)
        assert 0.9 * MIB < engine.kept().slots.n_bytes <= MIB


@pytest.mark.model
def test_a_context_that_llama_cpp_would_not_create_is_refused_with_its_reason(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelError, match=r"broken\.gguf: "):
        measure(broken, EngineConfig())
