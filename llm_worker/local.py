"""A ring in one process: a worker and a gateway on the same event loop.

What the worker says is a plain call into the gateway. What the gateway says waits for the event loop's next
turn, so that neither is ever called from inside its own call.

Owns: how many grants have reached the worker. Called by: the worker (`Ring`), the gateway (`WorkerLink`).
"""

import asyncio
import logging
from collections.abc import Callable

from llm_ingress.gateway import Gateway
from llm_ingress.wire import End, Fail, Grant, Head, Heartbeat, Hello, LaneRef
from llm_worker.ring import RingListener

logger = logging.getLogger(__name__)


class LocalRing:
    """The ring of a gateway in this process. Thread: event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._workers = gateway.workers
        self._loop = asyncio.get_running_loop()
        self._listener: RingListener | None = None
        self._hello: Hello | None = None
        self._worker_id = 0
        self._n_seen = 0

    def __str__(self) -> str:
        return "the ring of this process"

    # -- the worker's calls --

    def attach(self, hello: Hello, listener: RingListener) -> None:
        self._listener = listener
        self._hello = hello
        self._worker_id = self._workers.attach(hello, self)
        self._n_seen = 0
        self._tell(lambda worker: worker.on_attached(self))

    def credit(self, n_lanes: int) -> None:
        self._workers.credit(self._worker_id, n_lanes, self._n_seen)

    def head(self, ref: LaneRef, head: Head) -> None:
        self._workers.head(self._worker_id, ref, head)

    def body(self, ref: LaneRef, data: bytes, progress: bytes) -> None:
        self._workers.body(self._worker_id, ref, data, progress)

    def end(self, ref: LaneRef, end: End) -> None:
        self._workers.end(self._worker_id, ref, end)

    def fail(self, ref: LaneRef, fail: Fail) -> None:
        self._workers.fail(self._worker_id, ref, fail)

    def release(self, ref: LaneRef) -> None:
        self._workers.release(self._worker_id, ref)

    def working(self, ref: LaneRef) -> None:
        self._workers.working(self._worker_id, ref)

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        self._workers.heartbeat(self._worker_id, heartbeat)

    def draining(self) -> None:
        self._workers.draining(self._worker_id)

    def detach(self) -> None:
        self._listener = None
        self._workers.detach(self._worker_id, "the worker left")

    # -- the gateway's calls --

    def grant(self, grant: Grant) -> None:
        self._tell(lambda worker: self._hand_over(grant, worker))

    def cancel(self, ref: LaneRef) -> None:
        self._tell(lambda worker: worker.on_cancel(self, ref))

    def pause(self, ref: LaneRef) -> None:
        self._tell(lambda worker: worker.on_pause(self, ref))

    def resume(self, ref: LaneRef) -> None:
        self._tell(lambda worker: worker.on_resume(self, ref))

    def drain(self) -> None:
        self._tell(lambda worker: worker.on_drain(self))

    def close(self, why: str) -> None:
        logger.warning("%s has let go of its worker: %s", self, why)
        self._tell(self._come_back)

    def _come_back(self, worker: RingListener) -> None:
        """Attach again, as over a socket that was lost."""
        worker.on_detached(self)
        assert self._hello is not None, "let go of before it was attached"
        self.attach(self._hello, worker)

    def _hand_over(self, grant: Grant, worker: RingListener) -> None:
        self._n_seen += 1
        worker.on_grant(self, grant)

    def _tell(self, message: Callable[[RingListener], None]) -> None:
        self._loop.call_soon(self._deliver, message)

    def _deliver(self, message: Callable[[RingListener], None]) -> None:
        # What is under way when the worker leaves the ring is for nobody.
        if self._listener is not None:
            message(self._listener)
