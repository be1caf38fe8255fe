"""Which lane is with which worker: lanes granted, taken back, and ended.

Every lane goes to a worker, comes back from one and ends here, whoever asks for it, so each ends in exactly
one way and gives its place back exactly once.

Owns: the lane pool, the leases and the queues. Called by: the two sides of the gateway, `gateway.py` and
`workers.py`. Synchronous, on the event loop: it does no I/O and never logs.
"""

from collections.abc import Callable

from llm_ingress.bounds import GatewayConfig, hopeless
from llm_ingress.dispatch import Dispatch, choose_worker, suits
from llm_ingress.lanes import Lane, LanePool, LaneState, Outcome
from llm_ingress.leases import Leases, WorkerView
from llm_ingress.wire import Grant


class Placement:
    """The lanes and the workers of one ingress. Thread: event loop, every method."""

    def __init__(self, config: GatewayConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.clock = clock
        self.pool = LanePool(config.ring_streams)
        self.leases = Leases(timeout_s=config.heartbeat_timeout_s, interval_s=config.heartbeat_interval_s)
        self.dispatch = Dispatch()

    # Lanes go to workers.

    def place(self, lane: Lane, now: float) -> None:
        """Grant a fresh lane at once if a worker has room, else park it."""
        if not self._grant_at_once(lane, now):
            self.dispatch.park(lane)
            self._watch(lane, now)

    def serve(self, worker: WorkerView) -> None:
        """Grant a worker what waits, as far as its credit goes."""
        while (lane := self.dispatch.pop_for(worker)) is not None:
            self._grant(worker, lane, self.clock())

    def _grant_at_once(self, lane: Lane, now: float) -> bool:
        worker = choose_worker(lane, self.leases)
        if worker is not None:
            self._grant(worker, lane, now)
        return worker is not None

    def _grant(self, worker: WorkerView, lane: Lane, now: float) -> None:
        limit_s = self.config.request_timeout_s
        request = lane.request
        worker.link.grant(
            Grant(
                ref=self.leases.claim(worker, lane, now),
                path=request.path,
                body=request.body,
                request_id=request.request_id,
                queued_ms=lane.waited_s(now) * 1000,
                remaining_s=None if limit_s is None else lane.opened_at + limit_s - now,
                progress=bytes(lane.progress),
            )
        )

    # Lanes end.

    def end(self, lane: Lane, outcome: Outcome) -> None:
        """End a lane from this side; whoever holds it is told to drop it."""
        holder = self.leases.holder_of(lane)
        self.close(lane, outcome)
        if holder is not None:
            holder.link.cancel(lane.ref)

    def close(self, lane: Lane, outcome: Outcome) -> None:
        """End a lane: out of its queue or its worker's hands, its place given back."""
        was_waiting = lane.state is LaneState.WAITING
        self.pool.end(lane, outcome)
        if was_waiting:
            self.dispatch.withdraw(lane)
        else:
            self.leases.release(lane)

    # Lanes come back.

    def decline(self, lane: Lane, why: str) -> None:
        """Take a lane from a worker that has no place for it before its next credit, and place it again."""
        self.leases.decline(lane)
        self._take_back(lane, why)

    def lose(self, worker: WorkerView, why: str) -> None:
        """Place again all that a worker held which is gone."""
        self.watch_company(self.clock())
        for lane in tuple(worker.held.values()):
            lane.attempts += 1
            self._take_back(lane, why)

    def detach(self, worker_id: int, why: str) -> None:
        """Forget a worker; what it held goes back to the head of the queue."""
        worker = self.leases.get(worker_id)
        if worker is not None:
            worker.is_live = False
            self.lose(worker, why)
            self.leases.detach(worker_id)

    def dismiss(self, worker: WorkerView, why: str) -> None:
        """Forget a worker from this side."""
        self.detach(worker.id, why)
        worker.link.close(why)

    def _take_back(self, lane: Lane, why: str) -> None:
        """Take a lane from its worker and place it again, or end it if another claim is no use."""
        outcome = hopeless(lane, self.config, why)
        if outcome is not None:
            self.close(lane, outcome)
            lane.on_change()
            return
        now = self.clock()
        lane.wait_again(now)
        self.leases.release(lane)
        if not self._grant_at_once(lane, now):
            self.dispatch.put_back(lane)
            self._watch(lane, now)

    # Lanes that wait, and whom they may hope for.

    def watch_company(self, now: float) -> None:
        """Note, after workers came or went, since when each waiting lane has nobody to hope for."""
        for lane in self.dispatch.waiting():
            self._watch(lane, now)

    def _watch(self, lane: Lane, now: float) -> None:
        if any(suits(worker, lane) for worker in self.leases):
            lane.alone_since = None
        elif lane.alone_since is None:
            lane.alone_since = now
