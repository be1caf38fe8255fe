"""What a ring is to a worker: one ingress to pull lanes from and write answers to.

`Ring` is what the worker calls, `RingListener` what the ring calls back. Everything happens on the event
loop, nothing blocks, and a ring never calls its listener from inside one of the listener's own calls.
The same worker runs over `local.LocalRing` (one process) and over a socket.
"""

from typing import Protocol

from llm_ingress.wire import End, Fail, Grant, Head, Heartbeat, Hello, LaneRef


class RingListener(Protocol):
    """A worker as its rings see it."""

    def on_grant(self, ring: "Ring", grant: Grant) -> None:
        """Take a lane: it is this worker's until END, FAIL, RELEASE, a cancel, or the ring's loss."""

    def on_cancel(self, ring: "Ring", ref: LaneRef) -> None:
        """Stop a lane: nobody reads it any more. Nothing needs to be sent for it."""

    def on_pause(self, ring: "Ring", ref: LaneRef) -> None:
        """Hold a lane: its client reads too slowly. Its KV stays."""

    def on_resume(self, ring: "Ring", ref: LaneRef) -> None:
        """Go on with a paused lane."""

    def on_drain(self, ring: "Ring") -> None:
        """The ingress goes away: finish what is held from it."""

    def on_attached(self, ring: "Ring") -> None:
        """The ring is up; credit may be offered."""

    def on_detached(self, ring: "Ring") -> None:
        """The ring is gone with every lane held from it: cancel them."""


class Ring(Protocol):
    """One ingress."""

    def attach(self, hello: Hello, listener: RingListener) -> None:
        """Present the worker; the listener hears `on_attached` when the ring accepts it."""

    def credit(self, n_lanes: int) -> None:
        """Offer to take `n_lanes` more lanes than those granted so far. Replaces the last offer."""

    def head(self, ref: LaneRef, head: Head) -> None:
        """Begin the answer: the request is admitted, or refused with this status."""

    def body(self, ref: LaneRef, data: bytes, progress: bytes) -> None:
        """Append answer bytes, whole events only, with the progress they stand for: both or neither."""

    def end(self, ref: LaneRef, end: End) -> None:
        """Complete the answer."""

    def fail(self, ref: LaneRef, fail: Fail) -> None:
        """Fail the answer."""

    def release(self, ref: LaneRef) -> None:
        """Give the lane back unserved; it goes to the head of the queue."""

    def working(self, ref: LaneRef) -> None:
        """Say that a lane is being worked on, while there is nothing to send of it."""

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Tell the worker's capacity and renew its lease."""

    def draining(self) -> None:
        """Announce that no more credit will come."""

    def detach(self) -> None:
        """Leave the ring for good."""
