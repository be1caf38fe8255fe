"""An ingress and its workers that outlive a test: each finds all of them well, and hears nothing of the last.

    ring.ingress, ring.workers, ring.holder()
    await ring.undisturbed(STORY, max_tokens=60)   # the answer when nothing happens, computed once

A test may end and freeze them as it likes: what is gone is started again before the next one, and only that.
Called by: conftest.py, which keeps two such rings for the session.
"""

import asyncio
from typing import Any

from tests.network.chat import Answer, ask, sdk_of
from tests.network.fleet import Fleet, Ingress, Worker


class Standing:
    """A ring that stands; `restore` before each test."""

    def __init__(self, fleet: Fleet, ingress: Ingress, *workers: Worker) -> None:
        self.fleet = fleet
        self.ingress = ingress
        self.workers = workers
        self._undisturbed: dict[str, Answer] = {}

    async def restore(self) -> None:
        """Wake and start whatever is not well; forget what all of them said, and what they did."""
        processes = (self.ingress, *self.workers)
        for process in processes:
            if process.is_running:
                process.thaw()
            else:
                process.launch()
        await self.ingress.until_up()
        for worker in self.workers:
            await worker.until_attached()
        await self.ingress.until_attached(len(self.workers))
        await self.ingress.quiet()
        for process in processes:
            process.forget()

    async def undisturbed(self, prompt: str, **fields: Any) -> Answer:
        """The answer to a prompt when nothing happens; the first to ask for it waits for it."""
        key = f"{prompt} {sorted(fields.items())}"
        if key not in self._undisturbed:
            async with sdk_of(self.ingress) as sdk:
                self._undisturbed[key] = await ask(sdk, prompt, **fields)
        return self._undisturbed[key]

    def holder(self) -> Worker:
        """The one worker that holds lanes now."""
        return self.fleet.holder(self.ingress)

    def other(self, than: Worker) -> Worker:
        """The other of two workers."""
        (other,) = (worker for worker in self.workers if worker is not than)
        return other

    async def kill_all(self) -> None:
        """SIGKILL to every worker at once."""
        await asyncio.gather(*(worker.kill() for worker in self.workers))
