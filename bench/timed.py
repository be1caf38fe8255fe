"""An engine whose answers take a known time and no computing: what stands under the workers of a bench fleet.

The first token comes at once, so a client's first byte tells when its request was taken up; the last comes
when the service time is over. Service times are spread evenly from half to one and a half of their mean: were
they all the same, slots that once began together would come free together for ever.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from llm_engine.errors import EngineBusy
from llm_engine.generation import Delta, Finished, GenerateRequest, Listener, Prepared, StopReason
from llm_engine.info import Capacity, EngineInfo

MODEL = "timed"
N_CTX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedConfig:
    """What an engine pretends: so many slots, so long for an answer on average, so many tokens in it."""

    slots: int
    service_s: float
    n_tokens: int = 1
    seed: int = 0


class TimedEngine:
    """Says `n_tokens` tokens at equal distances to every request. Thread: event loop."""

    def __init__(self, config: TimedConfig) -> None:
        self.info = EngineInfo(
            name=MODEL,
            aliases=(),
            file=MODEL,
            n_params=0,
            n_ctx=N_CTX,
            n_ctx_train=N_CTX,
            max_inflight=config.slots,
            fingerprint=MODEL,
        )
        self.fault: Exception | None = None  # never one
        self.running: set[TimedGeneration] = set()
        self._config = config
        self._chance = random.Random(config.seed)

    def prepare(self, request: GenerateRequest, /) -> Prepared:
        return Prepared(request=request, prompt=(1,), max_tokens=self._config.n_tokens)

    def submit(self, prepared: Prepared, on_event: Listener, /) -> "TimedGeneration":
        if len(self.running) >= self.info.max_inflight:
            raise EngineBusy("every slot is taken")
        service_s = self._config.service_s * self._chance.uniform(0.5, 1.5)
        generation = TimedGeneration(on_event, service_s, self._config.n_tokens, self.running.discard)
        self.running.add(generation)
        return generation

    def capacity(self) -> Capacity:
        n_running = len(self.running)
        return Capacity(
            inflight=n_running,
            decoding=n_running,
            max_inflight=self.info.max_inflight,
            n_admissible=self.info.max_inflight,
            step_ms=0.0,
            step_age_s=0.0,
            kv_promised_tokens=0,
            tokens_per_second=0.0,
            prompt_tokens_per_second=0.0,
            n_sessions=n_running,
            kv_bytes=0,
            kv_promised_bytes=0,
        )

    def watch(self, _on_change: Callable[[], None], /) -> None:
        """Nothing changes by itself here."""


class TimedGeneration:
    """One answer on its way; `on_end` hears of its end, whichever it is."""

    def __init__(
        self,
        on_event: Listener,
        service_s: float,
        n_tokens: int,
        on_end: Callable[["TimedGeneration"], object],
    ) -> None:
        self._on_event: Listener = on_event
        self._on_end = on_end
        self._service_s = service_s
        self._n_tokens = n_tokens
        self._n_said = 0
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self._timer: asyncio.Handle = self._loop.call_soon(self._say)

    def cancel(self) -> None:
        self._timer.cancel()
        self._on_end(self)

    def pause(self) -> None:
        raise AssertionError("paused: the client did not keep up")

    def resume(self) -> None:
        pass

    def _say(self) -> None:
        self._n_said += 1
        due = self._began_at + self._service_s * self._n_said / self._n_tokens
        is_last = self._n_said == self._n_tokens
        self._timer = self._loop.call_at(due, self._finish if is_last else self._say)
        self._on_event(Delta("x", (1,)))

    def _finish(self) -> None:
        self._on_end(self)
        self._on_event(
            Finished(
                reason=StopReason.STOP,
                n_prompt=1,
                n_cached=0,
                n_completion=self._n_tokens,
                prefill_ms=0.0,
                decode_ms=self._service_s * 1000,
            )
        )
