"""A lane: one admitted public request, its state, its two bounded buffers, and the pool it takes a place in.

Owns: what clients have not read yet, what another worker would need to continue, and every place of the ring.
Touched by: `gateway.py`, `workers.py` and `placement.py`, on the event loop. The HTTP surface reads a lane's
`state`, `head`, `unread` and `outcome`, and changes nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from llm_ingress.conversation import Conversation
from llm_ingress.errors import IllegalMove
from llm_ingress.records import Tally, tally
from llm_ingress.shares import Shares
from llm_ingress.wire import End, Head, LaneRef


class LaneState(StrEnum):
    """Where a lane is on its way from admission to its one end."""

    WAITING = "waiting"
    CLAIMED = "claimed"
    STREAMING = "streaming"
    DONE = "done"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"


NEXT: Mapping[LaneState, frozenset[LaneState]] = {
    LaneState.WAITING: frozenset(
        {LaneState.CLAIMED, LaneState.CANCELLED, LaneState.EXPIRED, LaneState.FAILED}
    ),
    LaneState.CLAIMED: frozenset(
        {LaneState.WAITING, LaneState.STREAMING, LaneState.CANCELLED, LaneState.FAILED}
    ),
    # Back to WAITING only with its recorded progress, so the next worker continues and repeats nothing.
    LaneState.STREAMING: frozenset(
        {LaneState.WAITING, LaneState.DONE, LaneState.CANCELLED, LaneState.FAILED}
    ),
    LaneState.DONE: frozenset(),
    LaneState.CANCELLED: frozenset(),
    LaneState.EXPIRED: frozenset(),
    LaneState.FAILED: frozenset(),
}
TERMINAL = frozenset(state for state, following in NEXT.items() if not following)


class OutcomeReason(StrEnum):
    """What ended a lane."""

    FINISHED = "finished"
    REFUSED = "refused"  # answered in full with an error status: the worker found the request at fault
    CLIENT_LEFT = "client_left"
    STALLED = "stalled"  # the client read too slowly for too long
    DEADLINE = "deadline"  # the request's own time limit
    QUEUE_TIMEOUT = "queue_timeout"
    NO_WORKERS = "no_workers"  # nobody who could serve or continue it came in time
    WORKER_FAILED = "worker_failed"  # a failure another attempt would only repeat
    WORKER_LOST = "worker_lost"  # its worker is gone, and nobody can continue what the client already has
    ATTEMPTS_SPENT = "attempts_spent"
    DRAIN_ENDED = "drain_ended"
    DISPLACED = "displaced"  # its place went to a tenant with fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRequest:
    """A validated public request as it enters the ring. `tenant` is whom fairness counts it to."""

    path: str
    body: bytes
    model: str
    request_id: str
    tenant: str
    conversation: Conversation | None = None


@dataclass(frozen=True, slots=True)
class Preference:
    """The worker that holds a lane's conversation, by its id, and how long to wait for it to have room."""

    worker_id: int
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What ended a lane. `end` is the worker's own account, present iff the lane is DONE."""

    state: LaneState
    reason: OutcomeReason
    message: str = ""
    end: End | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Lane:
    """One admitted request. `model` is the canonical name its workers go by.

    Two buffers, bounded together by the gateway: `unread` bytes of the answer, and the `progress` another
    worker would continue from. Times are monotonic seconds.
    """

    id: int
    request: LaneRequest
    model: str
    on_change: Callable[[], None]
    opened_at: float
    state: LaneState = LaneState.WAITING
    head: Head | None = None
    outcome: Outcome | None = None
    unread: int = 0  # bytes
    claim: int = 0  # of the newest grant
    attempts: int = 0  # claims lost by death or retryable failure
    fingerprint: str | None = None  # of the worker that last held it
    preference: Preference | None = None
    progress: bytearray = field(default_factory=bytearray)
    alone_since: float | None = None  # waiting, and no worker there is could take it
    heard_at: float = 0.0  # when its holder last said something of it, or was given it, or let go on with it
    first_token_at: float | None = None
    tally: Tally = field(default_factory=Tally)  # of progress no longer kept; of all, once ended without END
    _chunks: list[bytes] = field(init=False, default_factory=list)
    _is_begun: bool = field(
        init=False, default=False
    )  # the client has bytes that a fresh attempt would repeat
    _keeps_progress: bool = field(init=False, default=True)
    _waiting_since: float = field(init=False)
    _waited_s: float = field(init=False, default=0.0)
    _paused_since: float | None = field(init=False, default=None)
    _paused_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._waiting_since = self.opened_at

    @property
    def ref(self) -> LaneRef:
        """The lane as its holder knows it."""
        return LaneRef(self.id, self.claim)

    @property
    def is_open(self) -> bool:
        """Whether the lane has not ended yet."""
        return self.outcome is None

    @property
    def is_paused(self) -> bool:
        """Whether its worker was told to hold it."""
        return self._paused_since is not None

    @property
    def keeps_progress(self) -> bool:
        """Whether progress of this claim is of any use."""
        return self._keeps_progress

    @property
    def can_continue(self) -> bool:
        """Whether another claim could go on without repeating or losing a byte the client has."""
        return bool(self.progress) or not self._is_begun

    def move(self, state: LaneState) -> None:
        """Go to `state`.

        Raises: IllegalMove, having changed nothing, if the table has no such move.
        """
        if state not in NEXT[self.state]:
            raise IllegalMove(f"lane {self.id} is {self.state} and cannot become {state}")
        self.state = state

    def claim_for(self, fingerprint: str, now: float) -> LaneRef:
        """Give the lane to a worker with this model, under a new fencing number."""
        self.move(LaneState.CLAIMED)
        self._waited_s += now - self._waiting_since
        self.claim += 1
        self.heard_at = now
        self.fingerprint = fingerprint
        return self.ref

    def wait_again(self, now: float) -> None:
        """Take the lane back from its worker; what it was given and has produced so far stays."""
        self.move(LaneState.WAITING)
        self.resume(now)
        self._waiting_since = now
        self._keeps_progress = True
        self.tally = Tally()  # what was given up is done anew

    def waited_s(self, now: float) -> float:
        """Return the time spent waiting so far, over all claims."""
        if self.state is LaneState.WAITING:
            return self._waited_s + now - self._waiting_since
        return self._waited_s

    def append(self, data: bytes, progress: bytes, now: float) -> None:
        """Take answer bytes and the progress they stand for."""
        if self.first_token_at is None and tally(progress).n_generated:
            self.first_token_at = now
        if data:
            self._chunks.append(data)
            self.unread += len(data)
            self._is_begun = True
        if self._keeps_progress:
            self.progress += progress
        else:
            self.tally += tally(progress)

    def take(self) -> bytes:
        """Return all unread bytes, once."""
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self.unread = 0
        return data

    def give_up_progress(self) -> None:
        """Keep no progress for the rest of this claim: a tail without its beginning continues nothing."""
        self.count_progress()
        self.progress.clear()
        self._keeps_progress = False

    def count_progress(self) -> None:
        """Count what is kept, before it is dropped."""
        self.tally += tally(bytes(self.progress))

    def pause(self, now: float) -> None:
        """Start the stall clock."""
        self._paused_since = now

    def resume(self, now: float) -> None:
        """Stop the stall clock; it goes on from there at the next pause."""
        self._paused_s = self.paused_s(now)
        self._paused_since = None
        self.heard_at = now

    def paused_s(self, now: float) -> float:
        """Return the stall clock: all the time the lane was ever paused."""
        return self._paused_s if self._paused_since is None else self._paused_s + now - self._paused_since


