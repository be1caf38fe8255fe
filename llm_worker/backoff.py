"""How long to stay away from an ingress that cannot be had.

Pure: chance is a parameter. Called by: `remote.py`.
"""

from collections.abc import Callable

FIRST_S = 0.5
LONGEST_S = 5.0
REFUSED_SPREAD = 0.5


class Backoff:
    """The delays between attempts: they grow to a bound, and are spread over their whole length.

    So a hundred workers that lost one ingress together do not come back to it together.
    """

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._bound_s = FIRST_S

    def reset(self) -> None:
        """The ingress was there: begin anew at the next loss."""
        self._bound_s = FIRST_S

    def next_s(self) -> float:
        """Return the delay before the next attempt."""
        delay_s = self._bound_s * self._chance()
        self._bound_s = min(LONGEST_S, 2 * self._bound_s)
        return delay_s

    def after_refusal_s(self, retry_after_s: float) -> float:
        """Return the delay an ingress asked for, or up to half as much again."""
        return retry_after_s * (1 + REFUSED_SPREAD * self._chance())
