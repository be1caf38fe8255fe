"""`llm-worker`, except that its engine does not survive some requests.

It ends as an abort in llama.cpp would end it, or stands still in a step that never ends, while everything
else in the process goes on.

Run by: test_attempts.py and test_stalls.py, as `python -m tests.network.mortal_worker`.
"""

import os
import resource
import sys
import threading
from collections.abc import Callable
from unittest.mock import patch

from llm_engine.backend import LlamaBackend
from llm_engine.engine import Engine
from llm_engine.generation import Delta, Event, GenerateRequest, Generation, Listener, Prepared
from llm_engine.llama import Logits
from llm_engine.plan import Plan
from llm_worker import cli

DEADLY = "the question that no engine survives"
DEADLY_LATER = "the question whose answer no engine survives"
STALLING = "the question in whose answer engines stop"
N_TOKENS = 6  # of an answer until then
STANDSTILL_S = 2.0  # sooner than in earnest


class MortalEngine(Engine):
    """An engine that a prompt can kill, and its process with it, or stop."""

    def prepare(self, request: GenerateRequest) -> Prepared:
        if _asks(request, DEADLY):
            os.abort()
        return super().prepare(request)

    def submit(self, request: GenerateRequest | Prepared, on_event: Listener | None = None) -> Generation:
        assert isinstance(request, Prepared)
        assert on_event is not None
        if _asks(request.request, DEADLY_LATER):
            on_event = _After(N_TOKENS, os.abort, on_event)
        elif _asks(request.request, STALLING):
            on_event = _After(N_TOKENS, StallingBackend.stop.set, on_event)
        return super().submit(request, on_event)


class StallingBackend(LlamaBackend):
    """A backend whose next step never ends, once it is told so."""

    stop = threading.Event()

    def run(self, plan: Plan) -> Logits:
        if self.stop.is_set():
            threading.Event().wait()
        return super().run(plan)


class _After:
    """Hears events, and acts at the token after the first `n_tokens`."""

    def __init__(self, n_tokens: int, act: Callable[[], None], on_event: Listener) -> None:
        self._n_left = n_tokens
        self._act = act
        self._on_event = on_event

    def __call__(self, event: Event) -> None:
        self._on_event(event)
        if isinstance(event, Delta):
            self._n_left -= 1
            if self._n_left < 0:
                self._act()


def _asks(request: GenerateRequest, question: str) -> bool:
    return any(question in message["content"] for message in request.messages)


def main() -> int:
    """Return the exit status, if it lives so long."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its remains are of no interest
    with (
        patch("llm_worker.cli.Engine", MortalEngine),
        patch("llm_engine.engine.LlamaBackend", StallingBackend),
        patch("llm_worker.worker.STANDSTILL_S", STANDSTILL_S),
    ):
        return cli.main()


if __name__ == "__main__":
    sys.exit(main())
