"""The budgets of a ring: sessions, KV and decodes in flight, in all and of each worker.

A session is a conversation with a name of its own (`conversation_id`), from the first worker that takes it
until it expires. KV is what running sequences hold or may still fill, by the workers' heartbeats; what is
kept beyond that gives way to whoever needs its room, and is in nobody's way. A decode in flight is a lane
with a worker.

Owns: what each worker takes of the budgets, and their sums, kept up to date so that a look at them costs the
same however many there are. Pure. Called by: `placement.py`, which tells what has changed, and `gateway.py`.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from llm_ingress.conversation import Conversation
from llm_ingress.errors import ConfigError, RefusalReason
from llm_ingress.leases import WorkerView

MIB = 1024 * 1024


class AtCap(StrEnum):
    """What becomes of a request while a budget is spent."""

    PARK = "park"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What may be taken at once; of decodes per worker, None is as many as it has slots."""

    max_sessions: int = 1000
    max_sessions_per_worker: int = 100
    session_ttl_s: float = 300.0
    max_kv_mib: int = 16384
    max_kv_mib_per_worker: int = 8192
    max_in_flight_decodes: int = 32
    max_in_flight_decodes_per_worker: int | None = None

    @property
    def kv_bytes(self) -> int:
        return self.max_kv_mib * MIB

    @property
    def kv_bytes_per_worker(self) -> int:
        return self.max_kv_mib_per_worker * MIB

    def __post_init__(self) -> None:
        for name in (
            "max_sessions",
            "max_sessions_per_worker",
            "max_kv_mib",
            "max_kv_mib_per_worker",
            "max_in_flight_decodes",
        ):
            _check_at_least_1(name, getattr(self, name))
        if self.max_in_flight_decodes_per_worker is not None:
            _check_at_least_1("max_in_flight_decodes_per_worker", self.max_in_flight_decodes_per_worker)
        if not self.session_ttl_s > 0:
            raise ConfigError(f"session_ttl_s is {self.session_ttl_s}, must be more than 0")


