"""How often, and how far apart, a process has to be asked to end."""

import pytest

from llm_ingress.draining import SECOND_THOUGHT_S, Drain
from tests.ingress.scripted_ring import FakeClock


def test_asked_once_it_drains() -> None:
    drain = Drain(FakeClock())
    assert not drain.begun.is_set()
    drain.ask()
    assert (drain.begun.is_set(), drain.is_urgent.is_set()) == (True, False)


@pytest.mark.parametrize("n_signals", [2, 5])
def test_signals_of_one_moment_are_one_decision(n_signals: int) -> None:
    clock = FakeClock()
    drain = Drain(clock)
    for _ in range(n_signals):
        drain.ask()
        clock.now += SECOND_THOUGHT_S / 10
    assert not drain.is_urgent.is_set()


def test_asked_again_later_it_ends_at_once() -> None:
    clock = FakeClock()
    drain = Drain(clock)
    drain.ask()
    drain.ask()
    clock.now += 2 * SECOND_THOUGHT_S
    drain.ask()
    assert drain.is_urgent.is_set()


def test_a_failure_is_a_drain_that_waits_for_nothing() -> None:
    drain = Drain(FakeClock())
    drain.fail()
    assert (drain.begun.is_set(), drain.has_failed.is_set(), drain.is_urgent.is_set()) == (True, True, False)
