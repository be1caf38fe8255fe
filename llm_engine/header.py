"""Whether a GGUF file's header can be believed, read without llama.cpp.

llama.cpp answers most damage with NULL and a reason, but some headers end the process instead: two equal
token texts, an empty key. Those, and a header that does not hold together at all, are found here in
milliseconds; the numbers inside a sound header are tried out by `trial.py`.
Called by: `trial.py`, before any process is started.
Source: ggml/docs/gguf.md; llama.cpp gguf.cpp and llama-vocab.cpp for what aborts.
"""

import mmap
import struct
from pathlib import Path

from llm_engine.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
TOKENS_KEY = b"tokenizer.ggml.tokens"

_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by gguf_type
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_MAX_NAME_BYTES = 63  # GGML_MAX_NAME, less its NUL

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class _Broken(Exception):
    """The header does not hold together; the text is the reason."""


def check_header(path: Path) -> None:
    """Read the header of one GGUF file from end to end.

    Raises: ModelError if the file cannot be read, is no GGUF, or has a header that contradicts itself or
    would abort llama.cpp.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Header(data).check()
    except _Broken as broken:
        raise ModelError(str(path), str(broken)) from None
    except OSError as error:
        raise ModelError(str(path), (error.strerror or str(error)).lower()) from error
    except ValueError:  # mmap's word for a file of no bytes
        raise ModelError(str(path), "the file is empty") from None


class _Header:
    """A cursor over one file's header, and what was seen on the way."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0

    def check(self) -> None:
        magic = self._bytes(4)
        if magic != MAGIC:
            raise _Broken(f"not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
        version = self._u32()
        if version not in VERSIONS:
            raise _Broken(f"GGUF version {version} is not one of {VERSIONS}")
        n_tensors, n_pairs = self._u64(), self._u64()
        self._check_pairs(n_pairs)
        self._check_tensors(n_tensors)

    def _check_pairs(self, n_pairs: int) -> None:
        seen: set[bytes] = set()
        for _ in range(n_pairs):
            key = self._string()
            if not key:
                raise _Broken("the header has an empty key")  # GGML_ASSERT(!key.empty())
            if key in seen:
                raise _Broken(f"the header has the key {_shown(key)} twice")
            seen.add(key)
            self._check_value(key)

    def _check_value(self, key: bytes) -> None:
        kind = self._u32()
        if kind != _ARRAY:
            self._skip(kind, 1, key)
            return
        kind, count = self._u32(), self._u64()
        if key == TOKENS_KEY and kind == _STRING:
            _check_tokens(self._strings(count))
        else:
            self._skip(kind, count, key)

    def _check_tensors(self, n_tensors: int) -> None:
        seen: set[bytes] = set()
        for _ in range(n_tensors):
            name = self._string()
            if len(name) > _MAX_NAME_BYTES or name in seen:
                raise _Broken(f"the tensor name {_shown(name)} is too long or stands there twice")
            seen.add(name)
            n_dimensions = self._u32()
            if n_dimensions > _MAX_DIMENSIONS:
                raise _Broken(f"the tensor {_shown(name)} has {n_dimensions} dimensions")
            self._bytes(8 * n_dimensions + 4)  # the dimensions and the type
            if self._u64() >= self._size:
                raise _Broken(f"the tensor {_shown(name)} lies beyond the end of the file")

    # --- reading -----------------------------------------------------------------------------------------

    def _bytes(self, count: int) -> bytes:
        start = self._at
        if count > self._size - start:
            raise _Broken(f"the header runs past the end of the file ({self._size} bytes)")
        self._at = start + count
        return self._data[start : self._at]

    def _u32(self) -> int:
        value: int = _U32.unpack(self._bytes(4))[0]
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack(self._bytes(8))[0]
        return value

    def _string(self) -> bytes:
        return self._bytes(self._u64())

    def _skip(self, kind: int, count: int, key: bytes) -> None:
        if kind == _STRING:
            self._strings(count)
        elif kind in _SCALAR_BYTES:
            self._bytes(count * _SCALAR_BYTES[kind])
        else:
            raise _Broken(f"the key {_shown(key)} has the unknown type {kind}")

    def _strings(self, count: int) -> list[bytes]:
        """Read `count` strings. Written out flat: a vocabulary has a quarter of a million of them."""
        if count > (self._size - self._at) // 8:
            raise _Broken(f"the header counts {count} strings, more than the file can hold")
        data, size, at, length_at = self._data, self._size, self._at, _U64.unpack_from
        texts = []
        for _ in range(count):
            start = at + 8
            if start > size:
                break
            at = start + length_at(data, at)[0]
            texts.append(data[start:at])
        if at > size or len(texts) < count:
            raise _Broken(f"the header runs past the end of the file ({size} bytes)")
        self._at = at
        return texts


def _check_tokens(texts: list[bytes]) -> None:
    """Refuse two equal token texts, as llama.cpp sees them: up to the first NUL, the empty ones numbered.

    Source: llama-vocab.cpp, GGML_ASSERT(id_to_token.size() == token_to_id.size()).
    """
    first: dict[bytes, int] = {}
    for index, raw in enumerate(texts):
        text = raw.partition(b"\0")[0] if b"\0" in raw else raw
        other = first.setdefault(text or b"[EMPTY_%d]" % index, index)
        if other != index:
            raise _Broken(f"the tokens {other} and {index} have the same text {_shown(text)}")


def _shown(name: bytes) -> str:
    return repr(name[:80].decode("utf-8", "replace"))
