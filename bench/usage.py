"""What a process and its children have taken so far: CPU time and memory, from /proc."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds since the processes began, user and system together and system alone; memory now."""

    cpu_s: float
    system_s: float
    rss_mib: float


def usage(pid: int) -> Usage:
    """Return the sum over a process and all its descendants that live."""
    pids = list(_tree(pid))
    return Usage(
        sum(map(_cpu_s, pids)),
        sum(int(_stat(each)[12]) for each in pids) * _TICK_S,
        sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in pids) * _PAGE_MIB,
    )


def _cpu_s(pid: int) -> float:
    """utime + stime as the scheduler counts them, in nanoseconds; /proc/PID/stat has ticks of 10 ms.

    Source: clock_getcpuclockid(3), in which a process's clock is made from its id.
    """
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            yield from _tree(int(child))


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the command's name, which may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
