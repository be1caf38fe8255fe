"""Free memory as the system's files and control groups of either version tell it."""

from pathlib import Path

import pytest

from llm_engine.memory import available_bytes

MEMINFO = """\
MemTotal:       24684084 kB
MemFree:        1000 kB
MemAvailable:   20480000 kB
HugePages_Total:       0
"""
SYSTEM = 20480000 << 10
MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system root with 20 GB available and no groups."""
    write(tmp_path / "proc/meminfo", MEMINFO)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group_v1(folder: Path, *, limit: int, usage: int, files: int = 0) -> None:
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{usage}\n")
    write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {files}\ntotal_active_file 0\n")


def group_v2(folder: Path, *, limit: int | str, usage: int, files: int = 0) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{usage}\n")
    write(
        folder / "memory.stat",
        f"anon {usage - files}\ninactive_file {files // 2}\nactive_file {files // 2}\n",
    )


def in_groups(root: Path, *lines: str) -> None:
    write(root / "proc/self/cgroup", "".join(f"{line}\n" for line in lines))


def test_without_groups_it_is_what_the_system_has_available(root: Path) -> None:
    assert available_bytes(root) == SYSTEM
    in_groups(root, "0::/")
    assert available_bytes(root) == SYSTEM


def test_the_limit_of_a_v2_group_counts_less_what_is_used_but_for_pages_of_files(root: Path) -> None:
    in_groups(root, "0::/kubepods/pod1/engine")
    group_v2(root / "sys/fs/cgroup/kubepods/pod1/engine", limit=512 * MIB, usage=300 * MIB, files=200 * MIB)
    assert available_bytes(root) == 412 * MIB


def test_the_group_around_it_may_be_the_tighter_one(root: Path) -> None:
    in_groups(root, "0::/pod/engine")
    group_v2(root / "sys/fs/cgroup/pod/engine", limit="max", usage=10 * MIB)
    group_v2(root / "sys/fs/cgroup/pod", limit=100 * MIB, usage=40 * MIB)
    assert available_bytes(root) == 60 * MIB


def test_a_container_with_a_namespace_of_its_own_sees_its_group_at_the_root(root: Path) -> None:
    in_groups(root, "0::/")
    group_v2(root / "sys/fs/cgroup", limit=256 * MIB, usage=56 * MIB)
    assert available_bytes(root) == 200 * MIB


def test_the_limit_of_a_v1_group_counts_though_its_path_be_the_hosts(root: Path) -> None:
    in_groups(root, "5:cpu:/", "4:memory:/docker/0123", "0::/")
    group_v1(root / "sys/fs/cgroup/memory", limit=300 * MIB, usage=200 * MIB, files=50 * MIB)
    assert available_bytes(root) == 150 * MIB


def test_a_v1_group_without_limit_has_a_number_that_bounds_nothing(root: Path) -> None:
    in_groups(root, "4:memory,hugetlb:/a")
    group_v1(root / "sys/fs/cgroup/memory/a", limit=9223372036854771712, usage=MIB)
    assert available_bytes(root) == SYSTEM


def test_a_group_beyond_its_limit_leaves_nothing(root: Path) -> None:
    in_groups(root, "0::/a")
    group_v2(root / "sys/fs/cgroup/a", limit=MIB, usage=2 * MIB)
    assert available_bytes(root) == 0


def test_where_no_such_files_are_it_is_what_is_built_in(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) > MIB


def test_this_machine_has_some() -> None:
    assert MIB < available_bytes() < 1 << 60
