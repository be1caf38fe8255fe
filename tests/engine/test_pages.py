"""What states take of the machine's memory is what they hold."""

import os
import sys
from pathlib import Path

import pytest

from llm_engine.hostcache import HostCache, KvState, Saved
from llm_engine.pages import state_buffer
from llm_engine.prefix import Run

MIB = 1 << 20
TOKEN_BYTES = 23_040


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("n_bytes", [0, 1, 100_000, 128 << 10, 3_700_001, 5 * MIB])
def test_a_buffer_has_as_many_bytes_as_were_asked_for_and_can_be_written(n_bytes: int) -> None:
    buffer = state_buffer(n_bytes)
    assert (buffer.nbytes, buffer.dtype.name) == (n_bytes, "uint8")
    buffer[:] = 7
    assert (buffer == 7).all()


def test_memory_that_cannot_be_had_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        state_buffer(1 << 60)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_full_cache_takes_no_more_memory_when_conversations_become_longer() -> None:
    """From malloc, what one had left was too small for the next: it came to twice the cache."""
    cache = HostCache(16 * MIB, lambda _saved, _used_at: None)
    others = []  # what else lives in the heap, and keeps it from shrinking

    def keep(n_tokens: int, used_at: float) -> None:
        assert cache.make_room(n_tokens * TOKEN_BYTES)
        data = state_buffer(n_tokens * TOKEN_BYTES)
        data[:] = 1
        cache.add(Saved(Run(), KvState(data, False, "f")), used_at)
        others.append(bytes(8000))

    for n in range(40):
        keep(160, n)
    before = resident_bytes() - cache.n_bytes
    for n in range(400):
        keep(161 + n // 60, 100 + n)
    assert resident_bytes() - cache.n_bytes - before < 400 * 8000 + 2 * MIB
