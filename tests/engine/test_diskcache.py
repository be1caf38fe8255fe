"""What lies on disk, as the step thread sees it: bounded, least recently used out first, never waited for."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_engine import diskcache
from llm_engine.diskcache import DiskCache, Loaded, Lost, Read, Remove, Stored, Sweep, Write, Written
from llm_engine.hostcache import KvState, Saved
from llm_engine.info import Tier
from llm_engine.prefix import Run
from tests.engine.fake_disk import FakeDisk


def saved(n_bytes: int = 10, *, checkpoint: bool = False) -> Saved:
    return Saved(Run([1, 2, 3], 3), KvState(np.zeros(n_bytes, np.uint8), checkpoint, "f"))


def filled(*used_at: float, limit_bytes: int = 100, n_bytes: int = 10) -> tuple[DiskCache, FakeDisk]:
    """A cache with one run on disk for each time of use."""
    disk = FakeDisk()
    cache = DiskCache(limit_bytes, disk.order)
    for each in used_at:
        cache.add(saved(n_bytes), each)
    settle(cache, disk)
    return cache, disk


def settle(cache: DiskCache, disk: FakeDisk) -> None:
    for outcome in disk.do():
        cache.take(outcome)


def uses(cache: DiskCache) -> list[float]:
    return sorted(used_at for _, used_at in cache.uses)


def test_the_least_recently_used_gives_its_place_to_what_was_used_later() -> None:
    cache, disk = filled(3, 1, 2, limit_bytes=30)
    cache.add(saved(), 4)
    settle(cache, disk)
    assert uses(cache) == [2, 3, 4]
    assert len(disk.files) == 3


def test_nothing_gives_its_place_to_what_was_used_before_it() -> None:
    """As at the end, when everything is put away, the last used first."""
    cache, disk = filled(3, 2, limit_bytes=20)
    cache.add(saved(), 1)
    assert disk.orders == []
    assert uses(cache) == [2, 3]


def test_what_is_larger_than_the_disk_is_not_kept() -> None:
    cache, disk = filled(1, limit_bytes=30)
    cache.add(saved(31), 2)
    assert disk.orders == []
    assert cache.n_bytes == 10


def test_a_disk_that_is_behind_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diskcache, "WRITING_BYTES", 25)
    disk = FakeDisk()
    cache = DiskCache(1000, disk.order)
    for used_at in range(4):
        cache.add(saved(), used_at)
    assert len(disk.orders) == 2  # what is beyond is lost
    settle(cache, disk)
    assert not cache.is_writing
    cache.add(saved(500), 9)  # one is taken whatever its size
    assert cache.is_writing


def test_what_is_being_read_keeps_its_place_until_it_is_back() -> None:
    cache, disk = filled(1, limit_bytes=10)
    (stored,) = cache.runs
    assert cache.recall(stored) is None
    assert cache.recall(stored) is None
    assert disk.orders == [Read(stored)]
    cache.expire(before=100)
    cache.add(saved(), 200)
    assert disk.orders == [Read(stored), Sweep()]
    back = cache.take(Loaded(stored, disk.files[stored]))
    assert back is not None
    assert back.run is stored.run
    assert cache.tier == Tier(0, 0)
    assert disk.orders[-1] == Remove(stored)


def test_what_could_not_be_written_or_read_is_forgotten() -> None:
    disk = FakeDisk(is_full=True)
    cache = DiskCache(100, disk.order)
    cache.add(saved(), 1)
    settle(cache, disk)
    assert cache.tier == Tier(0, 0)
    assert not cache.is_writing
    cache, disk = filled(1)
    cache.recall(cache.runs[0])
    cache.take(Lost(cache.runs[0]))
    assert cache.tier == Tier(0, 0)


def test_what_expired_while_it_was_written_is_removed_after_that() -> None:
    disk = FakeDisk()
    cache = DiskCache(100, disk.order)
    cache.add(saved(), 1)
    cache.expire(before=1)
    write, remove, _ = disk.orders
    assert isinstance(write, Write)
    assert remove == Remove(write.stored)
    assert cache.take(Written(write.stored)) is None
    assert cache.tier == Tier(0, 0)
    assert not cache.is_writing


def test_what_lay_there_is_found_within_the_bounds_and_numbers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk()
    found = [(Stored(number, Run([number], 1), number == 4, 10), float(number)) for number in (7, 3, 4)]
    cache = DiskCache(20, disk.order, found)
    assert disk.orders == [Remove(found[1][0])]
    assert cache.tier == Tier(1, 20)
    cache.add(saved(), 8)
    write = disk.orders[-1]
    assert isinstance(write, Write)
    assert write.stored.number == 8
    monkeypatch.setattr(diskcache, "MAX_FILES", 3)
    cache, disk = filled(1, 2, 3, 4)
    assert uses(cache) == [2, 3, 4]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=30))
def test_it_is_never_beyond_its_bound_and_no_file_is_left_behind(runs: list[tuple[int, int]]) -> None:
    cache, disk = filled(limit_bytes=100)
    for n_bytes, used_at in runs:
        cache.add(saved(n_bytes), used_at)
        assert cache.n_bytes <= 100
    settle(cache, disk)
    assert {*disk.files} == {*cache.runs}
    assert cache.n_bytes == sum(state.n_bytes for state in disk.files.values())
    numbers = [stored.number for stored in cache.runs]
    assert all(a < b for a, b in pairwise(numbers))
