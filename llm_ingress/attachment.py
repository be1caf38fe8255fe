"""One worker's connection as the gateway sees it: bytes in, calls on the gateway; its answers, bytes out.

A HELLO comes first and is answered by WELCOME or REFUSED; then everything else. No I/O: the listener feeds
what arrives, sends what the outbox holds, and ends the connection when a fault is raised or the gateway asks.

Owns: what one connection has agreed on. Called by: `control.py`, and the gateway (`WorkerLink`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from llm_ingress.errors import ProtocolFault, UnknownVersion, WorkerRefused
from llm_ingress.frames import FrameReader
from llm_ingress.gateway import Gateway
from llm_ingress.outbox import Outbox
from llm_ingress.payloads import FROM_WORKER
from llm_ingress.wire import (
    PROTOCOL_VERSION,
    Body,
    Credit,
    End,
    Fail,
    FromWorker,
    Grant,
    Head,
    Heartbeat,
    Hello,
    LaneRef,
    LaneSignal,
    OfLane,
    Refusal,
    RefusedFor,
    RingSignal,
    Welcome,
)

# A worker's answers come in pieces of a few hundred bytes; an answer in one piece may be large.
MAX_OPEN_BYTES = 32 * 1024 * 1024
# A HELLO is one short frame. Whoever takes more messages than that for it is not about to say one.
MAX_EARLY_MESSAGES = 100
# A refused worker comes again after so long: a duplicate when the first one's lease may have ended, others
# when an operator may have done something.
RETRY_AFTER_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRules:
    """Who may attach, and what those hear who do. `allow` None admits every worker of the CA."""

    ingress_id: str
    allow: frozenset[str] | None = None


class Attachment:
    """One worker, from the first byte it sends. Thread: event loop.

    `on_output` is called when the outbox has something to send, `on_close` when the gateway has had enough.
    """

    def __init__(
        self,
        gateway: Gateway,
        rules: AttachRules,
        identity: str,
        *,
        on_output: Callable[[], None],
        on_close: Callable[[str], None],
    ) -> None:
        self.identity = identity
        self.hello: Hello | None = None
        self.outbox = Outbox()
        self._workers = gateway.workers
        self._lease_s = gateway.config.heartbeat_timeout_s
        self._rules = rules
        self._on_output = on_output
        self._on_close = on_close
        self._reader = FrameReader(FROM_WORKER, max_open_bytes=MAX_OPEN_BYTES)
        self._worker_id = 0
        self._n_early_messages = 0

    # What the worker says.

    def note_message(self) -> None:
        """Note a message of the connection, if only a ping: an empty one costs as much as a short one.

        Raises: ProtocolFault if there are too many.
        """
        if self.hello is not None:
            self._workers.message(self._worker_id)
            return
        self._n_early_messages += 1
        if self._n_early_messages > MAX_EARLY_MESSAGES:
            raise ProtocolFault(f"{self._n_early_messages} messages and no HELLO")

    def feed(self, data: bytes) -> None:
        """Act on what arrived.

        Raises: ProtocolFault; WorkerRefused, once the refusal is in the outbox.
        """
        try:
            for message in self._reader.feed(data):
                self._hear(message)  # type: ignore[arg-type]  # the reader takes no other kinds
        except UnknownVersion as error:
            text = f"{error}, this ingress version {PROTOCOL_VERSION}"
            raise self.refuse(WorkerRefused(RefusedFor.VERSION, text)) from error

    def refuse(self, refused: WorkerRefused) -> WorkerRefused:
        """Tell the worker why it may not attach; returns what was given."""
        is_duplicate = refused.reason is RefusedFor.DUPLICATE
        retry_after_s = self._lease_s if is_duplicate else RETRY_AFTER_S
        self._send(Refusal(reason=refused.reason, message=refused.message, retry_after_s=retry_after_s))
        return refused

    def lose(self, why: str) -> None:
        """The connection has ended: what the worker held goes back. Idempotent."""
        if self.hello is not None:
            self._workers.detach(self._worker_id, why)

    def _hear(self, message: FromWorker) -> None:
        if self.hello is None:
            self._greet(message)
            return
        match message:
            case Body():  # the usual one, and therefore first
                self._workers.body(self._worker_id, *message)
            case OfLane(ref=ref, content=content):
                self._hear_of(ref, content)
            case Credit():
                self._workers.credit(self._worker_id, *message)
            case Heartbeat():
                self._workers.heartbeat(self._worker_id, message)
            case RingSignal():
                self._workers.draining(self._worker_id)
            case Hello():
                raise ProtocolFault("a second HELLO")
            case _:
                assert_never(message)

    def _hear_of(self, ref: LaneRef, content: Head | End | Fail | LaneSignal) -> None:
        match content:
            case Head():
                self._workers.head(self._worker_id, ref, content)
            case End():
                self._workers.end(self._worker_id, ref, content)
            case Fail():
                self._workers.fail(self._worker_id, ref, content)
            case LaneSignal.WORKING:
                self._workers.working(self._worker_id, ref)
            case LaneSignal():
                self._workers.release(self._worker_id, ref)
            case _:
                assert_never(content)

    def _greet(self, message: FromWorker) -> None:
        if not isinstance(message, Hello):
            raise ProtocolFault("its first message is not a HELLO")
        try:
            self._attach(message)
        except WorkerRefused as refused:
            raise self.refuse(refused) from None

    def _attach(self, hello: Hello) -> None:
        """Raises: WorkerRefused."""
        allow = self._rules.allow
        if allow is not None and self.identity not in allow:
            text = f"{self.identity} is not among the workers that may attach"
            raise WorkerRefused(RefusedFor.ALLOW_LIST, text)
        self._worker_id = self._workers.attach(hello, self, identity=self.identity)
        self.hello = hello
        self._send(Welcome(ingress_id=self._rules.ingress_id, heartbeat_timeout_s=self._lease_s))

    # What the gateway says.

    def grant(self, grant: Grant) -> None:
        self._send(grant)

    def cancel(self, ref: LaneRef) -> None:
        self._send(OfLane(ref, LaneSignal.CANCEL))

    def pause(self, ref: LaneRef) -> None:
        self._send(OfLane(ref, LaneSignal.PAUSE))

    def resume(self, ref: LaneRef) -> None:
        self._send(OfLane(ref, LaneSignal.RESUME))

    def drain(self) -> None:
        self._send(RingSignal.DRAIN)

    def close(self, why: str) -> None:
        self._on_close(why)

    def _send(self, message: Welcome | Refusal | Grant | OfLane | RingSignal) -> None:
        self.outbox.put(message)
        self._on_output()
