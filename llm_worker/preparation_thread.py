"""The jobs that are being made ready, off the event loop.

Each step of `preparation.py` is a piece of work for one thread, and comes back as a future on the event loop.
A piece that takes too long fails its job alone; its thread still takes of the machine, so that counts for as
long as it runs.

Owns: that thread, which job's step it has, and what it never finished. Thread: event loop.
Called by: `worker.py`.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias

from llm_worker.background import BackgroundThread
from llm_worker.job import Job
from llm_worker.preparation import PreparedJob, Steps, Unsummarised, advance

Step: TypeAlias = Future[PreparedJob | Unsummarised]


class PreparationThread:
    """Does one step after the other; `on_done` hears of each that has ended, unless its loop was closed."""

    def __init__(self, on_done: Callable[[Job, Step], None]) -> None:
        self._on_done = on_done
        self._thread = BackgroundThread("llm-worker-preparation")
        self._loop = asyncio.get_running_loop()
        self._steps: dict[Job, Step] = {}
        self._stuck: set[Future[Any]] = set()

    def __len__(self) -> int:
        """Jobs whose step is queued, or being done."""
        return len(self._steps)

    def __contains__(self, job: Job) -> bool:
        return job in self._steps

    @property
    def n_stuck(self) -> int:
        """Steps that were left behind and still run."""
        return len(self._stuck)

    def submit(self, job: Job, steps: Steps, summary: str | None = None) -> None:
        """Have the next step done to make a job ready."""
        step = self._thread.submit(partial(advance, steps, summary))
        self._steps[job] = step
        step.add_done_callback(partial(self._come_back, job))

    def drop(self, job: Job) -> None:
        """Do not begin its step, if it has one that waits."""
        step = self._steps.pop(job, None)
        if step is not None:
            step.cancel()

    def abandon_stuck(self, limit_s: float) -> Iterable[Job]:
        """Leave behind a step that has been running for longer, and return whose it is."""
        stuck = self._thread.abandon_if_stuck(limit_s)
        if stuck is None:
            return ()
        self._stuck.add(stuck)
        return [job for job, step in self._steps.items() if step is stuck]

    def close(self) -> None:
        """End the thread when its present step is done."""
        self._thread.close()

    def _come_back(self, job: Job, step: Step) -> None:
        """Bring a finished step to the event loop. Thread: any."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, job, step)

    def _take(self, job: Job, step: Step) -> None:
        self._steps.pop(job, None)
        self._stuck.discard(step)
        self._on_done(job, step)
