"""The ring at one moment, as frozen facts: what health, logs and metrics are rendered from.

Made by: `gateway.py`. Read by: the HTTP surface.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from llm_ingress.affinity import AffinityFacts
from llm_ingress.lanes import LaneState
from llm_ingress.leases import WorkerView
from llm_ingress.limits import BudgetFacts
from llm_ingress.wire import Heartbeat, ModelCard


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """One attached worker at one moment. `heartbeat` is its last, None before the first."""

    name: str
    instance_id: str
    card: ModelCard
    heartbeat: Heartbeat | None
    heard_ago_s: float
    is_live: bool
    is_draining: bool
    credit: int
    n_held: int
    n_granted: int  # since it attached


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySnapshot:
    """The ring at one moment.

    `accepted` = `finished` + `cancelled` + `failed` + `open`; an expired lane counts as failed.
    `lanes` gives, for open states, the lanes there now; for terminal ones, those that ever ended so.
    """

    workers: tuple[WorkerSnapshot, ...]
    lanes: Mapping[LaneState, int]
    accepted: int
    finished: int
    cancelled: int
    failed: int
    open: int
    dropped_frames: int
    ring_streams: int
    draining: bool
    affinity: AffinityFacts
    budgets: BudgetFacts


def snapshot_of(worker: WorkerView, now: float) -> WorkerSnapshot:
    """Return a worker as it is now."""
    return WorkerSnapshot(
        name=worker.hello.worker,
        instance_id=worker.hello.instance_id,
        card=worker.card,
        heartbeat=worker.heartbeat,
        heard_ago_s=now - worker.heard_at,
        is_live=worker.is_live,
        is_draining=worker.is_draining,
        credit=worker.credit,
        n_held=len(worker.held),
        n_granted=worker.n_granted,
    )