def _check_at_least_1(name: str, value: int) -> None:
    if not value >= 1:
        raise ConfigError(f"{name} is {value}, must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetFacts:
    """What is taken of each budget, and what there is."""

    sessions: int
    max_sessions: int
    kv_promised_bytes: int
    max_kv_bytes: int
    in_flight_decodes: int
    max_in_flight_decodes: int
    max_sessions_per_worker: int
    max_kv_bytes_per_worker: int
    max_in_flight_decodes_per_worker: int | None  # None: its slots


class Session(NamedTuple):
    """A tenant's session, by the digest of its name."""

    tenant: str
    digest: bytes


def session_of(tenant: str, conversation: Conversation | None) -> Session | None:
    """Return the session a conversation of a tenant is; None if it has no name."""
    if conversation is None or conversation.session is None:
        return None
    return Session(tenant, conversation.session)


class _Standing(StrEnum):
    """What a worker has room for."""

    ROOM = "room"
    SESSIONS_SPENT = "sessions spent"  # room for what is no new session
    KV_SPENT = "kv spent"
    DECODES_SPENT = "decodes spent"
    UNABLE = "unable"  # lost, draining, stuck: nobody to count on


@dataclass(frozen=True, slots=True)
class _Account:
    """What a worker takes, as it was last looked at."""

    model: str
    standing: _Standing
    n_decodes: int
    kv_bytes: int


class Sessions:
    """The sessions that live, and how many each worker has."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._used: OrderedDict[Session, tuple[str, float]] = OrderedDict()  # worker and time, oldest first
        self._n_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, session: Session) -> bool:
        return session in self._used

    def of_worker(self, name: str) -> int:
        """Return how many a worker has."""
        return self._n_of[name]

    def use(self, session: Session, worker: str, now: float) -> None:
        """Note that a worker takes or has served a turn of a session."""
        self.end(session)
        self._used[session] = (worker, now)
        self._n_of[worker] += 1

    def end(self, session: Session) -> None:
        """Count a session no more."""
        worker, _ = self._used.pop(session, (None, 0.0))
        if worker is not None:
            self._n_of[worker] -= 1
            if not self._n_of[worker]:
                del self._n_of[worker]

    def expire(self, now: float) -> None:
        """End those that nobody used for too long."""
        while self._used:
            session, (_, used_at) = next(iter(self._used.items()))
            if now - used_at < self._ttl_s:
                return
            self.end(session)


class Limits:
    """The budgets, and what is taken of them. Thread: event loop, every method."""

    def __init__(self, budgets: Budgets) -> None:
        self.sessions = Sessions(budgets.session_ttl_s)
        self.budgets = budgets
        self._accounts: dict[int, _Account] = {}  # by worker id
        self._standings: dict[str, Counter[_Standing]] = {}  # by model
        self._n_decodes = 0
        self._kv_bytes = 0

    # What has changed.

    def observe(self, worker: WorkerView) -> None:
        """Take a worker's part of the budgets as it is now."""
        self.forget(worker)
        kv_bytes = _kv_bytes_of(worker)
        account = _Account(worker.card.name, self._standing(worker, kv_bytes), len(worker.held), kv_bytes)
        self._accounts[worker.id] = account
        self._standings.setdefault(account.model, Counter())[account.standing] += 1
        self._n_decodes += account.n_decodes
        self._kv_bytes += account.kv_bytes

    def forget(self, worker: WorkerView) -> None:
        """Take a worker's part out."""
        account = self._accounts.pop(worker.id, None)
        if account is not None:
            self._standings[account.model][account.standing] -= 1
            self._n_decodes -= account.n_decodes
            self._kv_bytes -= account.kv_bytes

    def _standing(self, worker: WorkerView, kv_bytes: int) -> _Standing:
        budgets = self.budgets
        if not worker.is_able:
            return _Standing.UNABLE
        if len(worker.held) >= (budgets.max_in_flight_decodes_per_worker or worker.n_slots):
            return _Standing.DECODES_SPENT
        if kv_bytes >= budgets.kv_bytes_per_worker:
            return _Standing.KV_SPENT
        if self.sessions.of_worker(worker.name) >= budgets.max_sessions_per_worker:
            return _Standing.SESSIONS_SPENT
        return _Standing.ROOM

    # What there is room for.

    @property
    def is_spent(self) -> bool:
        """Whether nobody may be given a lane, whoever has room."""
        budgets = self.budgets
        return self._n_decodes >= budgets.max_in_flight_decodes or self._kv_bytes >= budgets.kv_bytes

    def has_room(self, worker: WorkerView) -> bool:
        """Whether a worker may be given a lane that is no new session."""
        account = self._accounts.get(worker.id)
        takes = (_Standing.ROOM, _Standing.SESSIONS_SPENT)
        return not self.is_spent and account is not None and account.standing in takes

    def admits(self, worker: WorkerView, session: Session | None) -> bool:
        """Whether a worker with room may be given this lane: a new session has budgets of its own."""
        if session is None or session in self.sessions:
            return True
        return (
            len(self.sessions) < self.budgets.max_sessions
            and self._accounts[worker.id].standing is _Standing.ROOM
        )

    def spent(self, model: str, session: Session | None, *, is_known: bool) -> RefusalReason | None:
        """Return which budget keeps a lane from being granted now, None if none does.

        `is_known` is for one whose conversation a worker holds.
        """
        is_new = session is not None and session not in self.sessions
        standings = self._standings.get(model, Counter())
        if self._n_decodes >= self.budgets.max_in_flight_decodes:
            return RefusalReason.SYSTEM_IN_FLIGHT_DECODE_FULL
        if is_new and len(self.sessions) >= self.budgets.max_sessions:
            return RefusalReason.SYSTEM_SESSIONS_FULL
        if self._kv_bytes >= self.budgets.kv_bytes:
            return RefusalReason.SYSTEM_KV_CACHE_FULL
        if standings[_Standing.ROOM] or (not is_new and standings[_Standing.SESSIONS_SPENT]):
            return None
        return _all_spent(standings, is_known=is_known)

    @property
    def facts(self) -> BudgetFacts:
        """What to tell of it."""
        return BudgetFacts(
            sessions=len(self.sessions),
            max_sessions=self.budgets.max_sessions,
            kv_promised_bytes=self._kv_bytes,
            max_kv_bytes=self.budgets.kv_bytes,
            in_flight_decodes=self._n_decodes,
            max_in_flight_decodes=self.budgets.max_in_flight_decodes,
            max_sessions_per_worker=self.budgets.max_sessions_per_worker,
            max_kv_bytes_per_worker=self.budgets.kv_bytes_per_worker,
            max_in_flight_decodes_per_worker=self.budgets.max_in_flight_decodes_per_worker,
        )


def _kv_bytes_of(worker: WorkerView) -> int:
    if worker.heartbeat is None or not worker.is_live:
        return 0
    return max(0, worker.heartbeat.kv_promised_bytes)


def _all_spent(standings: Counter[_Standing], *, is_known: bool) -> RefusalReason:
    """Return why no worker of a model has room."""
    n_able = sum(n for standing, n in standings.items() if standing is not _Standing.UNABLE)
    if not n_able:
        return RefusalReason.NO_WORKERS
    if standings[_Standing.DECODES_SPENT] < n_able:
        return RefusalReason.ALL_WORKERS_AT_CAPACITY
    if is_known:
        return RefusalReason.WORKER_IN_FLIGHT_DECODE_FULL
    return RefusalReason.ALL_WORKERS_DECODE_BUSY
