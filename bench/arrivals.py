"""When requests arrive that know nothing of each other."""

import random
from collections.abc import Iterator


def poisson(rate: float, seconds: float, seed: str) -> Iterator[float]:
    """Times of arrivals at random, `rate` a second on average."""
    chance = random.Random(seed)
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(rate)) < seconds:
        yield at_s


def evenly(rate: float, seconds: float) -> Iterator[float]:
    """Times of arrivals at equal distances."""
    return (n / rate for n in range(int(rate * seconds)))
