"""The workers' side of the gateway: what each of a worker's messages does.

A message of an unknown worker, of an old claim, or of a lane that the worker does not hold is dropped and
counted: each is what a lost lease or a cancel leaves behind on the way.

Owns: the count of what was dropped. Called by: a ring's near end, on the event loop. Synchronous and pure.
"""

from llm_ingress.errors import ProtocolFault, WorkerRefused
from llm_ingress.lanes import Lane, LaneState, Outcome, OutcomeReason
from llm_ingress.leases import WorkerLink, WorkerView
from llm_ingress.placement import Placement
from llm_ingress.wire import End, Fail, FinishReason, Head, Heartbeat, Hello, LaneRef, RefusedFor

# What a worker may have under way when its lane is paused, a whole answer in one piece included.
OVERRUN_BYTES = 16 * 1024 * 1024


class WorkersSide:
    """Where the workers of one ingress are heard. Thread: event loop, every method."""

    def __init__(self, placement: Placement) -> None:
        self.n_dropped_frames = 0
        self._placement = placement
        self._leases = placement.leases
        self._clock = placement.clock
        self._config = placement.config
        self._bound_bytes = placement.config.response_buffer_bytes

    # Of a worker.

    def attach(self, hello: Hello, link: WorkerLink, *, identity: str | None = None) -> int:
        """Take in a worker; the number returned is its name in every other call.

        Of one `identity` one connection is attached. The same instance takes its own place at once, another
        only if it says so.

        Raises: WorkerRefused for a duplicate.
        """
        if identity is not None:
            self._make_room(identity, hello)
        now = self._clock()
        self._placement.dispatch.learn(hello.model)
        worker = self._leases.attach(hello, link, now, identity=identity)
        self._placement.watch_company(now)
        return worker.id

    def credit(self, worker_id: int, n: int, seen: int) -> None:
        """Replace a worker's offer: it takes `n` lanes beyond the first `seen` granted since it attached.

        Raises: ProtocolFault if it has seen more lanes than were granted.
        """
        worker = self._hear(worker_id)
        if worker is not None:
            worker.note_idle_frame()
            worker.offer(n, seen)
            self._placement.serve(worker)

    def heartbeat(self, worker_id: int, heartbeat: Heartbeat) -> None:
        """Renew a worker's lease and note its capacity.

        One whose engine stands still is nobody to hope for until it goes on; its last offer stands then.
        """
        worker = self._hear(worker_id)
        if worker is None:
            return
        worker.note_idle_frame()
        worker.heartbeat = heartbeat
        is_stuck = heartbeat.step_age_s > self._config.claim_timeout_s
        if is_stuck != worker.is_stuck:
            worker.is_stuck = is_stuck
            self._placement.watch_company(self._clock())
            self._placement.serve_all()
        self._placement.weigh(worker)

    def draining(self, worker_id: int) -> None:
        """Give a worker no more lanes; it finishes those it holds."""
        worker = self._hear(worker_id)
        if worker is not None:
            worker.is_draining = True
            self._placement.watch_company(self._clock())
            self._placement.serve_all()

    def message(self, worker_id: int) -> None:
        """Note that a worker has sent something, whatever is in it.

        Raises: ProtocolFault if it floods.
        """
        self._note_idle_frame(worker_id)

    def detach(self, worker_id: int, why: str) -> None:
        """Forget a worker; what it held goes back to the head of the queue."""
        self._placement.detach(worker_id, why)

    # Of a lane.

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
            self._placement.end(
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
        lane.append(data, progress, lane.heard_at)
        if lane.unread + len(lane.progress) > self._bound_bytes:
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
        self._placement.note_answer(lane, end)
        is_refused = end.finish_reason is FinishReason.REFUSED
        reason = OutcomeReason.REFUSED if is_refused else OutcomeReason.FINISHED
        self._placement.close(lane, Outcome(state=LaneState.DONE, reason=reason, end=end))
        lane.on_change()

    def fail(self, worker_id: int, ref: LaneRef, fail: Fail) -> None:
        """Fail the answer, or try it again if the worker thinks that may help."""
        lane = self._hear_of(worker_id, ref)
        if lane is None:
            return
        if fail.retryable:
            lane.attempts += 1
            self._placement.decline(lane, fail.message)
            return
        self._placement.close(
            lane, Outcome(state=LaneState.FAILED, reason=OutcomeReason.WORKER_FAILED, message=fail.message)
        )
        lane.on_change()

    def release(self, worker_id: int, ref: LaneRef) -> None:
        """Give a lane back unfinished: to the head of the queue, not to this worker until its next credit."""
        lane = self._hear_of(worker_id, ref)
        if lane is not None:
            self._placement.decline(lane, "its worker gave it back")

    def working(self, worker_id: int, ref: LaneRef) -> None:
        """Note that a lane of which there is nothing to send yet is being worked on."""
        if self._hear_of(worker_id, ref) is not None:
            self._note_idle_frame(worker_id)

    # Who is heard.

    def _make_room(self, identity: str, hello: Hello) -> None:
        """Let go of the earlier connection of a worker. Raises: WorkerRefused if that may not be."""
        earlier = self._leases.of_identity(identity)
        if earlier is None:
            return
        is_another = earlier.hello.instance_id != hello.instance_id
        if is_another and not hello.takeover:
            raise WorkerRefused(RefusedFor.DUPLICATE, f"another instance of {identity} is attached")
        self._placement.dismiss(earlier, "a newer connection of the same worker takes its place")

    def _hear(self, worker_id: int) -> WorkerView | None:
        """Renew a worker's lease."""
        worker = self._leases.get(worker_id)
        if worker is None:
            self.n_dropped_frames += 1
            return None
        worker.heard_at = self._clock()
        return worker

    def _hear_of(self, worker_id: int, ref: LaneRef) -> Lane | None:
        """Renew a worker's lease and return the lane its frame is for, if it holds it under this claim."""
        worker = self._hear(worker_id)
        if worker is None:
            return None
        lane = worker.holds(ref)
        if lane is None:
            self.n_dropped_frames += 1
            worker.note_idle_frame()
        else:
            lane.heard_at = worker.heard_at
        return lane

    def _note_idle_frame(self, worker_id: int) -> None:
        worker = self._leases.get(worker_id)
        if worker is not None:
            worker.note_idle_frame()

    def _relieve(self, lane: Lane) -> None:
        """Bring a lane's buffers back to their bound.

        Progress that fills it alone is given up; otherwise the worker waits until the client has read.
        """
        bound = self._bound_bytes
        if lane.unread > bound + OVERRUN_BYTES:
            raise ProtocolFault(f"{lane.unread} bytes unread in lane {lane.id}, which is paused")
        if len(lane.progress) > bound:
            lane.give_up_progress()
        holder = self._leases.holder_of(lane)
        if holder is not None and not lane.is_paused and lane.unread + len(lane.progress) > bound:
            lane.pause(self._clock())
            holder.link.pause(lane.ref)
