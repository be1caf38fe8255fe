"""What the coordinator's endpoints tell: whether it lives, its workers, and what is under way.

Pure: snapshots in, JSON out. Called by: `public.py`.
"""

from dataclasses import asdict
from typing import Any, TypeAlias

from llm_ingress.conversations import ConversationsSnapshot
from llm_ingress.history import HistoryConfig
from llm_ingress.snapshot import GatewaySnapshot, WorkerSnapshot

Json: TypeAlias = dict[str, Any]


def health(ring: GatewaySnapshot, kept: ConversationsSnapshot, bounds: HistoryConfig) -> Json:
    """Whether it lives, and what there is room for."""
    alive = [worker for worker in ring.workers if worker.is_live]
    beats = [worker.heartbeat for worker in alive if worker.heartbeat is not None]
    return {
        "status": "draining" if ring.draining else "ok" if alive else "no_workers",
        "workers_alive": len(alive),
        "capacity": {
            "max_inflight": sum(beat.max_inflight for beat in beats),
            "available_slots": sum(beat.available_slots for beat in beats),
            "ring_streams": ring.ring_streams,
            "open": ring.open,
            "sessions": kept.n_conversations,
            "max_sessions": bounds.max_conversations,
            "history_bytes": kept.n_bytes,
            "max_history_bytes": bounds.max_bytes,
        },
    }


def workers(ring: GatewaySnapshot) -> Json:
    """Every worker that is attached, and whether it is heard."""
    return {"workers": [_worker(worker) for worker in ring.workers]}


def stats(ring: GatewaySnapshot, kept: ConversationsSnapshot) -> Json:
    """What is under way, in all and at each worker, and what became of the rest."""
    return {
        "in_flight_decodes": sum(worker.n_held for worker in ring.workers),
        "sessions": kept.n_conversations,
        "history_bytes": kept.n_bytes,
        "queued_turns": kept.n_waiting,
        "lanes": {state.value: n for state, n in ring.lanes.items()},
        "accepted": ring.accepted,
        "finished": ring.finished,
        "cancelled": ring.cancelled,
        "failed": ring.failed,
        "budgets": asdict(ring.budgets),
        **workers(ring),
    }


def _worker(worker: WorkerSnapshot) -> Json:
    beat = worker.heartbeat
    return {
        "id": worker.name,
        "status": "draining" if worker.is_draining else "alive",
        "alive": worker.is_live,
        "model": worker.card.name,
        "heard_ago_s": round(worker.heard_ago_s, 3),
        "in_flight_decodes": worker.n_held,
        "granted": worker.n_granted,
        "max_inflight": None if beat is None else beat.max_inflight,
        "available_slots": None if beat is None else beat.available_slots,
        "sessions": None if beat is None else beat.sessions,
        "kv_bytes": None if beat is None else beat.kv_bytes,
        "kv_promised_bytes": None if beat is None else beat.kv_promised_bytes,
        "kv_promised_tokens": None if beat is None else beat.kv_promised_tokens,
        "tokens_per_second": None if beat is None else beat.tokens_per_second,
    }
