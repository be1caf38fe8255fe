"""Who gets which lane: the queue of waiting lanes per model, the choice among workers with credit, and whose
lane gives way when no place is left.

Owns: the order of the waiting lanes, and the names models go by. Decides, and acts on nothing.
Called by: `placement.py`, which claims what is chosen here.

Order within a model: lanes that come back from a worker first, oldest first; then tenants in turn, and first
come first served within a tenant. A lane whose conversation a worker holds lets others pass it for a while,
until that worker has room. Taking the next fresh lane costs the same however many wait; only new sessions
without a budget are gone over one by one.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter

from llm_ingress.affinity import weight_of
from llm_ingress.lanes import Lane
from llm_ingress.leases import WorkerView
from llm_ingress.limits import Budgets, Limits, Session, session_of
from llm_ingress.shares import Shares
from llm_ingress.wire import ModelCard

by_admission = attrgetter("id")

# Lanes of a model that wait for their holders while others have room: each of these has to be passed over.
WAITS_MAX = 64
# Of a worker's load: what its sessions count, and what its KV.
SESSIONS_WEIGHT, KV_WEIGHT = 0.6, 0.4
ONE_LANE = 1 + 1e-9  # however a part of a worker's slots is rounded


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


def is_held_by(lane: Lane, worker: WorkerView) -> bool:
    """Whether the worker has the conversation that a lane goes on with."""
    return lane.preference is not None and lane.preference.worker_id == worker.id


def choose_worker(
    able: Sequence[WorkerView], favourite: WorkerView | None, budgets: Budgets
) -> WorkerView | None:
    """Return which of these to grant a lane to that none of them holds the conversation of.

    1. None that is fuller than another by more than one lane.
    2. The favourite of the conversation, so that its next turn finds it again by whatever ingress it comes.
    3. The least loaded; of several that with most room, and of these the least used so far.
    """
    least = min(map(_fullness, able), default=0.0)
    level = [worker for worker in able if _fullness(worker) - least <= ONE_LANE / worker.n_slots]  # 1
    if favourite in level:  # 2
        return favourite
    return min(level, key=lambda w: (load_of(w, budgets), -w.credit, w.n_granted), default=None)  # 3


def favourite_of(lane: Lane, workers: Iterable[WorkerView]) -> WorkerView | None:
    """Return the worker that every ingress would give a conversation to, had it room."""
    conversation = lane.request.conversation
    if conversation is None:
        return None
    could = (worker for worker in workers if suits(worker, lane))
    return max(could, key=lambda worker: weight_of(conversation.anchor, worker.name), default=None)


def load_of(worker: WorkerView, budgets: Budgets) -> float:
    """Return how much a worker keeps, by its own account: 1 where it is as much as one may."""
    beat = worker.heartbeat
    if beat is None:
        return 0.0
    sessions = beat.sessions / budgets.max_sessions_per_worker
    return SESSIONS_WEIGHT * sessions + KV_WEIGHT * beat.kv_bytes / budgets.kv_bytes_per_worker


def _session_of(lane: Lane) -> Session | None:
    return session_of(lane.request.tenant, lane.request.conversation)


def _fullness(worker: WorkerView) -> float:
    """Its lanes, those of other ingresses too, by its slots."""
    of_all = worker.heartbeat.inflight if worker.heartbeat else 0
    return max(len(worker.held), of_all) / worker.n_slots


class ModelQueue:
    """The lanes that wait for one model."""

    def __init__(self) -> None:
        self._returned: list[Lane] = []  # by admission
        self._tenants: OrderedDict[str, OrderedDict[int, Lane]] = OrderedDict()
        self._waits: dict[int, float] = {}  # until when a lane waits for its holder, once others have room

    def __bool__(self) -> bool:
        """Whether any lane waits here."""
        return bool(self._returned or self._tenants)

    def __iter__(self) -> Iterator[Lane]:
        """Go over the waiting lanes, those that came back first."""
        return chain(self._returned, self._fresh())

    def park(self, lane: Lane) -> None:
        """Append a fresh lane to its tenant's; a tenant that had none goes behind the others."""
        self._tenants.setdefault(lane.request.tenant, OrderedDict())[lane.id] = lane

    def put_back(self, lane: Lane) -> None:
        """Put a lane that comes back ahead of all fresh ones, in the order of admission among its like."""
        insort(self._returned, lane, key=by_admission)

    def withdraw(self, lane: Lane) -> None:
        """Take a lane out."""
        self._waits.pop(lane.id, None)
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

    def pop_for(self, worker: WorkerView, limits: Limits, now: float) -> Lane | None:
        """Take out the lane whose turn it is among those this worker can take."""
        may_go = partial(self._may_go, worker, limits, now)
        lane = next(filter(may_go, self._returned), None)
        if lane is None:
            lane = next(filter(may_go, self._fresh()), None)
            if lane is not None:
                self._tenants.move_to_end(lane.request.tenant)
        if lane is not None:
            self.withdraw(lane)
        return lane

    def waits(self, lane: Lane, now: float) -> bool:
        """Whether a lane waits for its holder yet; the first time that another has room, its wait begins."""
        preference = lane.preference
        if preference is None or not preference.wait_s:
            return False
        if lane.id not in self._waits:
            if len(self._waits) >= WAITS_MAX:
                return False
            self._waits[lane.id] = now + preference.wait_s
        return now < self._waits[lane.id]

    def stop_waiting(self, lane: Lane) -> None:
        """A lane goes to a worker, or has no holder to wait for any more."""
        self._waits.pop(lane.id, None)

    def _may_go(self, worker: WorkerView, limits: Limits, now: float, lane: Lane) -> bool:
        if not (can_take(worker, lane) and limits.admits(worker, _session_of(lane))):
            return False
        return is_held_by(lane, worker) or not self.waits(lane, now)

    def _fresh(self) -> Iterator[Lane]:
        return chain.from_iterable(lanes.values() for lanes in self._tenants.values())


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

    def let_go(self, lane: Lane) -> None:
        """Let a waiting lane go anywhere: who held its conversation is nobody to wait for any more."""
        lane.preference = None
        self._queues[lane.model].stop_waiting(lane)

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

    def choose(
        self, lane: Lane, workers: Sequence[WorkerView], limits: Limits, now: float
    ) -> WorkerView | None:
        """Return the worker to grant a lane to at once: who holds its conversation, or any when it need not
        wait for that one; None if it is to wait."""
        queue, session = self._queues[lane.model], _session_of(lane)
        able = [w for w in workers if can_take(w, lane) and limits.has_room(w) and limits.admits(w, session)]
        chosen = next((worker for worker in able if is_held_by(lane, worker)), None)
        if chosen is None and able and not queue.waits(lane, now):
            chosen = choose_worker(able, favourite_of(lane, workers), limits.budgets)
        if chosen is not None:
            queue.stop_waiting(lane)
        return chosen

    def pop_for(self, worker: WorkerView, limits: Limits, now: float) -> Lane | None:
        """Take out the next lane for a worker; None if it has no room or nothing it can take waits."""
        queue = self._queues[worker.card.name]
        if worker.credit == 0 or not worker.is_able or not queue or not limits.has_room(worker):
            return None
        return queue.pop_for(worker, limits, now)
