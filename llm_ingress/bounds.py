"""The bounds a ring is run within: places, bytes, attempts, time.

Pure: `overdue` says how a lane ends that is past one of its limits of time, `hopeless` how one does that no
further claim would help; `gateway.py` and `placement.py` ask, and end it.
"""

from dataclasses import dataclass, field

from llm_ingress.errors import ConfigError
from llm_ingress.lanes import Lane, LaneState, Outcome, OutcomeReason
from llm_ingress.limits import AtCap, Budgets


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The bounds of the ring. Every duration in seconds, unless its name says otherwise."""

    ring_streams: int = 64
    queue_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    response_buffer_bytes: int = 256 * 1024
    stall_timeout_s: float = 10.0
    contended_stall_timeout_s: float = 2.0  # while other lanes wait for the same model
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 5.0
    claim_timeout_s: float = 60.0  # between two words of a worker about a lane it holds
    max_attempts: int = 3
    no_worker_timeout_s: float = 10.0
    affinity_wait_ms: float = 2000.0  # at most, for the worker that holds a conversation
    budgets: Budgets = field(default_factory=Budgets)
    at_cap: AtCap | None = None  # whatever path a request came by

    def __post_init__(self) -> None:
        for name in ("ring_streams", "response_buffer_bytes", "max_attempts"):
            value = getattr(self, name)
            if not value >= 1:
                raise ConfigError(f"{name} is {value}, must be at least 1")
        for name in (
            "queue_timeout_s",
            "request_timeout_s",
            "stall_timeout_s",
            "contended_stall_timeout_s",
            "heartbeat_interval_s",
            "no_worker_timeout_s",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}, must be more than 0")
        if not self.affinity_wait_ms >= 0:
            raise ConfigError(f"affinity_wait_ms is {self.affinity_wait_ms}, must not be negative")
        for name in ("heartbeat_timeout_s", "claim_timeout_s"):
            value = getattr(self, name)
            if not value > self.heartbeat_interval_s:
                raise ConfigError(
                    f"{name} is {value}, must be more than heartbeat_interval_s, {self.heartbeat_interval_s}"
                )


def overdue(lane: Lane, now: float, config: GatewayConfig, *, is_contended: bool) -> Outcome | None:
    """Return how a lane ends that is past one of its limits; None while it is within all of them."""
    limit_s = config.request_timeout_s
    if limit_s is not None and now - lane.opened_at >= limit_s:
        message = f"not answered within {limit_s:g} s"
        return Outcome(state=LaneState.CANCELLED, reason=OutcomeReason.DEADLINE, message=message)
    if lane.state is LaneState.WAITING:
        return _overdue_waiting(lane, now, config)
    if lane.is_paused and lane.paused_s(now) >= _stall_limit_s(config, is_contended):
        message = f"the client read too slowly for {lane.paused_s(now):.1f} s"
        return Outcome(state=LaneState.CANCELLED, reason=OutcomeReason.STALLED, message=message)
    return None


def hopeless(lane: Lane, config: GatewayConfig, why: str) -> Outcome | None:
    """Return how a lane ends that comes back from a worker and is not worth another claim."""
    if lane.attempts >= config.max_attempts:
        message = f"given up after {lane.attempts} attempts; the last: {why}"
        return Outcome(state=LaneState.FAILED, reason=OutcomeReason.ATTEMPTS_SPENT, message=message)
    if not lane.can_continue:
        message = f"the answer cannot be continued elsewhere: {why}"
        return Outcome(state=LaneState.FAILED, reason=OutcomeReason.WORKER_LOST, message=message)
    return None


def _overdue_waiting(lane: Lane, now: float, config: GatewayConfig) -> Outcome | None:
    """Return how a waiting lane ends.

    One with progress has an answer under way: no queue timeout then, and to miss the only workers that could
    go on with it is a failure rather than a refusal.
    """
    if lane.alone_since is not None and now - lane.alone_since >= config.no_worker_timeout_s:
        message = f"no worker for it came within {config.no_worker_timeout_s:g} s"
        state = LaneState.FAILED if lane.progress else LaneState.EXPIRED
        return Outcome(state=state, reason=OutcomeReason.NO_WORKERS, message=message)
    if not lane.progress and lane.waited_s(now) >= config.queue_timeout_s:
        message = f"no worker had room for it within {config.queue_timeout_s:g} s"
        return Outcome(state=LaneState.EXPIRED, reason=OutcomeReason.QUEUE_TIMEOUT, message=message)
    return None


def _stall_limit_s(config: GatewayConfig, is_contended: bool) -> float:
    if is_contended:
        return min(config.stall_timeout_s, config.contended_stall_timeout_s)
    return config.stall_timeout_s
