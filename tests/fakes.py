"""Fakes with behaviour: an engine without a model, and a ring whose far end is the test.

`FakeEngine` answers a request by saying its last message again, in tokens of at most three bytes, so that
characters and stop strings fall across tokens. Its step is a method: nothing happens until the test calls it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import orjson

from llm_engine.errors import EngineBusy, EngineClosed, EngineError, PromptTooLong, TemplateRefused
from llm_engine.generation import Delta, Failed, Finished, GenerateRequest, Listener, Prepared, StopReason
from llm_engine.info import Capacity, EngineInfo
from llm_engine.text import TextAssembler
from llm_ingress.wire import End, Fail, Grant, Head, Heartbeat, Hello, LaneRef
from llm_worker.engine import TextEngine
from llm_worker.preparation import PreparedJob, advance, preparation
from llm_worker.ring import RingListener
from llm_worker.summaries import Summaries

BYTES_PER_TOKEN = 3
END_OF_GENERATION = 0


def tokenise(text: str) -> tuple[int, ...]:
    """Text as tokens; each token's number is its bytes behind a one."""
    data = text.encode()
    pieces = (data[i : i + BYTES_PER_TOKEN] for i in range(0, len(data), BYTES_PER_TOKEN))
    return tuple(int.from_bytes(b"\x01" + piece) for piece in pieces)


def piece_of(token: int) -> bytes:
    """The bytes of one token."""
    return token.to_bytes(BYTES_PER_TOKEN + 1).lstrip(b"\x00")[1:]


class FakeGeneration:
    """One running generation and its handle."""

    def __init__(self, engine: "FakeEngine", prepared: Prepared, on_event: Listener) -> None:
        request = prepared.request
        self.prepared = prepared
        self.is_paused = False
        self._engine = engine
        self._on_event: Listener = on_event
        self._text = TextAssembler(request.stop)
        self._script = (*tokenise(request.messages[-1]["content"]), END_OF_GENERATION)
        self._n_said = 0
        self._reason: StopReason | None = None
        for token in request.resumed:
            assert token == self._script[self._n_said], "a continuation of something else"
            self._say()

    def cancel(self) -> None:
        self._engine.end(self)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def step(self) -> None:
        """Say one token, and the end behind the last."""
        if self._reason is None:
            token = self._script[self._n_said]
            self._on_event(Delta(self._say(), (token,)))
        if self._reason is not None and self in self._engine.running:
            self._engine.end(self)
            self._on_event(self._finished(self._reason))

    def fail(self, error: EngineError) -> None:
        self._engine.end(self)
        self._on_event(Failed(error))

    def _say(self) -> str:
        token = self._script[self._n_said]
        self._n_said += 1
        if token == END_OF_GENERATION:
            self._reason = StopReason.STOP
            return self._text.flush()
        text = self._text.feed(piece_of(token))
        if self._text.stopped:
            self._reason = StopReason.STOP
        elif self._n_said >= self.prepared.max_tokens:
            self._reason = StopReason.LENGTH
            text += self._text.flush()
        return text

    def _finished(self, reason: StopReason) -> Finished:
        return Finished(
            reason=reason,
            n_prompt=len(self.prepared.prompt),
            n_cached=1,
            n_completion=self._n_said,
            prefill_ms=1.0,
            decode_ms=2.0,
        )


class FakeEngine:
    """An engine of `max_inflight` slots that says every request's last message again."""

    def __init__(self, *, max_inflight: int = 4, n_ctx: int = 1000, fingerprint: str = "f" * 64) -> None:
        self.info = EngineInfo(
            name="echo",
            aliases=("parrot",),
            file="echo.gguf",
            n_params=1000,
            n_ctx=n_ctx,
            n_ctx_train=n_ctx,
            max_inflight=max_inflight,
            fingerprint=fingerprint,
        )
        self.running: list[FakeGeneration] = []
        self.requests: list[GenerateRequest] = []
        self.n_prepared = 0
        self.is_closed = False
        self.step_age_s = 0.0
        self.fault: Exception | None = None
        self.n_withheld = 0  # slots, while step time is over its target
        self._on_change: Callable[[], None] = lambda: None
        self.n_waiting_max = 0
        self.before_prepare: Callable[[], None] = lambda: None  # on the preparation thread

    def prepare(self, request: GenerateRequest, /) -> Prepared:
        self.n_prepared += 1
        self.before_prepare()
        prompt = tokenise("".join(message["content"] for message in request.messages))
        if request.messages[0]["role"] == "assistant":
            raise TemplateRefused("a conversation begins with the user")
        if len(prompt) >= self.info.n_ctx:
            raise PromptTooLong(len(prompt), self.info.n_ctx)
        room = self.info.n_ctx - len(prompt)
        return Prepared(request=request, prompt=prompt, max_tokens=min(request.max_tokens or room, room))

    def submit(self, prepared: Prepared, on_event: Listener, /) -> FakeGeneration:
        if self.is_closed:
            raise EngineClosed("closed")
        if len(self.running) >= self.info.max_inflight + self.n_waiting_max:
            raise EngineBusy("full")
        self.requests.append(prepared.request)
        generation = FakeGeneration(self, prepared, on_event)
        self.running.append(generation)
        return generation

    def capacity(self) -> Capacity:
        return Capacity(
            inflight=len(self.running),
            decoding=len(self.running),
            max_inflight=self.info.max_inflight,
            n_admissible=0 if self.is_closed else self.info.max_inflight - self.n_withheld,
            step_ms=1.0,
            step_age_s=self.step_age_s,
            kv_promised_tokens=sum(generation.prepared.max_tokens for generation in self.running),
            tokens_per_second=0.0,
            prompt_tokens_per_second=1000.0,
            n_sessions=len(self.running),
            kv_bytes=0,
            kv_promised_bytes=0,
        )

    def watch(self, on_change: Callable[[], None], /) -> None:
        self._on_change = on_change

    def withhold(self, n_slots: int) -> None:
        """Let step times allow `n_slots` fewer than there are."""
        self.n_withheld = n_slots
        self._on_change()

    def step(self, n_steps: int = 1) -> None:
        """Let every generation that is not paused say its next token."""
        for _ in range(n_steps):
            for generation in tuple(self.running):
                if not generation.is_paused:
                    generation.step()

    def finish(self) -> None:
        """Step until nothing runs."""
        while self.running:
            self.step()

    def end(self, generation: FakeGeneration) -> None:
        if generation in self.running:
            self.running.remove(generation)


