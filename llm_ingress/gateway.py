"""The gateway: the one mutator of lanes and leases, between the clients' side and the workers' side.

Owns: the lane pool, the leases and the queues, and the rule that each lane ends in exactly one way.
Called by: the HTTP surface (client side), a ring's near end (worker side), and a timer (`tick`), all on one
event loop. Synchronous and pure: its clock is a parameter, it does no I/O and never logs.
"""

import random
import time
from collections.abc import Callable, Mapping

from llm_ingress.bounds import GatewayConfig, hopeless, overdue
from llm_ingress.dispatch import Dispatch, choose_worker, suits
from llm_ingress.errors import ProtocolFault, RefusalReason, Refused, UnknownModel, WorkerRefused
from llm_ingress.lanes import Lane, LanePool, LaneRequest, LaneState, Outcome, OutcomeReason
from llm_ingress.leases import Leases, WorkerLink, WorkerView
from llm_ingress.snapshot import GatewaySnapshot, WorkerSnapshot, snapshot_of
from llm_ingress.wire import End, Fail, Grant, Head, Heartbeat, Hello, LaneRef, ModelCard, RefusedFor

__all__ = [
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
}

# Looked at in one tick. More would hold up the event loop for longer than a refusal may take, so where more
# are open, each has its turn once in several ticks.
LANES_PER_TICK = 1000

