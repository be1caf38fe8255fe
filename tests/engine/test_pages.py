"""What states take of the machine's memory is what they hold."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm_engine.hostcache import HostCache, KvState, Saved
from llm_engine.pages import Spare, state_buffer
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


@pytest.fixture
def spare() -> Iterator[Spare]:
    spare = Spare()
    yield spare
    spare.close()


@pytest.mark.parametrize("n_bytes", [0, 3 * MIB, 5 * MIB + 1, 7 * MIB, 100 * MIB])
def test_a_spare_buffer_is_as_long_as_was_asked_for_and_nobody_elses(spare: Spare, n_bytes: int) -> None:
    spare.take(5 * MIB)
    taken = []
    for number in range(3):
        spare.settle()
        taken.append(spare.take(n_bytes))
        taken[-1][:] = number
    assert [buffer.nbytes for buffer in taken] == [n_bytes] * 3
    assert all((buffer == number).all() for number, buffer in enumerate(taken))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_pages_of_a_spare_buffer_are_there_and_no_more_than_it_has(spare: Spare) -> None:
    spare.take(20 * MIB)
    spare.settle()
    before = resident_bytes()
    taken = spare.take(16 * MIB)
    spare.settle()  # 25 MiB for the next
    beside = resident_bytes()
    taken[:] = 1
    assert resident_bytes() - beside < MIB
    assert abs(beside - before - 16 * MIB) < 3 * MIB  # the one before had 25 as well


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
