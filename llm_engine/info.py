"""What an engine tells about itself: facts for its caller, with nothing of llama.cpp in them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What is loaded."""

    name: str
    aliases: tuple[str, ...]
    file: str
    n_params: int
    n_ctx: int  # tokens one slot holds
    n_ctx_train: int
    max_inflight: int
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How busy the engine is now."""

    inflight: int  # accepted and still running, waiting ones included
    decoding: int  # in the current batch
    max_inflight: int
    n_admissible: int  # that may be in the engine now: fewer than `max_inflight` where a target is set
    step_ms: float
    step_age_s: float
    kv_promised_tokens: int
    tokens_per_second: float
    prompt_tokens_per_second: float  # of a prompt of some 2,000; 0 before the first one
    n_sessions: int  # conversations whose KV is kept, running or not, in the context or in host memory
    kv_bytes: int  # of all KV that is kept
    kv_promised_bytes: int  # of the promised tokens

    @property
    def available_slots(self) -> int:
        return max(0, self.n_admissible - self.inflight)


@dataclass(frozen=True, slots=True)
class Tier:
    """What lies in one place: sessions are runs that a next turn goes on from, bytes all there is."""

    n_sessions: int
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """KV that no request uses now, by where it lies."""

    slots: Tier
    host: Tier
    disk: Tier
