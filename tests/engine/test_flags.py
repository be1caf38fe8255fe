"""What the engine's flags become: options, and what llama.cpp is told."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import llama_cpp as c

from llm_engine import llama
from llm_engine.cli import add_engine_flags, engine_config
from llm_engine.config import EngineConfig
from llm_engine.errors import ConfigError
from llm_engine.model import model_params


def config_of(*flags: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return engine_config(parser.parse_args(flags))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The llama_model_params of every attempt to load a model; none of them succeeds."""
    params: list[Any] = []
    monkeypatch.setattr(c, "llama_model_load_from_file", lambda _path, given: params.append(given))
    return params


def test_without_flags_layers_stay_on_the_cpu_and_would_be_split_by_layer(told: list[Any]) -> None:
    config = config_of()
    assert config == EngineConfig()
    llama.load_model("any.gguf", model_params(config))
    assert (told[0].n_gpu_layers, told[0].split_mode, told[0].main_gpu) == (0, c.LLAMA_SPLIT_MODE_LAYER, 0)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("none", c.LLAMA_SPLIT_MODE_NONE),
        ("layer", c.LLAMA_SPLIT_MODE_LAYER),
        ("row", c.LLAMA_SPLIT_MODE_ROW),
    ],
)
def test_gpu_flags_reach_llama_cpp(told: list[Any], name: str, mode: int) -> None:
    config = config_of("--n-gpu-layers", "-1", "--split-mode", name, "--main-gpu", "3")
    llama.load_model("any.gguf", model_params(config))
    assert (told[0].n_gpu_layers, told[0].split_mode, told[0].main_gpu) == (-1, mode, 3)


def test_memory_flags_reach_llama_cpp(told: list[Any]) -> None:
    for flags in ((), ("--mlock",), ("--mmap",), ("--mmap", "--mlock")):
        llama.load_model("any.gguf", model_params(config_of(*flags)))
    llama.load_model("any.gguf", llama.ModelParams(allocates=False))
    assert [params.load_mode for params in told] == [
        c.LLAMA_LOAD_MODE_NONE,
        c.LLAMA_LOAD_MODE_MLOCK,
        c.LLAMA_LOAD_MODE_MMAP,
        c.LLAMA_LOAD_MODE_MMAP_MLOCK,
        c.LLAMA_LOAD_MODE_NONE,
    ]
    assert [params.no_alloc for params in told] == [False, False, False, False, True]


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ({"split_mode": "column"}, "split_mode is 'column', not one of none"),
        ({"main_gpu": -1}, "main_gpu is -1"),
    ],
)
def test_a_gpu_option_out_of_its_range_names_the_field(option: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        EngineConfig(**option)


@pytest.mark.parametrize("command", ["llm_engine", "llm_worker", "llm_serve"])
def test_every_command_with_an_engine_has_the_gpu_flags(command: str) -> None:
    shown = subprocess.run(
        [Path(sys.executable), "-m", command, "--help"], check=True, capture_output=True, text=True
    ).stdout
    for flag in ("--n-gpu-layers N", "--split-mode {none,layer,row}", "--main-gpu N"):
        assert flag in shown


def test_session_flags_say_where_and_how_much_is_kept() -> None:
    config = config_of("--session-dir", "kept/here", "--session-dir-mib", "100")
    assert (config.session_dir, config.session_dir_mib) == (Path("kept/here"), 100)
    assert config_of().session_dir is None


def test_every_command_that_runs_an_engine_takes_how_long_sessions_live() -> None:
    for command in ("llm_engine", "llm_worker", "llm_serve"):
        shown = subprocess.run(
            [sys.executable, "-m", command, "--help"], capture_output=True, text=True, check=True
        )
        assert "--session-ttl" in shown.stdout


@pytest.mark.parametrize(
    ("flags", "machine", "type_of_keys"),
    [
        ((), "x86_64", "bf16"),
        ((), "AMD64", "bf16"),
        ((), "arm64", "f16"),
        (("--no-batch-invariant",), "x86_64", "f16"),
        (("--n-gpu-layers", "-1"), "x86_64", "f16"),
        (("--n-gpu-layers", "-1", "--batch-invariant"), "x86_64", "f16"),
        (("--flash-attn", "off"), "x86_64", "f16"),
        (("--cache-type-k", "q8_0"), "x86_64", "q8_0"),
    ],
)
def test_keys_are_of_the_type_that_has_one_path_through_attention_where_that_is_fast(
    flags: tuple[str, ...], machine: str, type_of_keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert config_of(*flags).type_of_keys == type_of_keys


@pytest.mark.parametrize(
    ("flags", "n_tokens"),
    [
        (("--cache-type-k", "f16"), 63),
        (("--cache-type-k", "f32", "--cache-type-v", "f32"), 63),
        (("--cache-type-k", "bf16"), None),
        (("--cache-type-k", "q8_0", "--cache-type-v", "q8_0"), None),
        (("--cache-type-k", "f16", "--no-batch-invariant"), None),
        (("--n-gpu-layers", "-1"), None),
        (("--n-gpu-layers", "-1", "--batch-invariant"), 63),
    ],
)
def test_prompts_are_computed_in_small_slices_where_only_that_keeps_answers_from_depending_on_others(
    flags: tuple[str, ...], n_tokens: int | None
) -> None:
    assert config_of(*flags).prompt_slice == n_tokens