@dataclass(frozen=True, slots=True)
class Body:
    data: bytes
    progress: bytes


@dataclass(frozen=True, slots=True)
class Released:
    pass


Frame: TypeAlias = Head | Body | End | Fail | Released


@dataclass(slots=True)
class ScriptedLane:
    """What a worker has said about one lane."""

    frames: list[Frame] = field(default_factory=list)

    @property
    def head(self) -> Head | None:
        return next((frame for frame in self.frames if isinstance(frame, Head)), None)

    @property
    def data(self) -> bytes:
        return b"".join(frame.data for frame in self.frames if isinstance(frame, Body))

    @property
    def progress(self) -> bytes:
        return b"".join(frame.progress for frame in self.frames if isinstance(frame, Body))

    @property
    def is_over(self) -> bool:
        return bool(self.frames) and isinstance(self.frames[-1], End | Fail | Released)


class ScriptedRing:
    """A ring whose ingress is the test: it grants what it likes, and reads what the worker says."""

    def __init__(self) -> None:
        self.hello: Hello | None = None
        self.credits: list[int] = []
        self.heartbeats: list[Heartbeat] = []
        self.lanes: dict[LaneRef, ScriptedLane] = {}
        self.worked_on: list[LaneRef] = []
        self.is_draining = False
        self.is_attached = False
        self.broken: type[Exception] | None = None  # raised by every body
        self._listener: RingListener | None = None
        self._changed = asyncio.Event()

    # -- the test's side --

    @property
    def worker(self) -> RingListener:
        assert self._listener is not None, "no worker has attached"
        return self._listener

    def accept(self) -> None:
        self.is_attached = True
        self.worker.on_attached(self)

    def open(self, ref: LaneRef) -> ScriptedLane:
        """Expect frames of a lane."""
        lane = self.lanes[ref] = ScriptedLane()
        return lane

    def grant(self, grant: Grant) -> ScriptedLane:
        lane = self.open(grant.ref)
        self.worker.on_grant(self, grant)
        return lane

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the worker to have said enough."""
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    # -- the worker's side --

    def attach(self, hello: Hello, listener: RingListener) -> None:
        self.hello = hello
        self._listener = listener

    def credit(self, n_lanes: int) -> None:
        self.credits.append(n_lanes)
        self._changed.set()

    def head(self, ref: LaneRef, head: Head) -> None:
        self._say(ref, head)

    def body(self, ref: LaneRef, data: bytes, progress: bytes) -> None:
        if self.broken is not None:
            raise self.broken("the ring is broken")
        self._say(ref, Body(data, progress))

    def end(self, ref: LaneRef, end: End) -> None:
        self._say(ref, end)

    def fail(self, ref: LaneRef, fail: Fail) -> None:
        self._say(ref, fail)

    def release(self, ref: LaneRef) -> None:
        self._say(ref, Released())

    def working(self, ref: LaneRef) -> None:
        assert not self.lanes[ref].is_over
        self.worked_on.append(ref)
        self._changed.set()

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        self.heartbeats.append(heartbeat)
        self._changed.set()

    def draining(self) -> None:
        self.is_draining = True
        self._changed.set()

    def detach(self) -> None:
        self.is_attached = False

    def _say(self, ref: LaneRef, frame: Frame) -> None:
        lane = self.lanes[ref]
        assert not lane.is_over, f"{frame} after {lane.frames[-1]}"
        lane.frames.append(frame)
        self._changed.set()


def chat_grant(text: str, *, lane_id: int = 1, **fields: Any) -> Grant:
    """A lane whose request asks the fake engine to say `text`."""
    body = {"model": "echo", "messages": [{"role": "user", "content": text}], **fields}
    return Grant(
        ref=LaneRef(lane_id, 1),
        path="/v1/chat/completions",
        body=orjson.dumps(body),
        request_id=f"r{lane_id}",
        queued_ms=0.0,
    )


def prepare(grant: Grant, engine: TextEngine, created: int) -> PreparedJob:
    """A lane made ready that needs no summary."""
    ready = advance(preparation(grant, engine, created, Summaries().recall))
    assert isinstance(ready, PreparedJob)
    return ready


def next_claim(grant: Grant, progress: bytes) -> Grant:
    """The same lane for the next worker."""
    return replace(grant, ref=LaneRef(grant.ref.lane_id, grant.ref.claim + 1), progress=progress)
