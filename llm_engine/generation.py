"""What crosses between a caller and the step thread: the request inward, events and a handle outward.

Owns: the undelivered events of one generation (on the caller's side).
Called by: `engine.py`, which makes a `Generation` for each admitted request and delivers its events.
"""

import asyncio
import queue
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self, TypeAlias

from llm_engine.doorbell import Doorbell
from llm_engine.errors import EngineError, RequestError
from llm_engine.sampling import SamplingParams

Message: TypeAlias = Mapping[str, Any]  # {"role": ..., "content": str, ...}, as chat templates take it


class StopReason(StrEnum):
    """Why a generation finished."""

    STOP = "stop"  # end-of-generation token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the slot's context
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One generation asked for.

    `max_tokens` None means up to the room left; a stop string has at least one character. `resumed` are
    tokens an earlier attempt already generated and delivered: they are computed anew as part of the
    prompt, counted as completion, and never delivered again.

    Raises: RequestError naming field and value.
    """

    messages: tuple[Message, ...]
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    think: bool = False
    choice: int = 0
    resumed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}: it must be at least 1")
        if "" in self.stop:
            raise RequestError("stop holds an empty string: it would end every answer")

    @classmethod
    def user(cls, text: str, **options: Any) -> Self:
        """A request of one user message."""
        return cls(messages=({"role": "user", "content": text},), **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request templated, tokenised and found to fit: what `Engine.prepare` returns.

    `max_tokens` is clamped to the room left in the slot's context and at least 1.
    """

    request: GenerateRequest
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New text, in whole characters, and the tokens it stands for. Either may be empty.

    Text that could still turn out to be part of a stop string or of a character is held back, so tokens
    can come before their text; every token comes in exactly one delta.
    """

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of a generation that was not a failure. Units: tokens, milliseconds."""

    reason: StopReason
    n_prompt: int
    n_cached: int
    n_completion: int  # resumed tokens and the end-of-generation token included
    prefill_ms: float
    decode_ms: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a generation that failed."""

    error: EngineError


Event: TypeAlias = Delta | Finished | Failed
Listener: TypeAlias = Callable[[Event], None]


class Mailbox:
    """Where the events of one generation wait for its caller.

    With a doorbell, `put` and everything else happen on its event loop; without one, the step thread puts and
    the calling thread takes. It is the generation's key on the step thread, which so never holds the handle:
    a dropped handle can be collected and cancel.
    """

    def __init__(self, doorbell: Doorbell["Mail"] | None, listener: Listener | None) -> None:
        self.doorbell = doorbell
        self.is_over = False  # its end was put
        self._listener = listener
        self._events: deque[Event] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self._thread_events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        self.is_over = not isinstance(event, Delta)
        if self._listener is not None:
            self._listener(event)
        elif self.doorbell is None:
            self._thread_events.put(event)
        else:
            self._events.append(event)
            if self._arrived is not None and not self._arrived.done():
                self._arrived.set_result(None)

    def mute(self) -> None:
        """Let a listener hear nothing more."""
        if self._listener is not None:
            self._listener = _ignore

    async def next(self) -> Event:
        assert self.doorbell is not None, "submitted without a running event loop: iterate with `for`"
        while not self._events:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        return self._events.popleft()

    def next_in_thread(self) -> Event:
        assert self.doorbell is None, "submitted on an event loop: iterate with `async for`"
        return self._thread_events.get()


Mail: TypeAlias = list[tuple[Mailbox, Event]]  # the events of one step for one event loop


def _ignore(_event: Event) -> None:
    """Hear an event and do nothing."""


class Control(StrEnum):
    """What a handle asks of the engine."""

    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"


class Generation:
    """The caller's handle on one generation; made by `Engine.submit`.

    An iterator of `Delta`s and one `Finished` or `Failed`: `async for` when it was submitted on an event
    loop, `for` otherwise. Cancelling takes effect within one step. Closing or dropping it cancels.
    """

    def __init__(self, mailbox: Mailbox, control: Callable[[Mailbox, Control], None]) -> None:
        self._mailbox = mailbox
        self._control = control
        self._is_read = False  # to its end

    def cancel(self) -> None:
        """End it; an iterator then comes to `Finished` with reason cancelled, a listener to nothing."""
        self._mailbox.mute()
        self._control(self._mailbox, Control.CANCEL)

    def pause(self) -> None:
        """Leave it out of the batch; its cells stay."""
        self._control(self._mailbox, Control.PAUSE)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._control(self._mailbox, Control.RESUME)

    def close(self) -> None:
        """Cancel what still runs. Idempotent."""
        if not self._mailbox.is_over:
            self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._is_read:
            raise StopAsyncIteration
        return self._take(await self._mailbox.next())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        if self._is_read:
            raise StopIteration
        return self._take(self._mailbox.next_in_thread())

    def _take(self, event: Event) -> Event:
        self._is_read = not isinstance(event, Delta)
        return event
