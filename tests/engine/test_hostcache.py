"""KV in host memory: bounded, least recently used out first."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llm_engine.hostcache import HostCache, KvState, Saved
from llm_engine.prefix import Run


def saved(n_bytes: int, *, checkpoint: bool = False) -> Saved:
    return Saved(Run(), KvState(np.zeros(n_bytes, np.uint8), checkpoint, "f"))


def test_the_least_recently_used_leaves_first() -> None:
    cache = HostCache(30)
    first, second, third = saved(10), saved(10, checkpoint=True), saved(10)
    for each in (first, second, third):
        assert cache.make_room(10)
        cache.add(each)
    cache.touch(first)
    assert cache.make_room(15)
    assert (cache.runs, cache.checkpoints, cache.n_bytes) == ([first], [], 10)


def test_what_never_fits_drives_nothing_out() -> None:
    cache = HostCache(30)
    cache.make_room(20)
    cache.add(saved(20))
    assert not cache.make_room(31)
    assert cache.n_bytes == 20


def test_a_cache_of_nothing_keeps_nothing() -> None:
    cache = HostCache(0)
    assert not cache.is_on
    assert not cache.make_room(1)


@given(st.lists(st.integers(1, 40), max_size=30))
def test_it_is_never_beyond_its_bound(sizes: list[int]) -> None:
    cache = HostCache(100)
    for n_bytes in sizes:
        if cache.make_room(n_bytes):
            cache.add(saved(n_bytes))
        assert cache.n_bytes == sum(each.state.n_bytes for each in cache.runs) <= 100
        assert cache.n_runs == len(cache.runs)
