"""The worker at one moment, as frozen facts: what its health and metrics are rendered from.

Made by: `worker.py`. Read by: `health.py`.
"""

from dataclasses import dataclass

from llm_ingress.wire import Heartbeat, ModelCard


@dataclass(frozen=True, slots=True, kw_only=True)
class RingFacts:
    """One ring. It `is_draining` when it grants nothing more, whichever side wants to part."""

    name: str
    is_attached: bool
    is_draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """A worker. `capacity` is what its next heartbeat would tell."""

    name: str
    model: ModelCard
    capacity: Heartbeat
    rings: tuple[RingFacts, ...]
    n_jobs: int
    n_summaries: int  # asked of its engine since it started
    is_draining: bool
    has_failed: bool  # its engine has ended by itself

    @property
    def n_attached(self) -> int:
        """Rings that could grant a lane."""
        return sum(ring.is_attached and not ring.is_draining for ring in self.rings)
