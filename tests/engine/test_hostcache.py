"""KV in host memory: bounded, least recently used out first, and dropped when nobody uses it."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_engine.hostcache import HostCache, KvState, Saved
from llm_engine.info import Tier
from llm_engine.prefix import Run


def saved(n_bytes: int, *, checkpoint: bool = False) -> Saved:
    return Saved(Run(), KvState(np.zeros(n_bytes, np.uint8), checkpoint, "f"))


class Spilled(list[tuple[Saved, float]]):
    """What had to leave, and its last use."""

    def take(self, saved: Saved, used_at: float) -> None:
        self.append((saved, used_at))


def full(limit_bytes: int, *states: Saved, spilled: Spilled | None = None) -> HostCache:
    """A cache with these in it, used at 1, 2, 3 and so on."""
    cache = HostCache(limit_bytes, Spilled().take if spilled is None else spilled.take)
    for used_at, each in enumerate(states, start=1):
        assert cache.make_room(each.state.n_bytes)
        cache.add(each, used_at)
    return cache


def test_the_least_recently_used_is_spilled_first() -> None:
    first, second, third, spilled = saved(10), saved(10, checkpoint=True), saved(10), Spilled()
    cache = full(30, first, second, third, spilled=spilled)
    cache.touch(first, now=4.0)
    assert cache.make_room(15)
    assert (cache.runs, cache.checkpoints, cache.n_bytes) == ([first], [], 10)
    assert spilled == [(second, 2), (third, 3)]


def test_what_comes_late_but_was_used_long_ago_leaves_before_what_was_used_since() -> None:
    """As the run of a slot that was taken, after another in host memory was used."""
    cache = full(20, saved(10))
    (first,) = cache.runs
    cache.touch(first, now=5.0)
    cache.add(saved(10), used_at=2.0)
    assert cache.make_room(10)
    assert cache.runs == [first]


def test_what_never_fits_drives_nothing_out() -> None:
    cache = full(30, saved(20))
    assert not cache.make_room(31)
    assert cache.n_bytes == 20


def test_what_was_not_used_for_long_is_dropped_and_not_spilled() -> None:
    spilled = Spilled()
    cache = full(30, saved(10), saved(10, checkpoint=True), saved(10), spilled=spilled)
    cache.expire(before=2)
    assert [used_at for _, used_at in cache.uses] == [3]
    assert (cache.n_bytes, spilled) == (10, [])
    cache.expire(before=3)
    assert (cache.uses, cache.n_bytes) == ([], 0)


def test_sessions_are_counted_without_checkpoints() -> None:
    cache = full(30, saved(10), saved(10, checkpoint=True))
    assert cache.tier == Tier(n_sessions=1, n_bytes=20)
    cache.expire(before=2)
    assert cache.tier == Tier(n_sessions=0, n_bytes=0)


def test_a_cache_of_nothing_keeps_nothing() -> None:
    cache = full(0)
    assert not cache.is_on
    assert not cache.make_room(1)


@given(st.lists(st.integers(1, 40), max_size=30))
def test_it_is_never_beyond_its_bound_and_loses_nothing(sizes: list[int]) -> None:
    spilled = Spilled()
    cache = full(100, spilled=spilled)
    for used_at, n_bytes in enumerate(sizes):
        if cache.make_room(n_bytes):
            cache.add(saved(n_bytes), used_at)
        kept = [each.state.n_bytes for each in cache.runs]
        assert cache.n_bytes == sum(kept) <= 100
        assert [each.state.n_bytes for each, _ in spilled] + kept == sizes[: used_at + 1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_what_expired_goes_back_to_the_system() -> None:
    def resident_mib() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

    cache = HostCache(400 << 20, Spilled().take)
    before = resident_mib()
    for n_mib in (1, 2, 4, 8, 16) * 10:
        assert cache.make_room(n_mib << 20)
        cache.add(Saved(Run(), KvState(np.ones(n_mib << 20, np.uint8), False, "f")), used_at=1.0)
    assert resident_mib() - before > 250
    cache.expire(before=1.0)
    assert resident_mib() - before < 70  # malloc keeps up to 64 MiB for the next to come
