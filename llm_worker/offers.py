"""How a worker's free slots are offered to several rings: few of them twice, none to nobody.

A slot offered to two rings may be granted by both, and one of the two requests goes back. One offered to a
single ring lies idle if that ring has no request. Rings do not say what waits in them; what they grant, and
leave, tells it: a ring whose last grant had waited has more waiting, until it leaves an offer unused for
longer than a message takes there and back; and one that has granted just now is likely to do so again.

Pure. Called by: `worker.py`, which keeps a `Demand` for each ring.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

# For a message there and back, on a busy machine too: what is withdrawn sooner may have been granted by then.
# A slot may be kept from others for so long.
PATIENCE_S = 0.3


@dataclass(slots=True, eq=False)
class Demand:
    """What a ring is offered, and taken to want. Times are monotonic seconds."""

    n_offered: int = 0  # what its ingress believes it may still grant
    is_pressing: bool = False  # requests wait in it
    turn: int = 0  # of its last grant, among those of all rings
    granted_at: float | None = None
    idle_since: float | None = None  # its last grant, or when it last had its first offer; None before that

    def granted(self, *, had_waited: bool, turn: int, now: float) -> None:
        """Note a grant."""
        self.n_offered = max(0, self.n_offered - 1)
        self.is_pressing = had_waited
        self.turn = turn
        self.granted_at = self.idle_since = now

    def gave_back(self) -> None:
        """Note that a lane was given back to it, and waits there now."""
        self.is_pressing = True

    def offer(self, n: int, now: float) -> bool:
        """Note what it is offered from now on; return whether that is news to it."""
        is_news = n != self.n_offered
        if n > 0 and self.n_offered == 0:
            self.idle_since = now
        self.n_offered = n
        return is_news

    def is_contending(self, now: float) -> bool:
        """Whether it is likely to use at once what it is offered."""
        is_recent = self.granted_at is not None and now - self.granted_at < PATIENCE_S
        return self.is_pressing or is_recent

    def is_leaving(self, now: float) -> bool:
        """Whether it leaves an offer unused."""
        return self.n_offered > 0 and self.idle_since is not None and now - self.idle_since >= PATIENCE_S


def share_out(n_free: int, demands: Sequence[Demand], now: float) -> list[int]:
    """Return how many of the free slots to offer to each ring, in their order.

    1. What is offered stands while it is neither less nor more than what is free: part of it may be on its
       way here as grants. It is moved to a ring that never had anything, and, from rings that leave it
       unused, to one that has run out.
    2. Where several rings are likely to use what they are offered, each slot is offered to one of them, the
       odd ones to those whose turn was longest ago. Any other is offered one slot, lest a request that comes
       to it wait for ever.
    3. Else a ring with requests waiting is offered everything; those that may have one at any time are
       offered equal parts, and the last slot all of them.
    """
    for demand in demands:
        if demand.is_leaving(now):
            demand.is_pressing = False
    offered = [demand.n_offered for demand in demands]
    parts = _parts(n_free, demands, now)
    if n_free <= sum(offered) <= max(n_free, sum(parts)) and not _may_move(demands, parts, now):  # 1
        return offered
    return parts


def _may_move(demands: Sequence[Demand], parts: Sequence[int], now: float) -> bool:
    """Whether a ring without an offer should have part of what others have."""
    lacking = [demand for demand, part in zip(demands, parts, strict=True) if part and not demand.n_offered]
    if any(demand.idle_since is None for demand in lacking):
        return True
    return bool(lacking) and all(demand.is_leaving(now) for demand in demands if demand.n_offered)


def _parts(n_free: int, demands: Sequence[Demand], now: float) -> list[int]:
    """Return each ring's part, whatever it was offered before."""
    contending = [demand for demand in demands if demand.is_contending(now)]
    at_least = min(1, n_free)
    if len(contending) > 1:  # 2
        parts = _in_turn(n_free, contending)
        return [parts.get(id(demand), at_least) for demand in demands]
    parts = _in_turn(n_free, demands)
    return [n_free if demand.is_pressing else max(at_least, parts[id(demand)]) for demand in demands]  # 3


def _in_turn(n_free: int, demands: Sequence[Demand]) -> dict[int, int]:
    """Return equal parts, the odd ones for those whose turn was longest ago; by the demand's identity."""
    base, n_odd = divmod(n_free, max(1, len(demands)))
    by_turn = sorted(demands, key=attrgetter("turn"))
    return {id(demand): base + (place < n_odd) for place, demand in enumerate(by_turn)}
