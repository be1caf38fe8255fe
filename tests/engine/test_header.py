"""Which headers are believed. Files here are written by hand, a few dozen bytes each."""

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_engine.errors import ModelError
from llm_engine.header import check_header


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def strings(key: bytes, *values: bytes) -> bytes:
    return pair(key, 9, struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values)))


def tokens(*values: bytes) -> bytes:
    return strings(b"tokenizer.ggml.tokens", *values)


def tensor(name: bytes, *dimensions: int, offset: int = 0) -> bytes:
    shape = struct.pack("<I", len(dimensions)) + b"".join(struct.pack("<Q", n) for n in dimensions)
    return text(name) + shape + struct.pack("<IQ", 0, offset)


def header(*pairs: bytes, tensors: tuple[bytes, ...] = (), version: int = 3) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(pairs))
    return b"GGUF" + counts + b"".join(pairs) + b"".join(tensors)


SOUND = header(
    pair(b"general.architecture", 8, text(b"llama")),
    pair(b"llama.block_count", 4, struct.pack("<I", 2)),
    tokens(b"a", b"b", b""),
    pair(b"tokenizer.ggml.token_type", 9, struct.pack("<IQ3i", 5, 3, 1, 1, 1)),
    tensors=(tensor(b"token_embd.weight", 4, 3), tensor(b"output.weight", 4, 3, offset=64)),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def reason(path: Path, data: bytes) -> str | None:
    """Why this file is not believed; None if it is."""
    path.write_bytes(data)
    try:
        check_header(path)
    except ModelError as error:
        refused = error
    else:
        return None
    assert str(refused) == f"{path}: {refused.reason}"
    assert "\n" not in refused.reason
    return refused.reason


def test_sound_header_is_believed(path: Path) -> None:
    assert reason(path, SOUND) is None


def test_every_cut_of_a_header_is_noticed(path: Path) -> None:
    for size in range(len(SOUND)):
        assert reason(path, SOUND[:size]) is not None, f"cut to {size} bytes"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
@given(position=st.integers(0, len(SOUND) - 1), value=st.integers(0, 255))
def test_any_changed_byte_is_believed_or_refused_never_more(path: Path, position: int, value: int) -> None:
    reason(path, SOUND[:position] + bytes([value]) + SOUND[position + 1 :])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the file is empty"),
        (b"Once upon a time", "not a GGUF file: it starts with b'Once'"),
        (header(version=99), "GGUF version 99"),
        (header(version=1 << 24 | 3), "GGUF version"),
        (header(pair(b"", 4, bytes(4))), "an empty key"),
        (header(*2 * [pair(b"k", 4, bytes(4))]), "the key 'k' twice"),
        (header(pair(b"k", 13, b"")), "the key 'k' has the unknown type 13"),
        (header(pair(b"k", 9, struct.pack("<IQ", 9, 1))), "the key 'k' has the unknown type 9"),
        (header(pair(b"k", 9, struct.pack("<IQ", 8, 1 << 60))), "more than the file can hold"),
        (header(pair(b"k", 9, struct.pack("<IQ", 10, 1 << 60))), "past the end of the file"),
        (header(text(b"k" * 9)[:-1]), "past the end of the file"),
        (header(tensors=(tensor(b"t" * 64, 1),)), "too long or stands there twice"),
        (header(tensors=(tensor(b"t", 1), tensor(b"t", 1))), "too long or stands there twice"),
        (header(tensors=(tensor(b"t", 1, 1, 1, 1, 1),)), "has 5 dimensions"),
        (header(tensors=(tensor(b"t", 1, offset=1 << 40),)), "beyond the end of the file"),
    ],
)
def test_broken_header_is_refused_with_the_reason(path: Path, data: bytes, words: str) -> None:
    assert words in (reason(path, data) or "believed")


@pytest.mark.parametrize(
    "texts",
    [
        (b"a", b"b", b"a"),
        (b"a\0x", b"a\0y"),  # llama.cpp reads up to the NUL
        (b"", b"[EMPTY_0]"),  # ... and gives a token of no text this one
        (b"\0x", b"[EMPTY_0]"),
    ],
)
def test_two_equal_token_texts_are_refused(path: Path, texts: tuple[bytes, ...]) -> None:
    assert "have the same text" in (reason(path, header(tokens(*texts))) or "believed")


def test_tokens_without_text_are_not_equal(path: Path) -> None:
    assert reason(path, header(tokens(b"", b"", b"\0"))) is None


def test_what_is_no_file_is_refused_with_the_systems_reason(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", "no such file"), (tmp_path, "is a directory")):
        with pytest.raises(ModelError, match=words):
            check_header(path)