# What a worker may have under way when its lane is paused, a whole answer in one piece included.
OVERRUN_BYTES = 16 * 1024 * 1024


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
        self._pool = LanePool(config.ring_streams)
        self._leases = Leases(timeout_s=config.heartbeat_timeout_s, interval_s=config.heartbeat_interval_s)
        self._dispatch = Dispatch()
        self._is_draining = False
        self._n_dropped_frames = 0

    # The clients' side.

    def open_lane(self, request: LaneRequest, on_change: Callable[[], None]) -> Lane:
        """Admit a request, and grant it at once if a worker has room.

        `on_change` is called whenever the head, bytes or the end arrived; it must not call back in here.

        With every place taken, a tenant that has fewer than another gets one of that one's.

        Raises: Refused while draining, before the first worker ever attached, or if no place is to be had;
            UnknownModel if nobody ever served the model.
        """
        model = self._admit(request)
        now = self._clock()
        lane = self._pool.open(request, model=model, on_change=on_change, now=now)
        if not self._grant_at_once(lane, now):
            self._dispatch.park(lane)
            self._watch(lane, now)
        return lane

    def take(self, lane: Lane) -> bytes:
        """Return all unread bytes of a lane, and let its worker go on if it was paused."""
        data = lane.take()
        if lane.is_paused:
            lane.resume(self._clock())
            holder = self._leases.holder_of(lane)
            if holder is not None:
                holder.link.resume(lane.ref)
        return data

    def leave(self, lane: Lane) -> None:
        """The client is gone, or has everything: end the lane if it still runs, forget what is unread."""
        if lane.is_open:
            self._end(lane, Outcome(state=LaneState.CANCELLED, reason=OutcomeReason.CLIENT_LEFT))
        lane.take()

    # The workers' side. A frame of an unknown worker, of an old claim, or of a lane that the worker does not
    # hold is dropped and counted: each is what a lost lease or a cancel leaves behind on the way.

    def attach(self, hello: Hello, link: WorkerLink, *, identity: str | None = None) -> int:
        """Take in a worker; the number returned is its name in every other call.

        Of one `identity` one connection is attached. The same instance takes its own place at once; another
        does if it says so, or once the first one's lease has ended.

        Raises: WorkerRefused for a duplicate.
        """
        if identity is not None:
            self._make_room(identity, hello)
        now = self._clock()
        self._dispatch.learn(hello.model)
        worker = self._leases.attach(hello, link, now, identity=identity)
        self._watch_company(now)
        return worker.id

    def credit(self, worker_id: int, n: int, seen: int) -> None:
        """Replace a worker's offer: it takes `n` lanes beyond the first `seen` granted since it attached.

        Raises: ProtocolFault if it has seen more lanes than were granted.
        """
        worker = self._hear(worker_id)
        if worker is not None:
            worker.note_idle_frame()
            worker.offer(n, seen)
            self._serve(worker)

    def head(self, worker_id: int, ref: LaneRef, head: Head) -> None:
        """Begin the answer, or begin to continue it.

        Raises: ProtocolFault if this claim has already sent its head.
        """
        lane = self._hear_of(worker_id, ref)
        if lane is None:
            return
        if lane.state is not LaneState.CLAIMED:
            raise ProtocolFault(f"a second head for lane {lane.id}")
        if lane.head is not None and lane.head.status != head.status:
            # The client may have read the first status: an answer of another kind cannot follow it.
            message = f"the answer began with status {lane.head.status} and cannot go on with {head.status}"
            self._end(
                lane, Outcome(state=LaneState.FAILED, reason=OutcomeReason.WORKER_FAILED, message=message)
            )
        else:
            lane.move(LaneState.STREAMING)
            lane.head = lane.head or head
        lane.on_change()

    def body(self, worker_id: int, ref: LaneRef, data: bytes, progress: bytes) -> None:
        """Append answer bytes with the progress they stand for: both, or neither.

        Progress may come before the head, bytes may not.

        Raises: ProtocolFault for bytes before the head, or long after the lane was paused.
        """
        lane = self._hear_of(worker_id, ref)
        if lane is None:
            return
        if data and lane.state is not LaneState.STREAMING:
            raise ProtocolFault(f"answer bytes before the head of lane {lane.id}")
        lane.append(data, progress)
        if lane.unread + len(lane.progress) > self.config.response_buffer_bytes:
            self._relieve(lane)
        if data:
            lane.on_change()
        elif not (progress and lane.keeps_progress):
            self._note_idle_frame(worker_id)

    def end(self, worker_id: int, ref: LaneRef, end: End) -> None:
        """Complete the answer.

        Raises: ProtocolFault if it has not begun.
        """
        lane = self._hear_of(worker_id, ref)
        if lane is None:
            return
        if lane.state is not LaneState.STREAMING:
            raise ProtocolFault(f"the end of lane {lane.id} before its head")
        self._close(lane, Outcome(state=LaneState.DONE, reason=OutcomeReason.FINISHED, end=end))
        lane.on_change()

    def fail(self, worker_id: int, ref: LaneRef, fail: Fail) -> None:
        """Fail the answer, or try it again if the worker thinks that may help."""
        lane = self._hear_of(worker_id, ref)
        if lane is None:
            return
        if fail.retryable:
            lane.attempts += 1
            self._leases.decline(lane)
            self._take_back(lane, fail.message)
            return
        self._close(
            lane, Outcome(state=LaneState.FAILED, reason=OutcomeReason.WORKER_FAILED, message=fail.message)
        )
        lane.on_change()

    def release(self, worker_id: int, ref: LaneRef) -> None:
        """Give a lane back unfinished: to the head of the queue, not to this worker until its next credit."""
        lane = self._hear_of(worker_id, ref)
        if lane is not None:
            self._leases.decline(lane)
            self._take_back(lane, "its worker gave it back")

    def heartbeat(self, worker_id: int, heartbeat: Heartbeat) -> None:
        """Renew a worker's lease and note its capacity."""
        worker = self._hear(worker_id)
        if worker is not None:
            worker.note_idle_frame()
            worker.heartbeat = heartbeat

    def draining(self, worker_id: int) -> None:
        """Give a worker no more lanes; it finishes those it holds."""
        worker = self._hear(worker_id)
        if worker is not None:
            worker.is_draining = True
            self._watch_company(self._clock())

    def detach(self, worker_id: int, why: str) -> None:
        """Forget a worker; what it held goes back to the head of the queue."""
        worker = self._leases.get(worker_id)
        if worker is not None:
            worker.is_live = False
            self._lose(worker, why)
            self._leases.detach(worker_id)

    # Time, drain, facts.

    def tick(self) -> None:
        """Act on what time alone decides; called several times a second.

        1. A worker silent past its lease loses its lanes; it is told to drop them, should it wake.
        2. A worker that is not worth its connection loses that too.
        3. A lane past one of its limits ends, when its turn has come to be looked at.
        """
        now = self._clock()
        self._leases.allow_idle_frames(now)
        for worker in self._leases.expire(now):  # 1
            for lane in worker.held.values():
                worker.link.cancel(lane.ref)
            self._lose(worker, f"nothing heard from its worker for {self.config.heartbeat_timeout_s:g} s")
        for worker, why in self._leases.at_fault(now, claim_timeout_s=self.config.claim_timeout_s):  # 2
            self._dismiss(worker, why)
        contended = self._dispatch.contended()
        for lane in self._pool.visit(LANES_PER_TICK):  # 3
            outcome = overdue(lane, now, self.config, is_contended=lane.model in contended)
            if outcome is not None:
                self._end(lane, outcome)
                lane.on_change()

    def drain(self) -> None:
        """Refuse new lanes from now on; those open go on."""
        self._is_draining = True

    def fail_open_lanes(self, message: str) -> None:
        """End whatever is still open, past the drain's limit."""
        outcome = Outcome(state=LaneState.FAILED, reason=OutcomeReason.DRAIN_ENDED, message=message)
        for lane in tuple(self._pool.lanes()):
            self._end(lane, outcome)
            lane.on_change()

    @property
    def is_idle(self) -> bool:
        """Whether no lane is open."""
        return self._pool.n_open == 0

    def models(self) -> tuple[ModelCard, ...]:
        """Return the models live workers serve, one card a name, each with every alias that leads to it."""
        return self._dispatch.catalogue(worker.card for worker in self._leases if worker.is_live)

    def resolve(self, model: str) -> bool:
        """Whether anybody ever served a model of this name or alias."""
        return self._dispatch.name_of(model) is not None

    def retry_after_s(self, reason: RefusalReason) -> int:
        """Return whole seconds, spread so that those refused together do not come back together."""
        return round(RETRY_AFTER_S[reason] * (1 + self._chance()))

    def snapshot(self) -> GatewaySnapshot:
        """Return the ring as it is now."""
        now = self._clock()
        lanes = self._pool.n_by_state()
        return GatewaySnapshot(
            workers=tuple(snapshot_of(worker, now) for worker in self._leases),
            lanes=lanes,
            accepted=self._pool.n_accepted,
            finished=lanes[LaneState.DONE],
            cancelled=lanes[LaneState.CANCELLED],
            failed=lanes[LaneState.FAILED] + lanes[LaneState.EXPIRED],
            open=self._pool.n_open,
            dropped_frames=self._n_dropped_frames,
            ring_streams=self.config.ring_streams,
            draining=self._is_draining,
        )

    # Admission and grants.

    def _admit(self, request: LaneRequest) -> str:
        """Return the canonical name of the model if a lane may be opened, with a place free for it."""
        if self._is_draining:
            raise self._refusal(RefusalReason.DRAINING, "the server is shutting down")
        if not self._dispatch.knows_any:
            raise self._refusal(RefusalReason.NO_WORKERS, "no worker has attached yet")
        name = self._dispatch.name_of(request.model)
        if name is None:
            raise UnknownModel(request.model)
        if self._pool.is_full and not self._displace_for(request.tenant):
            raise self._refusal(RefusalReason.RING_FULL, f"all {self.config.ring_streams} lanes are taken")
        return name

    def _displace_for(self, tenant: str) -> bool:
        """Free a place for a tenant, if one that has more can spare a lane that waits."""
        lane = self._dispatch.gives_way(tenant, self._pool.shares)
        if lane is None:
            return False
        message = f"all {self.config.ring_streams} lanes are taken, and others have fewer of them"
        self._end(lane, Outcome(state=LaneState.EXPIRED, reason=OutcomeReason.DISPLACED, message=message))
        lane.on_change()
        return True

    def _refusal(self, reason: RefusalReason, message: str) -> Refused:
        return Refused(reason, self.retry_after_s(reason), message)

    def _grant_at_once(self, lane: Lane, now: float) -> bool:
        worker = choose_worker(lane, self._leases)
        if worker is not None:
            self._grant(worker, lane, now)
        return worker is not None

    def _serve(self, worker: WorkerView) -> None:
        """Grant a worker what waits, as far as its credit goes."""
        while (lane := self._dispatch.pop_for(worker)) is not None:
            self._grant(worker, lane, self._clock())

    def _grant(self, worker: WorkerView, lane: Lane, now: float) -> None:
        limit_s = self.config.request_timeout_s
        request = lane.request
        worker.link.grant(
            Grant(
                ref=self._leases.claim(worker, lane, now),
                path=request.path,
                body=request.body,
                request_id=request.request_id,
                queued_ms=lane.waited_s(now) * 1000,
                remaining_s=None if limit_s is None else lane.opened_at + limit_s - now,
                progress=bytes(lane.progress),
            )
        )

    # Frames and leases.

    def _make_room(self, identity: str, hello: Hello) -> None:
        """Let go of the earlier connection of a worker. Raises: WorkerRefused if that may not be."""
        earlier = self._leases.of_identity(identity)
        if earlier is None:
            return
        is_another = earlier.hello.instance_id != hello.instance_id
        if is_another and earlier.is_live and not hello.takeover:
            raise WorkerRefused(RefusedFor.DUPLICATE, f"another instance of {identity} is attached")
        self._dismiss(earlier, "a newer connection of the same worker takes its place")

    def _dismiss(self, worker: WorkerView, why: str) -> None:
        """Forget a worker from this side."""
        self.detach(worker.id, why)
        worker.link.close(why)

    def _hear(self, worker_id: int) -> WorkerView | None:
        """Renew a worker's lease; one that had lapsed is back, and its last offer stands."""
        worker = self._leases.get(worker_id)
        if worker is None:
            self._n_dropped_frames += 1
            return None
        worker.heard_at = now = self._clock()
        if not worker.is_live:
            worker.is_live = True
            self._watch_company(now)
            self._serve(worker)
        return worker

    def _hear_of(self, worker_id: int, ref: LaneRef) -> Lane | None:
        """Renew a worker's lease and return the lane its frame is for, if it holds it under this claim."""
        worker = self._hear(worker_id)
        if worker is None:
            return None
        lane = worker.holds(ref)
        if lane is None:
            self._n_dropped_frames += 1
            worker.note_idle_frame()
        else:
            lane.is_answered = True
        return lane

    def _note_idle_frame(self, worker_id: int) -> None:
        worker = self._leases.get(worker_id)
        if worker is not None:
            worker.note_idle_frame()

    def _relieve(self, lane: Lane) -> None:
        """Bring a lane's buffers back to their bound.

        Progress that fills it alone is given up; otherwise the worker waits until the client has read.
        """
        bound = self.config.response_buffer_bytes
        if lane.unread > bound + OVERRUN_BYTES:
            raise ProtocolFault(f"{lane.unread} bytes unread in lane {lane.id}, which is paused")
        if len(lane.progress) > bound:
            lane.give_up_progress()
        holder = self._leases.holder_of(lane)
        if holder is not None and not lane.is_paused and lane.unread + len(lane.progress) > bound:
            lane.pause(self._clock())
            holder.link.pause(lane.ref)

    # Ends, and lanes that come back.

    def _end(self, lane: Lane, outcome: Outcome) -> None:
        """End a lane from this side; whoever holds it is told to drop it."""
        holder = self._leases.holder_of(lane)
        self._close(lane, outcome)
        if holder is not None:
            holder.link.cancel(lane.ref)

    def _close(self, lane: Lane, outcome: Outcome) -> None:
        """End a lane: out of its queue or its worker's hands, its place given back."""
        was_waiting = lane.state is LaneState.WAITING
        self._pool.end(lane, outcome)
        if was_waiting:
            self._dispatch.withdraw(lane)
        else:
            self._leases.release(lane)

    def _lose(self, worker: WorkerView, why: str) -> None:
        """Place again all that a worker held which is gone."""
        self._watch_company(self._clock())
        for lane in tuple(worker.held.values()):
            lane.attempts += 1
            self._take_back(lane, why)

    def _take_back(self, lane: Lane, why: str) -> None:
        """Take a lane from its worker and place it again, or end it if another claim is no use."""
        outcome = hopeless(lane, self.config, why)
        if outcome is not None:
            self._close(lane, outcome)
            lane.on_change()
            return
        now = self._clock()
        lane.wait_again(now)
        self._leases.release(lane)
        if not self._grant_at_once(lane, now):
            self._dispatch.put_back(lane)
            self._watch(lane, now)

    def _watch_company(self, now: float) -> None:
        """Note, after workers came or went, since when each waiting lane has nobody to hope for."""
        for lane in self._dispatch.waiting():
            self._watch(lane, now)

    def _watch(self, lane: Lane, now: float) -> None:
        if any(suits(worker, lane) for worker in self._leases):
            lane.alone_since = None
        elif lane.alone_since is None:
            lane.alone_since = now
