"""Conservation: whatever clients, workers and time do, nothing leaks, and no byte is lost or repeated.

A hypothesis state machine. Each answer is a fixed run of pieces, `[0][1]…`; the progress of a piece names it,
so a further claim knows where to go on, as a real worker does.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llm_ingress.errors import Refused
from llm_ingress.gateway import GatewayConfig, LaneState
from llm_ingress.lanes import TERMINAL, Outcome
from llm_ingress.wire import LaneRef, ModelCard
from tests.ingress.scripted_ring import Client, ScriptedRing, ScriptedWorker, card

N_PIECES = 6
CONFIG = GatewayConfig(
    ring_streams=5,
    response_buffer_bytes=20,
    queue_timeout_s=8.0,
    request_timeout_s=60.0,
    stall_timeout_s=4.0,
    max_attempts=3,
)
ANSWER = b"".join(b"[%d]" % piece for piece in range(N_PIECES))


@dataclass(eq=False)
class Job:
    """One claim at a worker, and the next piece it owes."""

    worker: ScriptedWorker
    ref: LaneRef
    next_piece: int
    has_head: bool = False


@dataclass(eq=False)
class Reader:
    """A client and the end it was first told of."""

    client: Client
    outcome: Outcome | None = None
    has_left: bool = False


pick = st.integers(min_value=0, max_value=10**6)


class Ring(RuleBasedStateMachine):
    """Clients, workers and time at random."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = ScriptedRing(CONFIG)
        self.ring.worker().die()  # its models are known from here on
        self.ring.worker(model=card("m2")).die()
        self.workers: list[ScriptedWorker] = []
        self.readers: list[Reader] = []
        self.pieces: dict[tuple[int, LaneRef], Job] = {}
        self.stale: list[tuple[ScriptedWorker, LaneRef]] = []
        self.declined: defaultdict[int, set[int]] = defaultdict(set)
        self.n_opened = 0

    # Clients.

    @rule(model=st.sampled_from(["m", "m2"]), tenant=st.sampled_from("ab"))
    def open(self, model: str, tenant: str) -> None:
        try:
            client = self.ring.client(model, tenant=tenant)
        except Refused:
            assert sum(reader.client.lane.is_open for reader in self.readers) == CONFIG.ring_streams
        else:
            self.n_opened += 1
            self.readers.append(Reader(client))

    @precondition(lambda self: self.readers)
    @rule(which=pick)
    def read(self, which: int) -> None:
        self.readers[which % len(self.readers)].client.read()

    @precondition(lambda self: self.readers)
    @rule(which=pick)
    def leave(self, which: int) -> None:
        reader = self.readers[which % len(self.readers)]
        reader.has_left = True
        reader.client.leave()

    # Workers.

    @precondition(lambda self: len(self.workers) < 4)
    @rule(
        model=st.sampled_from([card(), card(), card(fingerprint="other"), card("m2")]),
        n=st.integers(min_value=0, max_value=3),
    )
    def attach(self, model: ModelCard, n: int) -> None:
        self.workers.append(self.ring.worker(n, model=model))

    @precondition(lambda self: self.workers)
    @rule(which=pick)
    def die(self, which: int) -> None:
        worker = self.workers.pop(which % len(self.workers))
        self.stale.extend((worker, ref) for ref in worker.held)
        worker.die()

    @precondition(lambda self: self.workers)
    @rule(which=pick, n=st.integers(min_value=0, max_value=3), n_unseen=st.integers(min_value=0, max_value=2))
    def offer(self, which: int, n: int, n_unseen: int) -> None:
        worker = self.workers[which % len(self.workers)]
        self.declined[worker.id].clear()
        self.ring.gateway.workers.credit(worker.id, n, max(0, len(worker.grants) - n_unseen))

    @precondition(lambda self: self.workers)
    @rule(which=pick)
    def drain(self, which: int) -> None:
        self.workers[which % len(self.workers)].drain_itself()

    def jobs(self) -> list[Job]:
        held = {}
        for worker in self.workers:
            for ref, grant in worker.held.items():
                fresh = Job(worker, ref, next_piece=grant.progress.count(b","))
                held[worker.id, ref] = self.pieces.get((worker.id, ref), fresh)
        self.pieces = held
        return list(held.values())

    @precondition(lambda self: self.jobs())
    @rule(which=pick, n=st.integers(min_value=1, max_value=N_PIECES + 1))
    def work(self, which: int, n: int) -> None:
        """Go on with an answer: head, pieces, end, `n` pieces at most."""
        job = self.jobs()[which % len(self.jobs())]
        if not job.has_head:
            job.worker.head(ref=job.ref)
            job.has_head = True
        for _ in range(n):
            if job.next_piece == N_PIECES:
                job.worker.end(ref=job.ref)
                return
            job.worker.say(b"[%d]" % job.next_piece, b"%d," % job.next_piece, ref=job.ref)
            job.next_piece += 1

    @precondition(lambda self: self.jobs())
    @rule(which=pick, how=st.sampled_from(["release", "retry", "fail"]))
    def give_up(self, which: int, how: str) -> None:
        job = self.jobs()[which % len(self.jobs())]
        self.stale.append((job.worker, job.ref))
        if how != "fail":
            self.declined[job.worker.id].add(job.ref.lane_id)
        if how == "release":
            job.worker.release(ref=job.ref)
        else:
            job.worker.fail(retryable=how == "retry", ref=job.ref)

    @precondition(lambda self: self.stale)
    @rule(which=pick, what=st.sampled_from(["head", "body", "end", "fail", "release"]))
    def late_frame(self, which: int, what: str) -> None:
        worker, ref = self.stale[which % len(self.stale)]
        n_dropped = self.ring.gateway.snapshot().dropped_frames
        match what:
            case "head":
                worker.head(ref=ref)
            case "body":
                worker.say(b"[late]", b"late,", ref=ref)
            case "end":
                worker.end(ref=ref)
            case "fail":
                worker.fail(retryable=True, ref=ref)
            case _:
                worker.release(ref=ref)
        assert self.ring.gateway.snapshot().dropped_frames == n_dropped + 1

    # Time.

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def live(self, seconds: float) -> None:
        self.ring.wait(seconds, *self.workers)

    @precondition(lambda self: self.workers)
    @rule(which=pick)
    def freeze_one(self, which: int) -> None:
        frozen = self.workers.pop(which % len(self.workers))
        self.stale.extend((frozen, ref) for ref in frozen.held)
        self.ring.wait(6.0, *self.workers)
        assert not frozen.held

    # Laws.

    @invariant()
    def counts_add_up(self) -> None:
        facts = self.ring.gateway.snapshot()
        assert facts.accepted == self.n_opened
        assert facts.accepted == facts.finished + facts.cancelled + facts.failed + facts.open
        assert sum(facts.lanes.values()) == facts.accepted
        assert facts.open == sum(reader.client.lane.is_open for reader in self.readers)
        assert facts.open <= CONFIG.ring_streams

    @invariant()
    def a_lane_is_held_by_one_worker_exactly_while_claimed(self) -> None:
        holders = Counter(ref for worker in self.workers for ref in worker.held)
        lanes = [reader.client.lane for reader in self.readers]
        held = {lane.ref for lane in lanes if lane.state in (LaneState.CLAIMED, LaneState.STREAMING)}
        assert holders == Counter(held)

    @invariant()
    def no_byte_is_lost_or_repeated(self) -> None:
        for reader in self.readers:
            client = reader.client
            assert ANSWER.startswith(client.received)
            if client.lane.state is LaneState.DONE and not reader.has_left:
                assert len(client.received) + client.lane.unread == len(ANSWER)

    @invariant()
    def a_lane_ends_once(self) -> None:
        for reader in self.readers:
            lane = reader.client.lane
            assert (lane.state in TERMINAL) == (lane.outcome is not None)
            if reader.outcome is None:
                reader.outcome = lane.outcome
            assert lane.outcome is reader.outcome

    @invariant()
    def nothing_waits_beside_a_worker_with_room_for_it(self) -> None:
        lanes = [reader.client.lane for reader in self.readers]
        waiting = [lane for lane in lanes if lane.state is LaneState.WAITING]
        facts = self.ring.gateway.snapshot().workers
        for worker, seen in zip(self.workers, facts, strict=True):
            if seen.is_draining or not seen.is_live or not seen.credit:
                continue
            for lane in waiting:
                if lane.model == seen.card.name and lane.id not in self.declined[worker.id]:
                    assert lane.progress
                    assert lane.fingerprint != seen.card.fingerprint

    def teardown(self) -> None:
        self.ring.gateway.fail_open_lanes("the test is over")
        for reader in self.readers:
            reader.client.read()
            if reader.client.lane.state is LaneState.DONE and not reader.has_left:
                assert reader.client.received == ANSWER
            reader.client.leave()
        self.counts_add_up()
        assert self.ring.gateway.is_idle
        assert not any(worker.held for worker in self.workers)
        assert not any(worker.n_held for worker in self.ring.gateway.snapshot().workers)


Ring.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestConservation = Ring.TestCase
