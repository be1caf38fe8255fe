"""Shares: how many places each tenant has, and who has most."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_ingress.shares import Shares


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), max_size=60), st.integers(0, 5))
def test_the_counts_are_those_of_what_was_taken_and_given_back(
    moves: list[tuple[str, bool]], n_places: int
) -> None:
    shares, expected = Shares(), Counter[str]()
    for tenant, is_taken in moves:
        if is_taken:
            shares.take(tenant)
            expected[tenant] += 1
        elif expected[tenant]:
            shares.give_back(tenant)
            expected[tenant] -= 1
    assert {tenant: shares.of(tenant) for tenant in "abcde"} == {t: expected[t] for t in "abcde"}
    above = list(shares.above(n_places))
    assert sorted(above) == sorted(tenant for tenant in "abcde" if expected[tenant] > n_places)
    assert [expected[tenant] for tenant in above] == sorted((expected[t] for t in above), reverse=True)


def test_a_place_is_not_given_back_that_was_never_taken() -> None:
    with pytest.raises(AssertionError, match="never taken"):
        Shares().give_back("a")
