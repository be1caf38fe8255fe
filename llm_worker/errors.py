"""What can go wrong in the worker, and whose fault it is.

WorkerError
├── WorkerConfigError    the operator's: an option is out of its range (names field, value and range)
├── ProgressError        the peer's: the bytes of an earlier attempt cannot be read or do not belong here
└── IllegalJobMove       ours: a job was asked for a state it cannot reach from the one it is in
"""


class WorkerError(Exception):
    """Base of everything this package raises on purpose."""


class WorkerConfigError(WorkerError, ValueError):
    """An option is out of its range."""


class ProgressError(WorkerError):
    """The progress handed over with a lane cannot be continued."""


class IllegalJobMove(WorkerError):
    """A job cannot go from its state to the one asked for."""
