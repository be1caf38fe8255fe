"""The gateway: one ingress's ring as clients, time and the operator see it; `workers` is its other side.

It and `workers.py` are the only mutators of lanes and leases, both through `placement.py`.

Owns: whether new lanes are taken. Called by: the HTTP surface, a timer (`tick`), and whoever runs the
process, on one event loop. Synchronous and pure: its clock is a parameter, it does no I/O and never logs.
"""

import random
import time
from collections.abc import Callable, Mapping

from llm_ingress.bounds import GatewayConfig, overdue
from llm_ingress.conversation import Conversation
from llm_ingress.errors import RefusalReason, Refused, UnknownModel
from llm_ingress.lanes import Lane, LaneRequest, LaneState, Outcome, OutcomeReason
from llm_ingress.leases import WorkerLink
from llm_ingress.limits import AtCap, Budgets, session_of
from llm_ingress.placement import Placement
from llm_ingress.snapshot import GatewaySnapshot, WorkerSnapshot, snapshot_of
from llm_ingress.wire import ModelCard
from llm_ingress.workers import WorkersSide

__all__ = [
    "AtCap",
    "Budgets",
    "Gateway",
    "GatewayConfig",
    "GatewaySnapshot",
    "Lane",
    "LaneRequest",
    "LaneState",
    "Outcome",
    "OutcomeReason",
    "WorkerLink",
    "WorkerSnapshot",
]

# Seconds a refused client is asked to stay away: at least this, at most twice this, spread by chance.
RETRY_AFTER_S: Mapping[RefusalReason, int] = {
    RefusalReason.RING_FULL: 2,
    RefusalReason.QUEUE_TIMEOUT: 5,
    RefusalReason.DRAINING: 5,
    RefusalReason.NO_WORKERS: 10,
    RefusalReason.SYSTEM_IN_FLIGHT_DECODE_FULL: 2,
    RefusalReason.ALL_WORKERS_DECODE_BUSY: 2,
    RefusalReason.WORKER_IN_FLIGHT_DECODE_FULL: 2,
    RefusalReason.SYSTEM_KV_CACHE_FULL: 5,
    RefusalReason.ALL_WORKERS_AT_CAPACITY: 5,
    RefusalReason.SYSTEM_SESSIONS_FULL: 15,  # they end by expiring
}
_SPENT: Mapping[RefusalReason, str] = {
    RefusalReason.NO_WORKERS: "no worker serves this model now",
    RefusalReason.SYSTEM_IN_FLIGHT_DECODE_FULL: "as many requests are being answered as may be at once",
    RefusalReason.ALL_WORKERS_DECODE_BUSY: "every worker answers as many requests as it may",
    RefusalReason.WORKER_IN_FLIGHT_DECODE_FULL: (
        "the worker of this conversation, as every other, answers as many requests as it may"
    ),
    RefusalReason.SYSTEM_KV_CACHE_FULL: "the KV of running requests is as large as it may become",
    RefusalReason.ALL_WORKERS_AT_CAPACITY: "every worker has as many sessions, or as much KV, as it may",
    RefusalReason.SYSTEM_SESSIONS_FULL: "there are as many sessions as may be at once",
}

# Looked at in one tick. More would hold up the event loop for a good part of what a refusal may take, so with
# more open there are more ticks, and with very many each has its turn less often.
LANES_PER_TICK = 100
MOST_TICK_PARTS = 10


