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

from llm_engine.errors import EngineError
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

    `max_tokens` None means up to the room left. `resumed` are tokens an earlier attempt already
    generated and delivered: they are computed anew as part of the prompt, counted as completion,
    and never delivered again.
    """

    messages: tuple[Message, ...]
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    think: bool = False
    choice: int = 0
    resumed: tuple[int, ...] = ()

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
