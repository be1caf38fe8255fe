"""Which lane is with which worker: lanes granted, taken back, and ended.

Every lane goes to a worker, comes back from one and ends here, whoever asks for it, so each ends in exactly
one way and gives its place back exactly once.

Owns: the lane pool, the leases, the queues, the table of who holds which conversation, and what is taken of
the budgets. Called by: the two sides of the gateway, `gateway.py` and
`workers.py`. Synchronous, on the event loop: it does no I/O and never logs.
"""

from collections.abc import Callable

from llm_ingress.affinity import Affinity, Holder, patience_s
from llm_ingress.bounds import GatewayConfig, hopeless
from llm_ingress.conversation import Conversation
from llm_ingress.dispatch import Dispatch, is_held_by, suits
from llm_ingress.lanes import Lane, LanePool, LaneRequest, LaneState, Outcome, Preference
from llm_ingress.leases import Leases, WorkerView
from llm_ingress.limits import Limits, session_of
from llm_ingress.wire import End, FinishReason, Grant


class Placement:
    """The lanes and the workers of one ingress. Thread: event loop, every method."""

    def __init__(self, config: GatewayConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.clock = clock
        self.pool = LanePool(config.ring_streams)
        self.leases = Leases(timeout_s=config.heartbeat_timeout_s, interval_s=config.heartbeat_interval_s)
        self.dispatch = Dispatch()
        self.affinity = Affinity(ttl_s=config.budgets.session_ttl_s)
        self.limits = Limits(config.budgets)

    # Lanes go to workers.

    def place(self, lane: Lane, now: float) -> None:
        """Grant a fresh lane at once if a worker has room, else park it."""
        lane.preference = self.preference_of(lane.request, lane.model, now)
        if lane.preference is not None:
            self.affinity.count_turn(has_room=self.leases.has_credit(lane.preference.worker_id))
        if not self._grant_at_once(lane, now):
            self.dispatch.park(lane)
            self._watch(lane, now)

    def serve(self, worker: WorkerView) -> None:
        """Grant a worker what waits, as far as its credit and the budgets go."""
        while (lane := self.dispatch.pop_for(worker, self.limits, self.clock())) is not None:
            self._grant(worker, lane, self.clock(), at_once=False)

    def serve_all(self) -> None:
        """Grant what waited for something other than credit: for its holder, or within the budgets."""
        for worker in self.leases:
            self.serve(worker)

    def weigh(self, worker: WorkerView) -> None:
        """Take account of what a worker says it takes; what waited for that to become less goes on."""
        was_spent = self.limits.is_spent
        self.limits.observe(worker)
        if was_spent:
            self.serve_all()
        else:
            self.serve(worker)

    def _grant_at_once(self, lane: Lane, now: float) -> bool:
        worker = self.dispatch.choose(lane, tuple(self.leases), self.limits, now)
        if worker is not None:
            self._grant(worker, lane, now, at_once=True)
        return worker is not None

    def _grant(self, worker: WorkerView, lane: Lane, now: float, *, at_once: bool) -> None:
        limit_s = self.config.request_timeout_s
        request = lane.request
        if lane.claim == 0 and is_held_by(lane, worker):
            self.affinity.count_return(at_once=at_once)
        self._use_session(lane, worker, now)
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
        self.limits.observe(worker)

    # Conversations and their holders.

    def preference_of(self, request: LaneRequest, model: str, now: float) -> Preference | None:
        """Return which worker holds a conversation, if one does that is to be counted on."""
        if request.conversation is None:
            return None
        holder = self.affinity.holder_of(request.tenant, request.conversation, now)
        worker = None if holder is None else self.leases.of_instance(holder.instance_id)
        if holder is None or worker is None or not worker.is_able or worker.card.name != model:
            return None
        rate = worker.heartbeat.prompt_tokens_per_second if worker.heartbeat else 0.0
        return Preference(worker.id, patience_s(holder.n_tokens, rate, self.config.affinity_wait_ms / 1000))

    def note_answer(self, lane: Lane, end: End) -> None:
        """Remember that its worker has the conversation as far as this lane, which it has answered."""
        request, worker, now = lane.request, self.leases.holder_of(lane), self.clock()
        if worker is None or request.conversation is None:
            return
        if end.finish_reason is FinishReason.REFUSED:
            if self.affinity.holder_of(request.tenant, request.conversation, now) is None:
                self.forget_session(request.tenant, request.conversation)  # nothing was ever said in it
            return
        holder = Holder(worker.hello.instance_id, end.n_prompt + end.n_completion)
        self.affinity.note(request.tenant, request.conversation, holder, now)
        self._use_session(lane, worker, now)

    def forget_session(self, tenant: str, conversation: Conversation) -> None:
        """Count a conversation no more, if it is a session."""
        session = session_of(tenant, conversation)
        if session is not None:
            self.limits.sessions.end(session)

    def _use_session(self, lane: Lane, worker: WorkerView, now: float) -> None:
        session = session_of(lane.request.tenant, lane.request.conversation)
        if session is not None:
            self.limits.sessions.use(session, worker.name, now)

    def expire_sessions(self, now: float) -> None:
        """Count no more what nobody used for long."""
        self.limits.sessions.expire(now)
        for worker in self.leases:
            self.limits.observe(worker)

    # Lanes end.

    def end(self, lane: Lane, outcome: Outcome) -> None:
        """End a lane from this side; whoever holds it is told to drop it."""
        holder = self.leases.holder_of(lane)
        self.close(lane, outcome)
        if holder is not None:
            holder.link.cancel(lane.ref)

    def close(self, lane: Lane, outcome: Outcome) -> None:
        """End a lane: out of its queue or its worker's hands, its place given back."""
        was_waiting, was_spent = lane.state is LaneState.WAITING, self.limits.is_spent
        self.pool.end(lane, outcome)
        if was_waiting:
            self.dispatch.withdraw(lane)
            return
        self.limits.observe(self.leases.release(lane))
        if was_spent:
            self.serve_all()

    # Lanes come back.

    def decline(self, lane: Lane, why: str) -> None:
        """Take a lane from a worker that has no place for it before its next credit, and place it again."""
        self.leases.decline(lane)
        self._take_back(lane, why)
        self.serve_all()

    def lose(self, worker: WorkerView, why: str) -> None:
        """Place again all that a worker held which is gone."""
        self.watch_company(self.clock())
        for lane in tuple(worker.held.values()):
            lane.attempts += 1
            self._take_back(lane, why)
        self.serve_all()

    def detach(self, worker_id: int, why: str) -> None:
        """Forget a worker; what it held goes back to the head of the queue."""
        worker = self.leases.get(worker_id)
        if worker is not None:
            worker.is_live = False
            self.lose(worker, why)
            self.limits.forget(worker)
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
        self.limits.observe(self.leases.release(lane))
        lane.preference = self.preference_of(lane.request, lane.model, now)
        if not self._grant_at_once(lane, now):
            self.dispatch.put_back(lane)
            self._watch(lane, now)

    # Lanes that wait, and whom they may hope for.

    def watch_company(self, now: float) -> None:
        """Note, after workers came or went, since when each waiting lane has nobody to hope for.

        One that waits for who is not to be counted on any more goes anywhere with the next `serve_all`.
        """
        for worker in self.leases:
            self.limits.observe(worker)
        for lane in self.dispatch.waiting():
            self._watch(lane, now)

    def _watch(self, lane: Lane, now: float) -> None:
        if lane.preference is not None:
            holder = self.leases.get(lane.preference.worker_id)
            if holder is None or not suits(holder, lane):
                self.dispatch.let_go(lane)
        if any(suits(worker, lane) for worker in self.leases):
            lane.alone_since = None
        elif lane.alone_since is None:
            lane.alone_since = now
