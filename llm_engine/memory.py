"""How much memory this process may still take, as Linux tells it.

The least of what the system has available and what is left within the limit of each control group that the
process is in, as a container's is. Pages of files count as free: they are given up when memory is needed.

Source: proc_meminfo(5), cgroups(7), cgroup-v2.rst and cgroup-v1/memory.rst. Called by: `engine.py`.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Controller:
    """Where one version of control groups tells of memory."""

    mounts: tuple[str, ...]
    limit: str
    usage: str
    file_pages: frozenset[str]  # keys of memory.stat


_V1 = _Controller(
    mounts=("sys/fs/cgroup/memory",),
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    file_pages=frozenset({"total_active_file", "total_inactive_file"}),
)
_V2 = _Controller(
    mounts=("sys/fs/cgroup", "sys/fs/cgroup/unified"),
    limit="memory.max",
    usage="memory.current",
    file_pages=frozenset({"active_file", "inactive_file"}),
)


def available_bytes(root: Path = _ROOT) -> int:
    """Bytes that can be taken without anything being killed for it; not below 0."""
    return max(0, min([_of_system(root), *_of_groups(root)]))


def _of_system(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux: all that is built in
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kibibytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return kibibytes["MemAvailable"] << 10


def _of_groups(root: Path) -> Iterator[int]:
    """What is left in each group with a limit: a group's own, and those it lies in."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _V1 if controllers else _V2
        for mount in version.mounts:
            for folder in _folders(root / mount, path):
                left = _left_in(folder, version)
                if left is not None:
                    yield left


def _folders(mount: Path, path: str) -> list[Path]:
    """The group's folder and those above it.

    In a container the path may be the host's and the mount begin at the group itself, so some do not exist.
    """
    relative = PurePosixPath(path.lstrip("/"))
    return [mount / part for part in (relative, *relative.parents)]


def _left_in(group: Path, version: _Controller) -> int | None:
    """None without a limit, or without a group."""
    try:
        limit = (group / version.limit).read_text().strip()
        usage = int((group / version.usage).read_text())
        stat = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    if limit == "max":
        return None
    file_pages = sum(int(n) for key, n in (line.split() for line in stat) if key in version.file_pages)
    return int(limit) - usage + file_pages
