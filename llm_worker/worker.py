"""The worker: how many lanes it takes, from which rings, and what becomes of them.

It pulls: what is free is offered to its rings (`offers.py`), and the moment a place is taken or given back
each hears its new number. A grant that crosses such a message is released. Parsing, templating and tokenising
happen on the preparation thread; what takes too long there fails alone.

Owns: the open jobs and the free places. Thread: event loop.
Called by: its rings (`RingListener`), and whoever runs the process (`start`, `drain`, `close`).
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath

from llm_engine.errors import EngineBusy, EngineClosed
from llm_ingress.api.errors import deadline_passed
from llm_ingress.labels import MAX_LABEL_CHARS, is_label
from llm_ingress.wire import Grant, Heartbeat, Hello, LaneRef, ModelCard
from llm_worker.compaction import Policy
from llm_worker.engine import TextEngine
from llm_worker.errors import WorkerConfigError
from llm_worker.job import Job, JobState
from llm_worker.offers import PATIENCE_S, Demand, share_out
from llm_worker.preparation import PreparedJob, Unsummarised, preparation
from llm_worker.preparation_thread import PreparationThread, Step
from llm_worker.ring import Ring
from llm_worker.snapshot import RingFacts, WorkerSnapshot
from llm_worker.summaries import Summaries

logger = logging.getLogger(__name__)

# An engine whose step takes longer is taken to stand still: it gets nothing more, and no lane in it moves.
STANDSTILL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """A worker's options. Durations in seconds."""

    name: str = "local"
    aliases: tuple[str, ...] = ()  # of the model, beside its own
    takeover: bool = False  # take the place of another instance of this worker at its ingresses
    heartbeat_interval_s: float = 1.0
    preparation_timeout_s: float = 30.0
    compaction: Policy = Policy.NONE  # of requests that do not say

    def __post_init__(self) -> None:
        for name in (self.name, *self.aliases):
            if not is_label(name):
                must = f"1 to {MAX_LABEL_CHARS} printable characters"
                raise WorkerConfigError(f"the name {name[:40]!r} is none, must be {must}")
        for name in ("heartbeat_interval_s", "preparation_timeout_s"):
            value = getattr(self, name)
            if not value > 0:
                raise WorkerConfigError(f"{name} is {value}, must be more than 0")


@dataclass(slots=True, eq=False)
class _RingView:
    """One ring as the worker sees it."""

    ring: Ring
    is_attached: bool = False
    is_draining: bool = False
    is_leaving: bool = False  # as soon as nothing is held from it
    demand: Demand = field(default_factory=Demand)


