"""The delays between attempts to reach an ingress."""

import random

from llm_worker.backoff import FIRST_S, LONGEST_S, Backoff


def test_the_bound_of_the_delays_doubles_until_it_is_reached_and_stays() -> None:
    backoff = Backoff(chance=lambda: 1.0)
    assert [backoff.next_s() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_connection_that_lasted_begins_anew() -> None:
    backoff = Backoff(chance=lambda: 1.0)
    for _ in range(5):
        backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == FIRST_S


def test_a_hundred_workers_that_lost_one_ingress_come_back_spread_over_the_whole_delay() -> None:
    chance = random.Random(7).random
    fleet = [Backoff(chance) for _ in range(100)]
    for n_attempts in range(6):
        delays = sorted(backoff.next_s() for backoff in fleet)
        bound_s = min(LONGEST_S, FIRST_S * 2**n_attempts)
        in_each_tenth = [sum(d * 10 // bound_s == tenth for d in delays) for tenth in range(10)]
        assert max(in_each_tenth) <= 25
        assert min(in_each_tenth) >= 1


def test_a_refused_worker_stays_away_as_long_as_it_was_asked_and_a_little_longer_by_chance() -> None:
    assert Backoff(chance=lambda: 0.0).after_refusal_s(30.0) == 30.0
    assert Backoff(chance=lambda: 1.0).after_refusal_s(30.0) == 45.0
