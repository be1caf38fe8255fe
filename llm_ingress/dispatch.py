"""Who gets which lane: the queue of waiting lanes per model, the choice among workers with credit, and whose
lane gives way when no place is left.

Owns: the order of the waiting lanes, and the names models go by. Decides, and acts on nothing.
Called by: `placement.py`, which claims what is chosen here.

Order within a model: lanes that come back from a worker first, oldest first; then tenants in turn, and first
come first served within a tenant. Taking the next fresh lane costs the same however many wait.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from operator import attrgetter

from llm_ingress.lanes import Lane
from llm_ingress.leases import WorkerView
from llm_ingress.shares import Shares
from llm_ingress.wire import ModelCard

by_admission = attrgetter("id")


def suits(worker: WorkerView, lane: Lane) -> bool:
    """Whether the worker could serve the lane, had it a free place.

    An answer that has begun can only be continued where the same tokens give the same text.
    """
    return (
        worker.is_able
        and worker.card.name == lane.model
        and (not lane.progress or worker.card.fingerprint == lane.fingerprint)
    )


def can_take(worker: WorkerView, lane: Lane) -> bool:
    """Whether the worker may be granted the lane now."""
    return worker.credit > 0 and lane.id not in worker.declined and suits(worker, lane)


def choose_worker(lane: Lane, workers: Iterable[WorkerView]) -> WorkerView | None:
    """Return the worker to grant a lane to: the one with most room, of several the least used so far."""
    able = [worker for worker in workers if can_take(worker, lane)]
    return max(able, key=lambda worker: (worker.credit, -worker.n_granted), default=None)


class ModelQueue:
    """The lanes that wait for one model."""

    def __init__(self) -> None:
        self._returned: list[Lane] = []  # by admission
        self._tenants: OrderedDict[str, OrderedDict[int, Lane]] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether any lane waits here."""
        return bool(self._returned or self._tenants)

    def __iter__(self) -> Iterator[Lane]:
        """Go over the waiting lanes, those that came back first."""
        return chain(self._returned, *(lanes.values() for lanes in self._tenants.values()))

    def park(self, lane: Lane) -> None:
        """Append a fresh lane to its tenant's; a tenant that had none goes behind the others."""
        self._tenants.setdefault(lane.request.tenant, OrderedDict())[lane.id] = lane

    def put_back(self, lane: Lane) -> None:
        """Put a lane that comes back ahead of all fresh ones, in the order of admission among its like."""
        insort(self._returned, lane, key=by_admission)

    def withdraw(self, lane: Lane) -> None:
        """Take a lane out."""
        place = bisect_left(self._returned, lane.id, key=by_admission)
        if place < len(self._returned) and self._returned[place] is lane:
            del self._returned[place]
            return
        tenant = lane.request.tenant
        lanes = self._tenants[tenant]
        del lanes[lane.id]
        if not lanes:
            del self._tenants[tenant]

    def newest_of(self, tenant: str) -> Lane | None:
        """Return the fresh lane of a tenant that came last."""
        lanes = self._tenants.get(tenant)
        return next(reversed(lanes.values())) if lanes else None

    def pop_for(self, worker: WorkerView) -> Lane | None:
        """Take out the lane whose turn it is among those this worker can take."""
        for place, lane in enumerate(self._returned):
            if can_take(worker, lane):
                return self._returned.pop(place)
        return self._pop_fresh() if self._tenants else None

    def _pop_fresh(self) -> Lane:
        tenant, lanes = next(iter(self._tenants.items()))
        _, lane = lanes.popitem(last=False)
        if lanes:
            self._tenants.move_to_end(tenant)
        else:
            del self._tenants[tenant]
        return lane


class Dispatch:
    """The queues of all models ever served, under every name these go by."""

    def __init__(self) -> None:
        self._queues: dict[str, ModelQueue] = {}
        self._names: dict[str, str] = {}

    @property
    def knows_any(self) -> bool:
        """Whether any model was ever served."""
        return bool(self._names)

    def learn(self, card: ModelCard) -> None:
        """Remember a model's names. Of two models that share an alias, the one that came last has it."""
        self._queues.setdefault(card.name, ModelQueue())
        self._names.update(dict.fromkeys(card.aliases, card.name))
        # A model's own name is never another's alias.
        self._names.update((name, name) for name in self._queues)

    def name_of(self, model: str) -> str | None:
        """Return the canonical name of a model; None if nobody ever served it."""
        return self._names.get(model)

    def catalogue(self, cards: Iterable[ModelCard]) -> tuple[ModelCard, ...]:
        """Return one card a model, with the aliases of all its workers; none twice, none of another model."""
        models: dict[str, ModelCard] = {}
        for card in cards:
            earlier = models.get(card.name, card)
            names = dict.fromkeys((*earlier.aliases, *card.aliases))
            aliases = tuple(name for name in names if name != card.name and self.name_of(name) == card.name)
            models[card.name] = replace(card, aliases=aliases)
        return tuple(models.values())

    def waiting(self) -> Iterator[Lane]:
        """Go over all waiting lanes."""
        return chain.from_iterable(self._queues.values())

    def contended(self) -> set[str]:
        """Return the models that lanes wait for."""
        return {name for name, queue in self._queues.items() if queue}

    def park(self, lane: Lane) -> None:
        """Queue a fresh lane."""
        self._queues[lane.model].park(lane)

    def put_back(self, lane: Lane) -> None:
        """Queue a lane that comes back from a worker, at the head."""
        self._queues[lane.model].put_back(lane)

    def withdraw(self, lane: Lane) -> None:
        """Take a waiting lane out of its queue."""
        self._queues[lane.model].withdraw(lane)

    def gives_way(self, tenant: str, shares: Shares) -> Lane | None:
        """Return the waiting lane whose place one more lane of `tenant` should have; None if none should.

        It is the newest of the tenant with most places, and only if that tenant still has no fewer without it
        than the other then has. A lane that came back from a worker keeps its place.
        """
        for richer in shares.above(shares.of(tenant) + 1):
            lanes = [lane for queue in self._queues.values() if (lane := queue.newest_of(richer))]
            if lanes:
                return max(lanes, key=by_admission)
        return None

    def pop_for(self, worker: WorkerView) -> Lane | None:
        """Take out the next lane for a worker; None if it has no credit or nothing it can take waits."""
        if worker.credit == 0 or not worker.is_able:
            return None
        return self._queues[worker.card.name].pop_for(worker)
