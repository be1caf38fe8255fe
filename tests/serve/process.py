"""A real `llm-serve` in a process of its own, as its operator sees it: its address, its health, its log.

Waiting is always for something that `/health` tells, never for time to pass.
Called by: conftest.py, which starts those that tests share, and the tests of a server's life and death.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit
from urllib.request import urlopen

COMMAND = Path(sys.executable).with_name("llm-serve")
PATIENCE_S = 60.0  # for what must come; nothing waits so long unless something is wrong
POLL_S = 0.02

Health: TypeAlias = dict[str, Any]


@dataclass(slots=True, eq=False, kw_only=True)
class LlmServe:
    """One running `llm-serve`."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        """Where its socket listens."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def health(self) -> Health:
        """What `/health` says now."""
        with urlopen(f"{self.url}/health", timeout=PATIENCE_S) as answer:
            health: Health = json.load(answer)
            return health

    async def until(self, holds: Callable[[Health], object], within_s: float = PATIENCE_S) -> Health:
        """Wait until something holds of its health, and return that."""
        deadline = asyncio.get_running_loop().time() + within_s
        while not holds(health := self.health()):
            late = asyncio.get_running_loop().time() > deadline
            assert not late, f"not within {within_s} s; its health is {health}"
            await asyncio.sleep(POLL_S)
        return health

    async def quiet(self) -> Health:
        """Wait until every place, slot and promised cell is given back; every request ended in one way."""
        health = await self.until(is_quiet)
        assert health["accepted"] == health["finished"] + health["cancelled"] + health["failed"]
        return health

    def lines(self, *words: str) -> list[str]:
        """The lines of its log that hold one of these words."""
        return [line for line in self.log.read_text().splitlines() if any(word in line for word in words)]

    def memory_bytes(self) -> int:
        """What it holds of the machine's memory."""
        n_pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return n_pages * os.sysconf("SC_PAGE_SIZE")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def exit_status(self) -> int:
        """Wait for its end."""
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)


def is_quiet(health: Health) -> bool:
    """Whether nothing is held for anybody."""
    (worker,) = health["workers"]
    held = (health["open"], health["inflight"], health["reading_bytes"])
    of_worker = (worker["lanes"], worker["inflight"], worker["decoding"], worker["kv_promised_tokens"])
    return not any((*held, *of_worker)) and worker["credit"] == worker["max_inflight"]


@contextmanager
def running(
    *flags: str,
    log: Path,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = (str(COMMAND),),
) -> Iterator[LlmServe]:
    """Run `llm-serve` with SmolLM2 until the block ends, on any free port unless told another."""
    command = [*program, "--model", "smollm2", "--drain-timeout", "1", *flags]
    surroundings = {**os.environ, "PORT": "0", **(environment or {})}
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=surroundings
        )
    try:
        assert process.stdout is not None
        announcement = process.stdout.readline()
        assert announcement.startswith("Serving on "), log.read_text()
        yield LlmServe(process=process, url=announcement.split()[-1], log=log)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()


@contextmanager
def spotless(*flags: str, log: Path) -> Iterator[LlmServe]:
    """Run one that many tests share; whatever they did, it ends well and has met no fault of its own."""
    with running(*flags, log=log) as server:
        yield server
    assert server.process.returncode == 0, log.read_text()
    assert server.lines(" ERROR ", "Traceback") == []
