"""The messages of the ring protocol: what a worker tells an ingress, and what an ingress tells a worker.

Plain frozen facts, no I/O: the gateway speaks them with a worker in the same process as with one at the
far end of a socket, where `frames.py` makes bytes of them. A lane's messages carry its `LaneRef`; those of an
older claim are dropped.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

PROTOCOL_VERSION = 1
# Of the answer that makes a connection a WebSocket: which process of an ingress this is, before a HELLO.
INGRESS_ID_HEADER = "x-llm-ring-ingress"


class LaneRef(NamedTuple):
    """A lane as one worker holds it: `claim` is the fencing number, one higher at each grant."""

    lane_id: int
    claim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The model a worker serves. Two workers may continue each other's answers iff fingerprints match."""

    name: str
    aliases: tuple[str, ...] = ()
    file: str
    n_params: int
    n_ctx: int  # tokens one slot holds
    fingerprint: str
    created: int  # unix seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A worker presents itself. `instance_id` is new in every process of the same worker.

    `worker` is a label for logs. Who it is, is for the ingress to know otherwise: by its certificate.
    """

    protocol: int = PROTOCOL_VERSION
    worker: str
    instance_id: str
    model: ModelCard
    max_inflight: int
    takeover: bool = False  # replace another living instance of the same worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The ingress takes the worker in. Silence of `heartbeat_timeout_s`, of either end, is its loss."""

    ingress_id: str  # new in every process of an ingress
    heartbeat_timeout_s: float


class RefusedFor(StrEnum):
    """Why a worker may not attach."""

    VERSION = "version"  # it speaks another version of the protocol
    IDENTITY = "identity"  # its certificate is not a worker's
    ALLOW_LIST = "allow_list"  # its name is not among those that may
    DUPLICATE = "duplicate"  # another instance of it is attached


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The ingress does not take the worker in. To come again before `retry_after_s` is no use."""

    reason: RefusedFor
    message: str
    retry_after_s: float


class Credit(NamedTuple):
    """The pull: `n_lanes` more than the first `n_seen` granted on this connection. Replaces the last."""

    n_lanes: int
    n_seen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A worker's capacity now; also sent whenever it changes. Any message renews the lease."""

    inflight: int  # accepted and still running, waiting ones included
    decoding: int  # in the current batch
    max_inflight: int
    available_slots: int
    step_ms: float  # of a usual step; 0 before the first
    step_age_s: float  # since the last step ended; 0 when idle
    kv_promised_tokens: int
    tokens_per_second: float
    # A worker of an earlier release does not tell the rest.
    prompt_tokens_per_second: float = 0.0  # of prompts it computes; 0 before the first
    sessions: int = 0  # conversations whose KV it keeps, running or not
    kv_bytes: int = 0  # of all KV it keeps
    kv_promised_bytes: int = 0  # of what running sequences hold or may still fill


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A lane for a worker: the original request, and on a further claim the progress so far."""

    ref: LaneRef
    path: str
    body: bytes
    request_id: str
    queued_ms: float
    remaining_s: float | None = None  # until the request's deadline
    progress: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Status and headers of an answer. Sent once; a later claim's is ignored if the client has one."""

    status: int
    headers: tuple[tuple[str, str], ...]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    REFUSED = "refused"  # the answer is an error status the worker chose


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The answer is complete. `record` is opaque to the ingress."""

    finish_reason: FinishReason
    n_prompt: int = 0
    n_cached: int = 0
    n_completion: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    record: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The answer failed. A retryable one may be tried on another worker, from its progress."""

    message: str
    retryable: bool


class Body(NamedTuple):
    """Answer bytes with the progress they stand for: accepted together or not at all.

    A tuple, since one is made for every token.
    """

    ref: LaneRef
    data: bytes
    progress: bytes


class LaneSignal(StrEnum):
    """What is said of a lane in one word."""

    RELEASE = "release"  # by a worker: it goes back unserved
    WORKING = "working"  # by a worker: its work goes on, and there is nothing to send of it yet
    CANCEL = "cancel"  # by the ingress: nobody wants it from this worker any more
    PAUSE = "pause"  # by the ingress: its client reads too slowly
    RESUME = "resume"  # by the ingress: go on


class RingSignal(StrEnum):
    """What is said of a whole ring in one word."""

    DRAINING = "draining"  # by a worker: no more credit, what is held is finished
    DRAIN = "drain"  # by the ingress: it goes away, finish what is held from it


class OfLane(NamedTuple):
    """A message about one lane."""

    ref: LaneRef
    content: Head | End | Fail | LaneSignal


FromWorker: TypeAlias = Hello | Credit | Body | OfLane | Heartbeat | RingSignal
FromIngress: TypeAlias = Welcome | Refusal | Grant | OfLane | RingSignal
Message: TypeAlias = FromWorker | FromIngress