class Worker:
    """Serves the lanes of its rings with one engine.

    `on_fault` is called once if the engine ends by itself: nothing it held will finish here, and nothing more
    is taken.
    """

    def __init__(
        self,
        engine: TextEngine,
        config: WorkerConfig,
        rings: Iterable[Ring],
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._on_fault = on_fault
        self._config = config
        self._rings = {ring: _RingView(ring) for ring in rings}
        self._jobs: dict[tuple[Ring, LaneRef], Job] = {}
        self._preparing = PreparationThread(self._prepared)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._n_grants = 0
        self._summaries = Summaries()
        self._n_summaries = 0  # that the engine was asked for
        self._idle = asyncio.Event()
        self._idle.set()
        self._hello = Hello(
            worker=config.name,
            instance_id=uuid.uuid4().hex,
            model=model_card(engine, created=int(time.time()), aliases=config.aliases),
            max_inflight=engine.info.max_inflight,
            takeover=config.takeover,
        )
        self._is_draining = False
        self._has_failed = False
        self._engine_refused = False
        self._engine_stands = False
        self._heartbeat_is_due = False

    # -- its life --

    def start(self) -> None:
        """Present the worker to its rings and begin to pull."""
        self._engine.watch(self._offer)
        for ring in self._rings:
            ring.attach(self._hello, self)
        self._beat()

    def add_ring(self, ring: Ring) -> None:
        """Pull from one more ring, from now on."""
        self._rings[ring] = _RingView(ring)
        ring.attach(self._hello, self)

    def remove_ring(self, ring: Ring) -> None:
        """Take nothing new from a ring, and leave it when what is held from it has ended."""
        view = self._rings[ring]
        view.is_leaving = True
        if view.is_attached:
            ring.draining()
        self._offer()
        self._leave_if_done(view)

    def snapshot(self) -> WorkerSnapshot:
        """Return the worker as it is now."""
        return WorkerSnapshot(
            name=self._config.name,
            model=self._hello.model,
            capacity=self._capacity(),
            rings=tuple(
                RingFacts(
                    name=str(view.ring),
                    is_attached=view.is_attached,
                    is_draining=view.is_draining or view.is_leaving,
                )
                for view in self._rings.values()
            ),
            n_jobs=len(self._jobs),
            n_summaries=self._n_summaries,
            is_draining=self._is_draining,
            has_failed=self._has_failed,
        )

    async def drain(self) -> None:
        """Take nothing new; return when what is held has ended."""
        logger.info("worker %s drains: %d lanes open", self._config.name, len(self._jobs))
        self._is_draining = True
        self._offer()
        for view in self._attached():
            view.ring.draining()
        await self._idle.wait()

    def close(self) -> None:
        """Leave the rings with whatever is still open. Idempotent."""
        self._is_draining = True
        for timer in (self._timer, self._patience):
            if timer is not None:
                timer.cancel()
        for view in self._rings.values():
            view.is_attached = False
            view.ring.detach()
        for job in tuple(self._jobs.values()):
            job.cancel()
        self._preparing.close()

    # -- from the rings --

    def on_attached(self, ring: Ring) -> None:
        logger.info("worker %s is attached to %s", self._config.name, ring)
        self._rings[ring] = _RingView(ring, is_attached=True)
        if self._is_draining:
            ring.draining()
        self._offer()

    def on_detached(self, ring: Ring) -> None:
        view = self._rings[ring]
        view.is_attached = False
        for job in self._jobs_of(ring):
            job.cancel()
        self._leave_if_done(view)

    def on_drain(self, ring: Ring) -> None:
        logger.info("%s drains; worker %s takes no more of its lanes", ring, self._config.name)
        self._rings[ring].is_draining = True
        self._offer()

    def on_grant(self, ring: Ring, grant: Grant) -> None:
        view = self._rings[ring]
        self._n_grants += 1
        view.demand.granted(had_waited=grant.queued_ms > 0, turn=self._n_grants, now=self._loop.time())
        if self.n_free < 1:
            ring.release(grant.ref)
            view.demand.gave_back()
            return
        job = Job(ring, grant.ref, self._forget)
        self._jobs[ring, grant.ref] = job
        self._idle.clear()
        steps = preparation(
            grant, self._engine, int(time.time()), self._summaries.recall, self._config.compaction
        )
        self._preparing.submit(job, steps)
        self._offer()

    def on_cancel(self, ring: Ring, ref: LaneRef) -> None:
        job = self._jobs.get((ring, ref))
        if job is not None:
            job.cancel()

    def on_pause(self, ring: Ring, ref: LaneRef) -> None:
        job = self._jobs.get((ring, ref))
        if job is not None:
            job.pause()

    def on_resume(self, ring: Ring, ref: LaneRef) -> None:
        job = self._jobs.get((ring, ref))
        if job is not None:
            job.resume()

    # -- what the preparation thread has done --

    def _prepared(self, job: Job, step: Step) -> None:
        if job.state is JobState.PREPARING:
            try:
                self._begin(job, step)
            except Exception:
                job.crash()
        self._offer()

    def _begin(self, job: Job, step: Step) -> None:
        error = step.exception()
        if error is not None:
            job.reject(error)
            return
        try:
            match step.result():
                case PreparedJob() as ready:
                    self._keep_summary(ready)
                    job.begin(self._engine, ready)
                case Unsummarised(prepared, steps):
                    job.summarise(self._engine, prepared, partial(self._preparing.submit, job, steps))
                    self._n_summaries += 1
        except (EngineBusy, EngineClosed) as refusal:
            logger.warning("lane %d goes back: %s", job.ref.lane_id, refusal)
            # Until the next beat: offering again at once would only bring the same lane again.
            self._engine_refused = True
            job.release()

    def _keep_summary(self, ready: PreparedJob) -> None:
        """Find it again when the next turn comes."""
        if ready.digest is not None and ready.start.compaction is not None:
            self._summaries.keep(ready.digest, ready.start.compaction.summary)

    def _fail_what_is_stuck(self) -> None:
        limit_s = self._config.preparation_timeout_s
        for job in self._preparing.abandon_stuck(limit_s):
            logger.warning("lane %d was not prepared in %g s", job.ref.lane_id, limit_s)
            job.refuse(deadline_passed(f"The request could not be prepared within {limit_s:g} seconds."))

    # -- places, credit, heartbeat --

    @property
    def n_free(self) -> int:
        """Lanes this worker would take now.

        A cancelled generation leaves the engine within a step; its place is free at once all the same, since
        whoever gets it needs longer than that to be prepared.
        """
        if self._is_draining or self._engine_refused or self._engine_stands:
            return 0
        capacity = self._engine.capacity()
        n_places = min(capacity.max_inflight - self._preparing.n_stuck, capacity.n_admissible)
        return max(0, n_places - len(self._jobs))

    def _offer(self) -> None:
        """Tell each ring what it is offered, where that is not what it believes, and soon the heartbeat."""
        views = [view for view in self._attached() if not view.is_draining and not view.is_leaving]
        now = self._loop.time()
        parts = share_out(self.n_free, [view.demand for view in views], now)
        offers = dict(zip(views, parts, strict=True))
        for view in self._attached():
            offer = offers.get(view, 0)
            if view.demand.offer(offer, now):
                view.ring.credit(offer)
        # One has nothing, for now: it is offered what another does not use.
        if any(parts) and not all(parts) and self._patience is None:
            self._patience = self._loop.call_later(PATIENCE_S, self._lose_patience)
        if not self._heartbeat_is_due:
            self._heartbeat_is_due = True
            self._loop.call_soon(self._send_heartbeat)

    def _lose_patience(self) -> None:
        self._patience = None
        self._offer()

    def _beat(self) -> None:
        """What happens every interval: offer, signs of life, an end to what is stuck or has failed."""
        self._timer = self._loop.call_later(self._config.heartbeat_interval_s, self._beat)
        self._engine_refused = False
        self._fail_what_is_stuck()
        self._look_at_engine()
        self._offer()
        self._tell_what_moves()
        if self._engine.fault is not None and not self._has_failed:
            logger.error("worker %s: its engine has failed: %r", self._config.name, self._engine.fault)
            self._has_failed = True
            self._on_fault()

    def _look_at_engine(self) -> None:
        """Note, and log once, whether it goes on. A cancel does not free a place in one that stands still."""
        stands = self._engine.capacity().step_age_s > STANDSTILL_S
        if stands != self._engine_stands:
            self._engine_stands = stands
            if stands:
                logger.warning("the engine stands still: no step has ended for %g s", STANDSTILL_S)
            else:
                logger.info("the engine goes on")

    def _tell_what_moves(self) -> None:
        """Say of each lane without an answer yet that it is being worked on, unless it is not."""
        for job in self._jobs.values():
            if job in self._preparing or (job.is_quiet and not self._engine_stands):
                job.ring.working(job.ref)

    def _send_heartbeat(self) -> None:
        self._heartbeat_is_due = False
        heartbeat = self._capacity()
        for view in self._attached():
            view.ring.heartbeat(heartbeat)

    def _capacity(self) -> Heartbeat:
        capacity = self._engine.capacity()
        return Heartbeat(
            inflight=capacity.inflight + len(self._preparing),
            decoding=capacity.decoding,
            max_inflight=capacity.max_inflight,
            available_slots=self.n_free,
            step_ms=capacity.step_ms,
            step_age_s=capacity.step_age_s,
            kv_promised_tokens=capacity.kv_promised_tokens,
            tokens_per_second=capacity.tokens_per_second,
            prompt_tokens_per_second=capacity.prompt_tokens_per_second,
            sessions=capacity.n_sessions,
            kv_bytes=capacity.kv_bytes,
            kv_promised_bytes=capacity.kv_promised_bytes,
        )

    def _attached(self) -> list[_RingView]:
        return [view for view in self._rings.values() if view.is_attached]

    def _jobs_of(self, ring: Ring) -> list[Job]:
        return [job for job in self._jobs.values() if job.ring is ring]

    def _leave_if_done(self, view: _RingView) -> None:
        """Part with a ring that is to be left, once nothing is held from it."""
        ring = view.ring
        if view.is_leaving and ring in self._rings and not self._jobs_of(ring):
            logger.info("worker %s leaves %s", self._config.name, ring)
            del self._rings[ring]
            ring.detach()

    def _forget(self, job: Job) -> None:
        """A job has closed."""
        del self._jobs[job.ring, job.ref]
        self._preparing.drop(job)
        if not self._jobs:
            self._idle.set()
        self._offer()
        view = self._rings.get(job.ring)
        if view is not None:
            self._leave_if_done(view)


def model_card(engine: TextEngine, *, created: int, aliases: tuple[str, ...] = ()) -> ModelCard:
    """What the ingress may know of an engine's model. Units: `created` in unix seconds."""
    info = engine.info
    return ModelCard(
        name=info.name,
        aliases=tuple(dict.fromkeys((*info.aliases, *aliases))),
        file=PurePath(info.file).name,
        n_params=info.n_params,
        n_ctx=info.n_ctx,
        fingerprint=info.fingerprint,
        created=created,
    )