class LanePool:
    """The ring's places. A lane takes one from `open` to `end`, and each is given back exactly once."""

    def __init__(self, n_places: int) -> None:
        self._n_places = n_places
        self._open: dict[int, Lane] = {}
        self._n_accepted = 0
        self._n_ended: Counter[LaneState] = Counter()
        self.shares = Shares()
        self._to_visit: Iterator[int] = iter(())  # what is left of a round, by id

    @property
    def n_open(self) -> int:
        """Places taken."""
        return len(self._open)

    @property
    def is_full(self) -> bool:
        """Whether no place is left."""
        return len(self._open) >= self._n_places

    @property
    def n_accepted(self) -> int:
        """Lanes ever opened; open ones and ended ones add up to it."""
        return self._n_accepted

    def lanes(self) -> ValuesView[Lane]:
        """Return the lanes that have not ended, oldest first."""
        return self._open.values()

    def visit(self, n_most: int) -> list[Lane]:
        """Return the next lanes of a round over all that are open: all of them, if they are not more."""
        ids = list(islice(self._to_visit, n_most))
        if not ids:
            self._to_visit = iter(tuple(self._open))
            ids = list(islice(self._to_visit, n_most))
        return [self._open[lane_id] for lane_id in ids if lane_id in self._open]

    def open(self, request: LaneRequest, *, model: str, on_change: Callable[[], None], now: float) -> Lane:
        """Take a place."""
        assert not self.is_full, f"{len(self._open)} of {self._n_places} places are taken"
        self._n_accepted += 1
        lane = Lane(id=self._n_accepted, request=request, model=model, on_change=on_change, opened_at=now)
        self._open[lane.id] = lane
        self.shares.take(request.tenant)
        return lane

    def end(self, lane: Lane, outcome: Outcome) -> None:
        """Give the place back.

        Raises: IllegalMove if the lane has ended before or cannot end this way; nothing has changed then.
        """
        lane.move(outcome.state)
        lane.outcome = outcome
        if outcome.end is None:  # with an END, the worker's own count is there
            lane.count_progress()
        lane.progress.clear()
        del self._open[lane.id]
        self.shares.give_back(lane.request.tenant)
        self._n_ended[outcome.state] += 1

    def n_by_state(self) -> dict[LaneState, int]:
        """Return, for open states, the lanes there now; for terminal ones, the lanes that ever ended so."""
        counts = Counter(lane.state for lane in self._open.values()) + self._n_ended
        return {state: counts[state] for state in LaneState}
