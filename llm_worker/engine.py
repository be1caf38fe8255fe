"""What an engine is to a worker: something that prepares requests and turns them into events.

`llm_engine.engine.Engine` is the one in use. The worker names only what it needs of it, so that another
source of tokens could stand under a worker, and so that the worker is tested without a model.
"""

from collections.abc import Callable
from typing import Protocol

from llm_engine.generation import GenerateRequest, Listener, Prepared
from llm_engine.info import Capacity, EngineInfo


class RunningGeneration(Protocol):
    """The handle on one admitted generation."""

    def cancel(self) -> None:
        """End it; its listener hears nothing more."""

    def pause(self) -> None:
        """Leave it out of the batch; its cells stay."""

    def resume(self) -> None:
        """Go on after `pause`."""


class TextEngine(Protocol):
    """An engine with its model resident."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def fault(self) -> Exception | None:
        """What ended it before it was closed; None as long as it works."""

    def prepare(self, request: GenerateRequest, /) -> Prepared:
        """Template, tokenise and measure. Thread: any. Raises: RequestError."""

    def submit(self, prepared: Prepared, on_event: Listener, /) -> RunningGeneration:
        """Admit; events reach the listener on the event loop, never from inside this call.

        Raises: EngineBusy, EngineClosed.
        """

    def capacity(self) -> Capacity:
        """How busy it is now. Thread: any."""

    def watch(self, on_change: Callable[[], None], /) -> None:
        """Call `on_change` on the running event loop when capacity changes by itself.

        That includes the end of what was cancelled. What comes of `submit`, and of events, is known without.
        """
