"""Who holds which lane, and until when: the attached workers as the ingress sees them.

Owns: the worker views: each worker's lanes, credit and last sign of life.
Touched by: `gateway.py`, `workers.py` and `placement.py`, on the event loop. `dispatch.py` reads the views to
choose between them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from llm_ingress.errors import ProtocolFault
from llm_ingress.lanes import Lane
from llm_ingress.wire import Grant, Heartbeat, Hello, LaneRef, ModelCard

# Frames that move nothing (offers and heartbeats beyond need, lanes it does not hold, empty bodies), and
# messages, whatever is in them. A worker may send so many in one second, or that of one second at once.
IDLE_FRAMES_PER_S = 20_000


class WorkerLink(Protocol):
    """The way to one attached worker. Nothing here may call the gateway back before it returns."""

    def grant(self, grant: Grant) -> None:
        """Hand the worker a lane."""

    def cancel(self, ref: LaneRef) -> None:
        """Tell it that nobody wants this lane from it any more."""

    def pause(self, ref: LaneRef) -> None:
        """Tell it to hold a lane whose client reads too slowly."""

    def resume(self, ref: LaneRef) -> None:
        """Tell it to go on with a paused lane."""

    def drain(self) -> None:
        """Tell it that this ingress goes away."""

    def close(self, why: str) -> None:
        """End the connection: the gateway has forgotten this worker, and hears nothing of it any more."""


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerView:
    """One attached worker."""

    id: int
    hello: Hello
    link: WorkerLink
    heard_at: float
    identity: str | None = None  # what it proved to be; None within one process
    is_live: bool = True  # False once its lease has ended, and while it is let go of
    is_draining: bool = False
    is_stuck: bool = False  # by its own account: its engine has not ended a step for long
    heartbeat: Heartbeat | None = None
    credit: int = 0  # lanes it would still take
    n_granted: int = 0  # on this connection
    n_idle_frames: float = 0.0  # that moved nothing, and messages, less what time allows
    held: dict[int, Lane] = field(default_factory=dict)
    # Given back by this worker since its last CREDIT: until the next it has no place for them.
    declined: set[int] = field(default_factory=set)

    @property
    def is_able(self) -> bool:
        """Whether it serves what it takes, now or as soon as it has room."""
        return self.is_live and not self.is_draining and not self.is_stuck

    @property
    def card(self) -> ModelCard:
        """The model it serves."""
        return self.hello.model

    @property
    def n_slots(self) -> int:
        """How many lanes it can have at once; nobody attaches who can have none, whatever it says."""
        return max(1, self.hello.max_inflight)

    @property
    def name(self) -> str:
        """What it is called by every ingress."""
        return self.identity or self.hello.worker

    def offer(self, n: int, seen: int) -> None:
        """Replace the credit: `n` lanes beyond the `seen` grants that had reached the worker when it offered.

        Raises: ProtocolFault if it claims to have seen grants that were never made.
        """
        n_unseen = self.n_granted - seen
        if n < 0 or n_unseen < 0:
            raise ProtocolFault(f"credit of {n} beyond {seen} lanes seen, of {self.n_granted} granted")
        self.credit = max(0, n - n_unseen)
        self.declined.clear()

    def note_idle_frame(self) -> None:
        """Count a frame that moved nothing. Raises: ProtocolFault if the worker floods."""
        self.n_idle_frames += 1
        if self.n_idle_frames > IDLE_FRAMES_PER_S:
            raise ProtocolFault(f"over {IDLE_FRAMES_PER_S} frames in a second that move nothing")

    def unmoved(self, before: float) -> Lane | None:
        """Return a lane that nobody told it to hold, and that it has said nothing of since then."""
        for lane in self.held.values():
            if lane.heard_at < before and not lane.is_paused:
                return lane
        return None

    def holds(self, ref: LaneRef) -> Lane | None:
        """Return the lane if this worker holds it under this very claim."""
        lane = self.held.get(ref.lane_id)
        return lane if lane is not None and lane.claim == ref.claim else None


class Leases:
    """The attached workers, and the time each may stay silent."""

    def __init__(self, *, timeout_s: float, interval_s: float) -> None:
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._workers: dict[int, WorkerView] = {}
        self._instances: dict[str, WorkerView] = {}  # the newest of each
        self._holders: dict[int, WorkerView] = {}  # by lane id
        self._n_attached = 0
        self._scanned_at: float | None = None
        self._allowed_at: float | None = None
        self._grace_until = 0.0

    def __iter__(self) -> Iterator[WorkerView]:
        """Go over the attached workers, first come first."""
        return iter(self._workers.values())

    def get(self, worker_id: int) -> WorkerView | None:
        """Return an attached worker."""
        return self._workers.get(worker_id)

    def of_identity(self, identity: str) -> WorkerView | None:
        """Return the worker attached under an identity."""
        return next((worker for worker in self if worker.identity == identity), None)

    def of_instance(self, instance_id: str) -> WorkerView | None:
        """Return the worker that is this very process."""
        return self._instances.get(instance_id)

    def attach(
        self, hello: Hello, link: WorkerLink, now: float, *, identity: str | None = None
    ) -> WorkerView:
        """Begin a worker's lease."""
        self._n_attached += 1
        worker = WorkerView(id=self._n_attached, hello=hello, link=link, heard_at=now, identity=identity)
        self._workers[worker.id] = self._instances[hello.instance_id] = worker
        return worker

    def detach(self, worker_id: int) -> None:
        """Forget a worker that holds nothing any more."""
        worker = self._workers.pop(worker_id)
        assert not worker.held, f"worker {worker_id} still holds {len(worker.held)} lanes"
        if self._instances.get(worker.hello.instance_id) is worker:
            del self._instances[worker.hello.instance_id]

    def claim(self, worker: WorkerView, lane: Lane, now: float) -> LaneRef:
        """Give a waiting lane to a worker, at the price of one credit."""
        assert worker.credit > 0, f"worker {worker.id} has credit {worker.credit}"
        ref = lane.claim_for(worker.card.fingerprint, now)
        worker.credit -= 1
        worker.n_granted += 1
        worker.held[lane.id] = lane
        self._holders[lane.id] = worker
        return ref

    def release(self, lane: Lane) -> WorkerView:
        """Take a lane out of its worker's hands; return whose they were."""
        worker = self._holders.pop(lane.id)
        del worker.held[lane.id]
        return worker

    def decline(self, lane: Lane) -> None:
        """Note that its worker could not serve a lane: not to offer it again before the next CREDIT."""
        self._holders[lane.id].declined.add(lane.id)

    def has_credit(self, worker_id: int) -> bool:
        """Whether an attached worker would take one more lane."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.credit > 0

    def holder_of(self, lane: Lane) -> WorkerView | None:
        """Return the worker that holds a lane."""
        return self._holders.get(lane.id)

    def expire(self, now: float) -> list[WorkerView]:
        """End the leases of workers silent for too long, and return these workers: to be let go of.

        What still arrives on such a connection proves nothing: a line that was cut delivers what lay in it,
        long after the worker has closed its own end.

        A scan that itself ran late proves that this process was starved, and that frames may lie unread: it
        gives everybody one interval more.
        """
        if self._scanned_at is not None and now - self._scanned_at > self._interval_s:
            self._grace_until = now + self._interval_s
        self._scanned_at = now
        if now < self._grace_until:
            return []
        silent = [w for w in self if w.is_live and now - w.heard_at > self._timeout_s]
        for worker in silent:
            worker.is_live = False
        return silent

    def at_fault(self, now: float, *, claim_timeout_s: float) -> list[tuple[WorkerView, str]]:
        """Return the workers that are not worth their connection any more, each with the reason.

        They are heard, and without a word about a lane they hold: they take work and do none, or are stuck.
        Nobody is, while a scan that ran late has frames to catch up with.
        """
        if now < self._grace_until:
            return []
        faults = []
        for worker in self:
            if (lane := worker.unmoved(now - claim_timeout_s)) is not None:
                why = f"it holds lane {lane.id} and has said nothing of it for {claim_timeout_s:g} s"
                faults.append((worker, why))
        return faults

    def allow_idle_frames(self, now: float) -> None:
        """Let every worker send what the time since the last call allows."""
        since_s = 0.0 if self._allowed_at is None else now - self._allowed_at
        self._allowed_at = now
        for worker in self:
            worker.n_idle_frames = max(0.0, worker.n_idle_frames - since_s * IDLE_FRAMES_PER_S)
