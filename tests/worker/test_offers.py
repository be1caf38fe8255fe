"""Offers: which ring is offered how much of what is free."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_worker.offers import PATIENCE_S, Demand, share_out

LATER = 10 * PATIENCE_S


class Rings:
    """The demands of a worker's rings, told what `share_out` says. Their requests do not end."""

    def __init__(self, n_rings: int, n_free: int) -> None:
        self.demands = [Demand() for _ in range(n_rings)]
        self.n_free = n_free
        self.now = 0.0
        self._n_grants = 0
        self.share()

    @property
    def offered(self) -> list[int]:
        return [demand.n_offered for demand in self.demands]

    def share(self) -> list[int]:
        for demand, n in zip(self.demands, share_out(self.n_free, self.demands, self.now), strict=True):
            demand.offer(n, self.now)
        return self.offered

    def grant(self, ring: int, *, had_waited: bool = False) -> bool:
        """Return whether there was a slot for it."""
        self._n_grants += 1
        self.demands[ring].granted(had_waited=had_waited, turn=self._n_grants, now=self.now)
        has_slot = self.n_free > 0
        if has_slot:
            self.n_free -= 1
        else:
            self.demands[ring].gave_back()
        self.share()
        return has_slot

    def free(self, n: int = 1) -> list[int]:
        self.n_free += n
        return self.share()


def test_one_ring_is_offered_everything() -> None:
    assert Rings(1, 5).offered == [5]


@pytest.mark.parametrize(("n_free", "offered"), [(0, [0, 0]), (1, [1, 1]), (2, [1, 1]), (5, [3, 2])])
def test_rings_of_which_nothing_is_known_share_what_is_free_and_all_have_the_last(
    n_free: int, offered: list[int]
) -> None:
    assert Rings(2, n_free).offered == offered


@given(st.integers(1, 4), st.integers(0, 30), st.data())
def test_grants_within_what_was_offered_at_once_always_find_a_slot(
    n_rings: int, n_free: int, data: st.DataObject
) -> None:
    """However they cross: no grant makes the worker take back what another ring may have granted."""
    rings = Rings(n_rings, max(n_rings, n_free))
    grants = [ring for ring, n in enumerate(rings.offered) for _ in range(n)]
    for ring in data.draw(st.permutations(grants)):
        assert rings.grant(ring)
    assert rings.offered == [0] * n_rings


@given(st.integers(2, 4), st.integers(1, 20))
def test_slots_are_granted_once_and_in_turn_where_every_ring_has_requests_waiting(
    n_rings: int, n_slots: int
) -> None:
    rings = Rings(n_rings, 0)
    for ring in range(n_rings):
        rings.grant(ring, had_waited=True)  # each learns it the hard way: it goes back
    taken = []
    for _ in range(n_slots * n_rings):
        rings.free()
        offered = [ring for ring, n in enumerate(rings.offered) if n]
        assert len(offered) == 1
        taken += offered
        assert rings.grant(offered[0], had_waited=True)
    assert [taken.count(ring) for ring in range(n_rings)] == [n_slots] * n_rings


def test_the_last_slot_is_offered_in_turn_where_every_ring_has_granted_just_now() -> None:
    rings = Rings(2, 2)
    for ring in (0, 1):
        assert rings.grant(ring)
    assert rings.free() == [1, 0]
    rings.now += LATER
    assert rings.share() == [1, 1]


def test_a_ring_with_requests_waiting_is_offered_everything_beside_one_that_has_none() -> None:
    rings = Rings(2, 0)
    rings.grant(0, had_waited=True)
    assert rings.free(4) == [4, 2]


def test_a_ring_that_leaves_its_offer_unused_has_nothing_waiting() -> None:
    rings = Rings(2, 0)
    for ring in (0, 1):
        rings.grant(ring, had_waited=True)
    assert rings.free() == [1, 0]
    rings.now += PATIENCE_S / 2
    assert rings.share() == [1, 0]
    rings.now += PATIENCE_S
    assert rings.share() == [1, 1]


def test_a_ring_that_has_run_out_is_offered_what_others_leave_and_not_what_they_are_using() -> None:
    rings = Rings(2, 4)
    for _ in range(2):
        rings.grant(0)
    assert rings.offered == [0, 2]
    rings.now += LATER
    rings.grant(1)
    assert rings.offered == [0, 1], "the other one is at it"
    rings.now += LATER
    assert rings.share() == [1, 1]


def test_a_ring_that_comes_later_is_offered_its_part_at_once() -> None:
    rings = Rings(1, 4)
    rings.demands.append(Demand())
    assert rings.share() == [2, 2]


def test_beside_several_with_requests_waiting_another_is_offered_one_slot() -> None:
    rings = Rings(3, 0)
    for ring in (0, 1):
        rings.grant(ring, had_waited=True)
    assert rings.free(4) == [2, 2, 1]


def test_only_what_changes_is_news_to_a_ring() -> None:
    demand = Demand()
    assert [demand.offer(n, 0.0) for n in (2, 2, 1)] == [True, False, True]
    demand.granted(had_waited=False, turn=1, now=0.0)
    assert demand.offer(0, 0.0) is False, "its own grant has told it"
