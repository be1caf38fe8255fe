"""One claim seen from the worker, head to end: what the engine says about it goes to its ring.

    SUMMARISING            (where the conversation outgrew the context; at most a bounded number of times)
      |     ^
      v     |
    PREPARING --begin--> RUNNING --finished, failed, cancelled--> CLOSED
        `--------refused, released, failed, cancelled---------------^

A head goes back only once the engine has admitted the request, so every refusal is a status of its own. A job
closes exactly once, whatever goes wrong in it, and says so to its worker. It has one generation at a time: a
summary takes the place in the engine that the answer will have.

Owns: the state of one claim. Touched by: `worker.py` and the engine's events, on the event loop.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from llm_engine.errors import EngineClosed, RequestError
from llm_engine.generation import Delta, Event, Failed, Finished, Prepared, StopReason
from llm_ingress.api.errors import ApiError
from llm_ingress.wire import End, Fail, FinishReason, Head, LaneRef
from llm_worker.answer import (
    Answer,
    ChunkEncoder,
    CompletionEncoder,
    Identity,
    StreamedAnswer,
    Usage,
    WholeAnswer,
    json_head,
)
from llm_worker.compaction import Compaction
from llm_worker.engine import RunningGeneration, TextEngine
from llm_worker.errors import IllegalJobMove, ProgressError
from llm_worker.preparation import PreparedJob
from llm_worker.progress import ChoiceProgress, Finish, Start
from llm_worker.ring import Ring
from llm_worker.translate import refusal
from llm_worker.turn_answer import TurnAnswer

logger = logging.getLogger(__name__)

# An answer that was complete when its worker was lost: the client has its real head since then, and ignores
# this one, which only tells the ingress that the claim is answered.
ANSWERED_HEAD = Head(status=200, headers=())

FINGERPRINT_CHARS = 12

FINISH_REASONS = {StopReason.STOP: FinishReason.STOP, StopReason.LENGTH: FinishReason.LENGTH}


class JobState(StrEnum):
    """Where a claim is on its way through the worker."""

    PREPARING = "preparing"
    SUMMARISING = "summarising"
    RUNNING = "running"
    CLOSED = "closed"


NEXT = {
    JobState.PREPARING: {JobState.SUMMARISING, JobState.RUNNING, JobState.CLOSED},
    JobState.SUMMARISING: {JobState.PREPARING, JobState.CLOSED},
    JobState.RUNNING: {JobState.CLOSED},
    JobState.CLOSED: set[JobState](),
}


@dataclass(slots=True, eq=False)
class _Summary:
    """One being written, and whom its text is for."""

    on_written: Callable[[str], None]
    pieces: list[str] = field(default_factory=list)


class Job:
    """One claim. `on_closed` is called once, after the last word to the ring."""

    def __init__(self, ring: Ring, ref: LaneRef, on_closed: Callable[["Job"], None]) -> None:
        self.ring = ring
        self.ref = ref
        self.state = JobState.PREPARING
        self._on_closed = on_closed
        self.is_quiet = True  # no token of this claim has come, so nothing of it is sent
        self._paused = False
        self._start: Start | None = None
        self._answer: Answer | None = None
        self._generation: RunningGeneration | None = None
        self._summary: _Summary | None = None

    # -- from the preparation --

    def summarise(self, engine: TextEngine, prepared: Prepared, on_written: Callable[[str], None]) -> None:
        """Have a summary written; its text goes to `on_written`, and the job is in preparation again.

        Raises: EngineBusy, EngineClosed; the lane is then still to be released.
        """
        self._submit(engine, prepared, JobState.SUMMARISING)
        self._summary = _Summary(on_written)

    def begin(self, engine: TextEngine, ready: PreparedJob) -> None:
        """Submit to the engine, and once it admits, begin the answer.

        Raises: EngineBusy, EngineClosed; the lane is then still to be released.
        """
        assert self.state is JobState.PREPARING, f"lane {self.ref.lane_id} is {self.state}"
        if ready.start.compaction is not None:
            self._log_compaction(ready.start.compaction)
        if ready.earlier is not None and ready.earlier.finish is not None:
            self._end_answered(ready, ready.earlier, ready.earlier.finish)
            return
        self._submit(engine, ready.prepared, JobState.RUNNING)
        self._start = ready.start
        self._answer = open_answer(self.ring, self.ref, ready)
        self._answer.begin()

    def _submit(self, engine: TextEngine, prepared: Prepared, state: JobState) -> None:
        assert self.state is JobState.PREPARING, f"lane {self.ref.lane_id} is {self.state}"
        self._generation = engine.submit(prepared, self.on_event)
        self._move(state)
        if self._paused:
            self._generation.pause()

    def _log_compaction(self, made: Compaction) -> None:
        logger.info(
            "lane %d is shortened: turns=%d n_before=%d n_after=%d summaries=%d",
            self.ref.lane_id,
            made.n_replaced,
            made.n_before,
            made.n_after,
            made.n_summaries,
        )

    def _end_answered(self, ready: PreparedJob, earlier: ChoiceProgress, finish: Finish) -> None:
        """End a claim whose answer was complete when its last worker was lost."""
        usage = Usage(
            n_prompt=ready.start.n_prompt,
            n_cached=finish.n_cached,
            n_completion=len(earlier.tokens),
            compaction=ready.start.compaction,
        )
        self.ring.head(self.ref, ANSWERED_HEAD)
        self._end(open_answer(self.ring, self.ref, ready), finish.reason, usage)

    def reject(self, error: BaseException) -> None:
        """Answer for a preparation that failed."""
        match error:
            case ApiError():
                self.refuse(error)
            case RequestError():
                self.refuse(refusal(error))
            case EngineClosed():
                self.release()
            case ProgressError():
                logger.warning("lane %d cannot be continued: %s", self.ref.lane_id, error)
                self.fail(str(error), retryable=True)
            case _:
                logger.error("preparing lane %d failed", self.ref.lane_id, exc_info=error)
                self.fail("the request could not be prepared", retryable=False)

    # -- from the engine --

    def on_event(self, event: Event) -> None:
        """Pass on what the engine says. Whatever goes wrong here ends this job and no other."""
        try:
            if self.state is JobState.RUNNING:
                self._take(event)
            elif self.state is JobState.SUMMARISING:
                self._take_of_summary(event)
        except Exception:
            self.crash()

    def _take(self, event: Event) -> None:
        assert self._answer is not None, f"lane {self.ref.lane_id} runs without an answer"
        match event:
            case Delta():
                self.is_quiet = False
                self._answer.delta(event)
            case Finished():
                self._finish(event, self._answer)
            case Failed():
                self._fail_in_engine(event)
            case _:
                assert_never(event)

    def _take_of_summary(self, event: Event) -> None:
        assert self._summary is not None, f"lane {self.ref.lane_id} has no summary written"
        match event:
            case Delta():
                self._summary.pieces.append(event.text)
            case Finished():
                summary, self._summary, self._generation = self._summary, None, None
                self._move(JobState.PREPARING)
                summary.on_written("".join(summary.pieces))
            case Failed():
                self._fail_in_engine(event)
            case _:
                assert_never(event)

    def _fail_in_engine(self, failed: Failed) -> None:
        logger.warning(
            "lane %d failed in the engine: %s",
            self.ref.lane_id,
            failed.error,
            exc_info=failed.error.__cause__,
        )
        self.fail("the engine failed", retryable=True)

    def _finish(self, finished: Finished, answer: Answer) -> None:
        assert self._start is not None, f"lane {self.ref.lane_id} runs without a start"
        usage = Usage(
            n_prompt=self._start.n_prompt,
            # A continuation may find cached what an earlier attempt generated; that is no prompt.
            n_cached=min(finished.n_cached, self._start.n_prompt),
            n_completion=finished.n_completion,
            compaction=self._start.compaction,
        )
        answer.finish(finished.reason, usage)
        self._end(answer, finished.reason, usage, finished)

    # -- from the ingress --

    def cancel(self) -> None:
        """Nobody wants the answer any more; nothing is said to the ring."""
        if self.state is not JobState.CLOSED:
            self._cancel_generation()
            with self._last_word():
                pass

    def pause(self) -> None:
        """Hold it: its client reads too slowly."""
        self._paused = True
        if self._generation is not None:
            self._generation.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False
        if self._generation is not None:
            self._generation.resume()

    # -- the ways to close --

    def crash(self) -> None:
        """End after an unforeseen exception, which is being handled; nobody but this lane suffers."""
        logger.exception("lane %d failed in the worker", self.ref.lane_id)
        if self.state is not JobState.CLOSED:
            self._cancel_generation()
            self.fail("the worker failed", retryable=False)

    def release(self) -> None:
        """Give the lane back unserved."""
        with self._last_word():
            self.ring.release(self.ref)

    def fail(self, message: str, *, retryable: bool) -> None:
        """End in a failure. The client may read `message`."""
        with self._last_word():
            self.ring.fail(self.ref, Fail(message=message, retryable=retryable))

    def refuse(self, error: ApiError) -> None:
        """Answer with an error status."""
        body = error.body()
        with self._last_word():
            self.ring.head(self.ref, json_head(error.status, error.headers))
            self.ring.body(self.ref, body, b"")
            self.ring.end(self.ref, End(finish_reason=FinishReason.REFUSED))

    def _end(
        self, answer: Answer, reason: StopReason, usage: Usage, finished: Finished | None = None
    ) -> None:
        end = End(
            finish_reason=FINISH_REASONS[reason],
            n_prompt=usage.n_prompt,
            n_cached=usage.n_cached,
            n_completion=usage.n_completion,
            prefill_ms=finished.prefill_ms if finished else 0.0,
            decode_ms=finished.decode_ms if finished else 0.0,
            record=answer.record(reason, usage),
        )
        with self._last_word():
            self.ring.end(self.ref, end)

    def _cancel_generation(self) -> None:
        if self._generation is not None:
            self._generation.cancel()

    @contextmanager
    def _last_word(self) -> Iterator[None]:
        """Close around what is said last: nothing if it is illegal, and the place is given back anyway."""
        self._move(JobState.CLOSED)
        self._generation = None
        self._answer = None
        try:
            yield
        finally:
            self._on_closed(self)

    def _move(self, state: JobState) -> None:
        if state not in NEXT[self.state]:
            raise IllegalJobMove(
                f"the job of lane {self.ref.lane_id} is {self.state} and cannot become {state}"
            )
        self.state = state


def open_answer(ring: Ring, ref: LaneRef, ready: PreparedJob) -> Answer:
    """The answer of a claim in the form its request asks for."""
    start, earlier = ready.start, ready.earlier
    if ready.turn is not None:
        return TurnAnswer(ring, ref, ready.turn, start, earlier=earlier)
    identity = Identity(
        id=start.id,
        created=start.created,
        model=ready.chat.model,
        system_fingerprint=f"fp_{start.fingerprint[:FINGERPRINT_CHARS]}",
    )
    if ready.chat.streams:
        chunks = ChunkEncoder(identity, include_usage=ready.chat.include_usage)
        return StreamedAnswer(ring, ref, chunks, start, earlier=earlier)
    return WholeAnswer(ring, ref, CompletionEncoder(identity), start, earlier=earlier)
