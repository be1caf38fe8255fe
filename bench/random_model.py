"""`python -m bench random-model OUT.gguf`: a model as large and as fast as one of a billion parameters.

Llama-shaped with random Q8_0 weights, so that a GPU can be measured without a download; its text is noise.
The tokenizer and the chat template are those of another GGUF. Writing takes some ten seconds and 1.3 GB.
"""

import argparse
from collections.abc import Sequence

import gguf
import numpy as np
import numpy.typing as npt

from llm_engine.gguf import EMBEDDED_MODEL, resolve

N_LAYERS, WIDTH, FFN = 16, 2048, 8192
N_HEADS, N_KV_HEADS = 32, 8
CONTEXT = 8192
BLOCK, BLOCK_BYTES = 32, 34  # of Q8_0: a scale in f16, then 32 weights in int8
SCALE = 0.02 / 127


def main(argv: Sequence[str]) -> int:
    """Write the model."""
    parser = argparse.ArgumentParser(
        prog="python -m bench random-model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", metavar="OUT.gguf")
    parser.add_argument("--tokenizer", default=EMBEDDED_MODEL, help="a GGUF, as for llm-engine (smollm2)")
    args = parser.parse_args(argv)
    writer = gguf.GGUFWriter(args.out, "llama")
    n_vocab = _copy_tokenizer(writer, args.tokenizer)
    _add_shape(writer, n_vocab)
    _add_weights(writer, n_vocab)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return 0


def _copy_tokenizer(writer: gguf.GGUFWriter, model: str) -> int:
    """Take over the vocabulary and the template; return the number of tokens."""
    fields = gguf.GGUFReader(resolve(model).path).fields
    for key, field in fields.items():
        if key.startswith("tokenizer."):
            writer.add_key_value(key, field.contents(), field.types[0], *field.types[1:])
    return len(fields["tokenizer.ggml.tokens"].data)


def _add_shape(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    writer.add_vocab_size(n_vocab)
    writer.add_block_count(N_LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // N_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)


def _add_weights(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    chance = np.random.default_rng(0)
    ones = np.ones(WIDTH, np.float32)
    kv_width = WIDTH // N_HEADS * N_KV_HEADS

    def matrix(name: str, n_out: int, n_in: int) -> None:
        writer.add_tensor(
            f"{name}.weight", _q8_0(chance, n_out, n_in), raw_dtype=gguf.GGMLQuantizationType.Q8_0
        )

    matrix("token_embd", n_vocab, WIDTH)
    writer.add_tensor("output_norm.weight", ones)
    matrix("output", n_vocab, WIDTH)
    for layer in range(N_LAYERS):
        block = f"blk.{layer}"
        writer.add_tensor(f"{block}.attn_norm.weight", ones)
        matrix(f"{block}.attn_q", WIDTH, WIDTH)
        matrix(f"{block}.attn_k", kv_width, WIDTH)
        matrix(f"{block}.attn_v", kv_width, WIDTH)
        matrix(f"{block}.attn_output", WIDTH, WIDTH)
        writer.add_tensor(f"{block}.ffn_norm.weight", ones)
        matrix(f"{block}.ffn_gate", FFN, WIDTH)
        matrix(f"{block}.ffn_up", FFN, WIDTH)
        matrix(f"{block}.ffn_down", WIDTH, FFN)


def _q8_0(chance: np.random.Generator, n_out: int, n_in: int) -> npt.NDArray[np.uint8]:
    """Rows of random Q8_0 blocks. Shapes: (n_out, n_in / 32 * 34) bytes."""
    n_blocks = n_out * n_in // BLOCK
    blocks = np.empty((n_blocks, BLOCK_BYTES), np.uint8)
    blocks[:, :2] = np.full(n_blocks, SCALE, np.float16).view(np.uint8).reshape(n_blocks, 2)
    blocks[:, 2:] = chance.integers(-127, 128, (n_blocks, BLOCK), dtype=np.int8).view(np.uint8)
    return blocks.reshape(n_out, n_in // BLOCK * BLOCK_BYTES)
