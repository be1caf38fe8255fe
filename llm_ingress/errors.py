"""What can go wrong in the ingress, and whose fault it is.

IngressError
├── ConfigError      the operator's: an option is out of its range (names field, value and range)
│   └── CertificateFault   a certificate or its key cannot be used (says which and why)
├── UnknownModel     the caller's: no worker ever served a model of that name
├── Refused          nobody's: no lane can be had now; says why, and when to come again
├── ConversationGone nobody's: what was said in a conversation is no longer kept
├── ConversationFull the caller's: no more of a conversation is kept than was said already
├── NoTurn           nobody's: a turn of a conversation cannot begin now; says why
├── HistoryFault     ours or the disk's: a turn could not be kept; it is as if it had not been
├── WorkerRefused    a worker's or its operator's: it may not attach; says for what, and when to come again
├── ProtocolFault    a peer's: what it says breaks the ring protocol; its connection should end
│   └── WireError          its bytes are no messages
│       └── UnknownVersion     it speaks another version of the protocol
└── IllegalMove      ours: a lane was asked for a state it cannot reach from the one it is in
"""

from enum import StrEnum

from llm_ingress.wire import RefusedFor


class IngressError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(IngressError, ValueError):
    """An option is out of its range."""


class CertificateFault(ConfigError):
    """A certificate or its key cannot be used: one of our files, or what the other side presented."""


class UnknownModel(IngressError):
    """No worker ever served this model."""

    def __init__(self, model: str) -> None:
        super().__init__(f"no worker ever served the model {model!r}")
        self.model = model


class RefusalReason(StrEnum):
    """Why a request is turned away for now; the `reason` of a 503."""

    RING_FULL = "ring_full"
    QUEUE_TIMEOUT = "queue_timeout"
    DRAINING = "draining"
    NO_WORKERS = "no_workers"
    # A budget is spent.
    SYSTEM_IN_FLIGHT_DECODE_FULL = "system_in_flight_decode_full"
    SYSTEM_SESSIONS_FULL = "system_sessions_full"
    SYSTEM_KV_CACHE_FULL = "system_kv_cache_full"
    ALL_WORKERS_DECODE_BUSY = "all_workers_decode_busy"
    WORKER_IN_FLIGHT_DECODE_FULL = "worker_in_flight_decode_full"
    ALL_WORKERS_AT_CAPACITY = "all_workers_at_capacity"


class Refused(IngressError):
    """No lane can be had now."""

    def __init__(self, reason: RefusalReason, retry_after_s: int, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.message = message


class ConversationGone(IngressError):
    """What was said in a conversation is no longer kept."""


class ConversationFull(IngressError):
    """No more of a conversation can be kept."""


class NoTurn(IngressError):
    """A turn of a conversation cannot begin now."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class HistoryFault(IngressError):
    """A turn could not be kept."""


class WorkerRefused(IngressError):
    """A worker may not attach."""

    def __init__(self, reason: RefusedFor, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class ProtocolFault(IngressError):
    """A peer sent what the ring protocol does not allow at that point."""


class WireError(ProtocolFault):
    """A peer's bytes are no messages of the ring protocol."""


class UnknownVersion(WireError):
    """A worker speaks another version of the ring protocol."""

    def __init__(self, protocol: int) -> None:
        super().__init__(f"it speaks version {protocol} of the ring protocol")
        self.protocol = protocol


class IllegalMove(IngressError):
    """A lane cannot go from its state to the one asked for."""
