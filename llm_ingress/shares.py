"""Who has how many of the ring's places: what decides whose lane gives way when all are taken.

Owns: the number of open lanes of each tenant, kept so that the tenants with most are found without a look at
all. Pure. Called by: `lanes.py`, which counts; `dispatch.py`, which asks.
"""

from collections.abc import Iterator


class Shares:
    """The places of each tenant that has any."""

    def __init__(self) -> None:
        self._n_places: dict[str, int] = {}
        self._tenants: dict[
            int, dict[str, None]
        ] = {}  # by their number of places; those as in a set, in order

    def of(self, tenant: str) -> int:
        """Return how many places a tenant has."""
        return self._n_places.get(tenant, 0)

    def above(self, n_places: int) -> Iterator[str]:
        """Go over the tenants with more places than that, most first."""
        for n in sorted((n for n in self._tenants if n > n_places), reverse=True):
            yield from self._tenants[n]

    def take(self, tenant: str) -> None:
        """Count one place more."""
        self._move(tenant, self.of(tenant) + 1)

    def give_back(self, tenant: str) -> None:
        """Count one place less."""
        assert tenant in self._n_places, "a place given back that was never taken"
        self._move(tenant, self._n_places[tenant] - 1)

    def _move(self, tenant: str, n_places: int) -> None:
        before = self._n_places.pop(tenant, 0)
        if before:
            level = self._tenants[before]
            del level[tenant]
            if not level:
                del self._tenants[before]
        if n_places:
            self._n_places[tenant] = n_places
            self._tenants.setdefault(n_places, {})[tenant] = None