class Gateway:
    """The ring of one ingress. Thread: event loop, every method."""

    def __init__(
        self,
        config: GatewayConfig,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.config = config
        self._clock = clock
        self._chance = chance
        self._placement = Placement(config, clock)
        self.workers = WorkersSide(self._placement)
        self._is_draining = False

    # The clients' side.

    def open_lane(
        self, request: LaneRequest, on_change: Callable[[], None], at_cap: AtCap = AtCap.PARK
    ) -> Lane:
        """Admit a request, and grant it at once if a worker has room.

        While a budget is spent it waits, or is refused, as `at_cap` says; `--at-cap` overrides that.

        `on_change` is called whenever the head, bytes or the end arrived; it must not call back in here.

        With every place taken, a tenant that has fewer than another gets one of that one's.

        Raises: Refused while draining, before the first worker ever attached, if no place is to be had, or
            over a budget; UnknownModel if nobody ever served the model.
        """
        now = self._clock()
        model = self._admit(request, self.config.at_cap or at_cap, now)
        lane = self._placement.pool.open(request, model=model, on_change=on_change, now=now)
        self._placement.place(lane, now)
        return lane

    def take(self, lane: Lane) -> bytes:
        """Return all unread bytes of a lane, and let its worker go on if it was paused."""
        data = lane.take()
        if lane.is_paused:
            lane.resume(self._clock())
            holder = self._placement.leases.holder_of(lane)
            if holder is not None:
                holder.link.resume(lane.ref)
        return data

    def leave(self, lane: Lane) -> None:
        """The client is gone, or has everything: end the lane if it still runs, forget what is unread."""
        if lane.is_open:
            outcome = Outcome(state=LaneState.CANCELLED, reason=OutcomeReason.CLIENT_LEFT)
            self._placement.end(lane, outcome)
        lane.take()

    def forget(self, tenant: str, conversation: Conversation) -> None:
        """Forget who holds a conversation that goes by a key, and count its session no more."""
        self._placement.affinity.forget(tenant, conversation)
        self._placement.forget_session(tenant, conversation)

    def spent(self, request: LaneRequest, model: str, now: float) -> RefusalReason | None:
        """Return which budget keeps a request from being granted now; None if none does."""
        placement = self._placement
        is_known = placement.preference_of(request, model, now) is not None
        return placement.limits.spent(
            model, session_of(request.tenant, request.conversation), is_known=is_known
        )

    def _admit(self, request: LaneRequest, at_cap: AtCap, now: float) -> str:
        """Return the canonical name of the model if a lane may be opened, with a place free for it."""
        if self._is_draining:
            raise self._refusal(RefusalReason.DRAINING, "the server is shutting down")
        dispatch = self._placement.dispatch
        if not dispatch.knows_any:
            raise self._refusal(RefusalReason.NO_WORKERS, "no worker has attached yet")
        name = dispatch.name_of(request.model)
        if name is None:
            raise UnknownModel(request.model)
        reason = self.spent(request, name, now) if at_cap is AtCap.REFUSE else None
        if reason is not None:
            raise self._refusal(reason, _SPENT[reason])
        if self._placement.pool.is_full and not self._displace_for(request.tenant):
            raise self._refusal(RefusalReason.RING_FULL, f"all {self.config.ring_streams} lanes are taken")
        return name

    def _displace_for(self, tenant: str) -> bool:
        """Free a place for a tenant, if one that has more can spare a lane that waits."""
        placement = self._placement
        lane = placement.dispatch.gives_way(tenant, placement.pool.shares)
        if lane is None:
            return False
        message = f"all {self.config.ring_streams} lanes are taken, and others have fewer of them"
        placement.end(lane, Outcome(state=LaneState.EXPIRED, reason=OutcomeReason.DISPLACED, message=message))
        lane.on_change()
        return True

    def _refusal(self, reason: RefusalReason, message: str) -> Refused:
        return Refused(reason, self.retry_after_s(reason), message)

    # Time and drain.

    def tick(self) -> None:
        """Act on what time alone decides; called several times a second.

        1. A worker silent past its lease is let go of; should it wake, it attaches anew.
        2. So is one that is not worth its connection.
        3. A lane past one of its limits ends, when its turn has come to be looked at.
        4. A session that nobody used for long is counted no more, and a lane that has waited long enough for
           who holds its conversation goes to any worker with room.
        """
        now = self._clock()
        placement, leases = self._placement, self._placement.leases
        leases.allow_idle_frames(now)
        for worker in leases.expire(now):  # 1
            placement.dismiss(worker, f"nothing heard from it for {self.config.heartbeat_timeout_s:g} s")
        for worker, why in leases.at_fault(now, claim_timeout_s=self.config.claim_timeout_s):  # 2
            placement.dismiss(worker, why)
        contended = placement.dispatch.contended()
        for lane in placement.pool.visit(LANES_PER_TICK):  # 3
            outcome = overdue(lane, now, self.config, is_contended=lane.model in contended)
            if outcome is not None:
                placement.end(lane, outcome)
                lane.on_change()
        placement.expire_sessions(now)  # 4
        placement.serve_all()

    def drain(self) -> None:
        """Refuse new lanes from now on; those open go on."""
        self._is_draining = True

    def fail_open_lanes(self, message: str) -> None:
        """End whatever is still open, past the drain's limit."""
        outcome = Outcome(state=LaneState.FAILED, reason=OutcomeReason.DRAIN_ENDED, message=message)
        for lane in tuple(self._placement.pool.lanes()):
            self._placement.end(lane, outcome)
            lane.on_change()

    # Facts.

    @property
    def n_tick_parts(self) -> int:
        """How many ticks there are to be in the time of one, so that each looks at few lanes only."""
        return min(MOST_TICK_PARTS, 1 + self._placement.pool.n_open // LANES_PER_TICK)

    @property
    def is_idle(self) -> bool:
        """Whether no lane is open."""
        return self._placement.pool.n_open == 0

    def models(self) -> tuple[ModelCard, ...]:
        """Return the models live workers serve, one card a name, each with every alias that leads to it."""
        return self._placement.dispatch.catalogue(worker.card for worker in self._placement.leases)

    def shared_names(self, card: ModelCard) -> dict[str, tuple[str, str | None]]:
        """Return each name that another attached model has too: with that model, and the one it leads to."""
        names = {card.name, *card.aliases}
        others = [worker.card for worker in self._placement.leases if worker.card.name != card.name]
        return {
            name: (other.name, self._placement.dispatch.name_of(name))
            for other in others
            for name in names & {other.name, *other.aliases}
        }

    @property
    def n_places_in_vain(self) -> int:
        """Lanes that the attached workers could take beyond what there may be at once."""
        config = self._placement.config
        most = config.budgets.max_in_flight_decodes_per_worker
        n_slots = [worker.n_slots for worker in self._placement.leases if worker.is_able]
        n_places = sum(n if most is None else min(n, most) for n in n_slots)
        return max(0, n_places - min(config.ring_streams, config.budgets.max_in_flight_decodes))

    def retry_after_s(self, reason: RefusalReason) -> int:
        """Return whole seconds, spread so that those refused together do not come back together."""
        return round(RETRY_AFTER_S[reason] * (1 + self._chance()))

    def snapshot(self) -> GatewaySnapshot:
        """Return the ring as it is now."""
        now = self._clock()
        pool = self._placement.pool
        lanes = pool.n_by_state()
        return GatewaySnapshot(
            workers=tuple(snapshot_of(worker, now) for worker in self._placement.leases),
            lanes=lanes,
            accepted=pool.n_accepted,
            finished=lanes[LaneState.DONE],
            cancelled=lanes[LaneState.CANCELLED],
            failed=lanes[LaneState.FAILED] + lanes[LaneState.EXPIRED],
            open=pool.n_open,
            dropped_frames=self.workers.n_dropped_frames,
            ring_streams=self.config.ring_streams,
            draining=self._is_draining,
            affinity=self._placement.affinity.facts,
            budgets=self._placement.limits.facts,
        )
