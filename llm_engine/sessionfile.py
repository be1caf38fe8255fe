"""One file of kept KV: of which tokens, in which context it fits, and whether it is whole.

    [ magic | header's length | header's checksum | state's checksum | state's length ] [ header ] [ state ]

The header is JSON; the state is llama.cpp's bytes. A file appears under its name when all of it is on disk;
the checksums tell one that is half, or flipped, all the same. Its time of modification is its last use.

Called by: `sessiondir.py`, on its threads.
"""

import os
import struct
import zlib
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import orjson

from llm_engine.errors import SessionFileError
from llm_engine.hostcache import KvState
from llm_engine.pages import state_buffer
from llm_engine.prefix import Run

FILE_MODE = 0o600  # it holds what users wrote
TEMPORARY_SUFFIX = ".tmp"

_MAGIC = b"LLMKV\0\0\1"
_PREFIX = struct.Struct("<8sIIIQ")


@dataclass(frozen=True, slots=True)
class SessionHeader:
    """What a file says of its state."""

    fingerprint: str
    run: Run
    is_checkpoint: bool
    n_bytes: int  # of the state
    checksum: int  # of the state


def write_session(path: Path, run: Run, state: KvState, used_at: float) -> None:
    """Write a file, whole or not at all; `used_at` is Unix time.

    Raises: OSError.
    """
    header = orjson.dumps(
        {
            "fingerprint": state.fingerprint,
            "tokens": run.tokens,
            "trims_from": run.trims_from,
            "is_checkpoint": state.is_checkpoint,
        }
    )
    checksums = zlib.crc32(header), zlib.crc32(state.data.data)
    temporary = path.with_suffix(TEMPORARY_SUFFIX)
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE), "wb") as file:
            file.write(_PREFIX.pack(_MAGIC, len(header), *checksums, state.n_bytes))
            file.write(header)
            file.write(state.data.data)
            file.flush()
            os.fsync(file.fileno())
        os.utime(temporary, (used_at, used_at))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_header(path: Path) -> SessionHeader:
    """Read what a file says of itself, and no more.

    Raises: SessionFileError, OSError.
    """
    with path.open("rb") as file:
        return _read_header(file)


def read_state(path: Path) -> KvState:
    """Read the state.

    Raises: SessionFileError, OSError, MemoryError.
    """
    with path.open("rb") as file:
        header = _read_header(file)
        data = state_buffer(header.n_bytes)
        n_read = file.readinto(data.data)
    if n_read != header.n_bytes or zlib.crc32(data.data) != header.checksum:
        raise SessionFileError("the checksum of its state is wrong")
    return KvState(data, header.is_checkpoint, header.fingerprint)


def _read_header(file: BufferedReader) -> SessionHeader:
    start = file.read(_PREFIX.size)
    if len(start) < _PREFIX.size:
        raise SessionFileError("it ends in its header")
    magic, n_header, checksum, checksum_of_state, n_bytes = _PREFIX.unpack(start)
    if magic != _MAGIC:
        raise SessionFileError("no session file of this version")
    n_whole, n_there = len(start) + n_header + n_bytes, os.fstat(file.fileno()).st_size
    if n_there != n_whole:
        raise SessionFileError(f"{n_there} bytes of {n_whole}")
    encoded = file.read(n_header)
    if zlib.crc32(encoded) != checksum:
        raise SessionFileError("the checksum of its header is wrong")
    facts = orjson.loads(encoded)
    tokens = facts["tokens"]
    run = Run(tokens, len(tokens), facts["trims_from"])
    return SessionHeader(facts["fingerprint"], run, facts["is_checkpoint"], n_bytes, checksum_of_state)
