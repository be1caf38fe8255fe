"""What can go wrong in the worker, and whose fault it is.

WorkerError
├── WorkerConfigError    the operator's: an option is out of its range (names field, value and range)
├── RingLost             the peer's or the network's: an ingress cannot be had, or was; says why
│   └── RingRefused          it does not take this worker in; says for what, and when to come again
├── ProgressError        the peer's: the bytes of an earlier attempt cannot be read or do not belong here
└── IllegalJobMove       ours: a job was asked for a state it cannot reach from the one it is in
"""

from llm_ingress.wire import Refusal


class WorkerError(Exception):
    """Base of everything this package raises on purpose."""


class WorkerConfigError(WorkerError, ValueError):
    """An option is out of its range."""


class RingLost(WorkerError):
    """An ingress cannot be reached, or the connection to it has ended."""


class RingRefused(RingLost):
    """The ingress does not take this worker in."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"it refuses this worker for {refusal.reason}: {refusal.message}")
        self.retry_after_s = refusal.retry_after_s


class ProgressError(WorkerError):
    """The progress handed over with a lane cannot be continued."""


class IllegalJobMove(WorkerError):
    """A job cannot go from its state to the one asked for."""
