"""A clock, clients and workers that a test drives by hand, around a real gateway."""

from dataclasses import dataclass, field

from llm_ingress.conversation import Conversation
from llm_ingress.gateway import AtCap, Gateway, GatewayConfig, Lane, LaneRequest
from llm_ingress.wire import (
    End,
    Fail,
    FinishReason,
    Grant,
    Head,
    Heartbeat,
    Hello,
    LaneRef,
    ModelCard,
)

OK = Head(status=200, headers=(("content-type", "text/event-stream"),))
REFUSED = Head(status=400, headers=(("content-type", "application/json"),))
END = End(finish_reason=FinishReason.STOP)


class FakeClock:
    """Time as the test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def card(name: str = "m", fingerprint: str = "f", aliases: tuple[str, ...] = ()) -> ModelCard:
    """A model card in which only names and fingerprint matter."""
    return ModelCard(
        name=name,
        aliases=aliases,
        file=f"{name}.gguf",
        n_params=1,
        n_ctx=4096,
        fingerprint=fingerprint,
        created=0,
    )


class NoLink:
    """A link that leads nowhere, for what decides and tells nobody."""

    def grant(self, grant: Grant) -> None: ...
    def cancel(self, ref: LaneRef) -> None: ...
    def pause(self, ref: LaneRef) -> None: ...
    def resume(self, ref: LaneRef) -> None: ...
    def drain(self) -> None: ...
    def close(self, why: str) -> None: ...


class Client:
    """A client: reads what it is told to read, and remembers it."""

    def __init__(
        self,
        ring: "ScriptedRing",
        model: str,
        tenant: str,
        body: bytes,
        conversation: Conversation | None,
        at_cap: AtCap,
    ) -> None:
        self.n_changes = 0
        self.received = b""
        self._gateway = ring.gateway
        request = LaneRequest(
            path="/v1/chat/completions",
            body=body,
            model=model,
            request_id="req",
            tenant=tenant,
            conversation=conversation,
        )
        self.lane: Lane = ring.gateway.open_lane(request, self._on_change, at_cap)

    def _on_change(self) -> None:
        self.n_changes += 1

    def read(self) -> bytes:
        data = self._gateway.take(self.lane)
        self.received += data
        return data

    def leave(self) -> None:
        self._gateway.leave(self.lane)


@dataclass(eq=False)
class ScriptedWorker:
    """A worker: records what the gateway tells it, says what the test makes it say."""

    gateway: Gateway
    hello: Hello
    grants: list[Grant] = field(default_factory=list)
    cancelled: list[LaneRef] = field(default_factory=list)
    paused: list[LaneRef] = field(default_factory=list)
    resumed: list[LaneRef] = field(default_factory=list)
    held: dict[LaneRef, Grant] = field(default_factory=dict)
    identity: str | None = None
    closed_for: str | None = None  # why the gateway ended the connection
    step_age_s: float = 0.0  # this and what follows as it beats
    prompt_tokens_per_second: float = 0.0
    kv_promised_bytes: int = 0
    id: int = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.gateway.workers.attach(self.hello, self, identity=self.identity)

    # As the gateway sees it.

    def grant(self, grant: Grant) -> None:
        self.grants.append(grant)
        self.held[grant.ref] = grant

    def cancel(self, ref: LaneRef) -> None:
        self.cancelled.append(ref)
        del self.held[ref]

    def pause(self, ref: LaneRef) -> None:
        assert ref in self.held
        self.paused.append(ref)

    def resume(self, ref: LaneRef) -> None:
        assert ref in self.held
        self.resumed.append(ref)

    def drain(self) -> None:
        raise AssertionError("the gateway drains no worker of its own accord")

    def close(self, why: str) -> None:
        self.held.clear()
        self.closed_for = why

    # As the test drives it.

    @property
    def last(self) -> LaneRef:
        """The newest lane it was granted."""
        return self.grants[-1].ref

    def offer(self, n: int) -> None:
        self.gateway.workers.credit(self.id, n, len(self.grants))

    def head(self, head: Head = OK, ref: LaneRef | None = None) -> None:
        self.gateway.workers.head(self.id, ref or self.last, head)

    def say(self, data: bytes, progress: bytes = b"", ref: LaneRef | None = None) -> None:
        self.gateway.workers.body(self.id, ref or self.last, data, progress)

    def end(self, end: End = END, ref: LaneRef | None = None) -> None:
        self.held.pop(ref or self.last, None)
        self.gateway.workers.end(self.id, ref or self.last, end)

    def fail(self, message: str = "broken", *, retryable: bool, ref: LaneRef | None = None) -> None:
        self.held.pop(ref or self.last, None)
        self.gateway.workers.fail(self.id, ref or self.last, Fail(message=message, retryable=retryable))

    def release(self, ref: LaneRef | None = None) -> None:
        self.held.pop(ref or self.last, None)
        self.gateway.workers.release(self.id, ref or self.last)

    def work(self, ref: LaneRef | None = None) -> None:
        self.gateway.workers.working(self.id, ref or self.last)

    def beat(self) -> None:
        heartbeat = Heartbeat(
            inflight=len(self.held),
            decoding=len(self.held),
            max_inflight=self.hello.max_inflight,
            available_slots=self.hello.max_inflight - len(self.held),
            step_ms=1.0,
            step_age_s=self.step_age_s,
            kv_promised_tokens=0,
            tokens_per_second=0.0,
            prompt_tokens_per_second=self.prompt_tokens_per_second,
            kv_promised_bytes=self.kv_promised_bytes,
        )
        self.gateway.workers.heartbeat(self.id, heartbeat)

    def drain_itself(self) -> None:
        self.gateway.workers.draining(self.id)

    def die(self) -> None:
        self.held.clear()
        self.gateway.workers.detach(self.id, "the connection was lost")


class ScriptedRing:
    """A gateway at a time of the test's choosing, with the clients and workers the test adds."""

    def __init__(self, config: GatewayConfig | None = None, *, chance: float = 0.5) -> None:
        self.clock = FakeClock()
        self.gateway = Gateway(config or GatewayConfig(), clock=self.clock, chance=lambda: chance)

    def worker(
        self,
        n: int = 0,
        *,
        name: str = "w",
        model: ModelCard | None = None,
        max_inflight: int = 4,
        identity: str | None = None,
        instance: str = "i",
        takeover: bool = False,
    ) -> ScriptedWorker:
        """Attach a worker that offers `n` lanes."""
        hello = Hello(
            worker=name,
            instance_id=instance,
            model=model or card(),
            max_inflight=max_inflight,
            takeover=takeover,
        )
        worker = ScriptedWorker(self.gateway, hello, identity=identity)
        if n:
            worker.offer(n)
        return worker

    def client(
        self,
        model: str = "m",
        *,
        tenant: str = "t",
        body: bytes = b"{}",
        conversation: Conversation | None = None,
        at_cap: AtCap = AtCap.PARK,
    ) -> Client:
        return Client(self, model, tenant, body, conversation, at_cap)

    def wait(self, seconds: float, *awake: ScriptedWorker) -> None:
        """Let time pass as in a healthy process: each half second `awake` workers beat, and a tick comes."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + 0.5)
            for worker in awake:
                worker.beat()
            self.gateway.tick()
