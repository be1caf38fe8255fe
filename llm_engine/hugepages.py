"""Huge pages under what llama.cpp computes with.

A step reads every weight once. In pages of 4 KiB that is a page walk for every 4 KiB, and in a virtual
machine a walk costs twice: with one sequence a tenth of the step. Linux gives huge pages to whoever asks for
them (`madvise` is its usual setting), but llama.cpp has allocated and filled its buffers by the time anybody
could ask: so they are asked for, and the pages that are filled already are collapsed on the spot.

Where the system has none to give, everything stays as it was: on a kernel before 6.1 what is filled already,
near the limit of a control group what does not fit, and all where the administrator wants none. Weights that
are mapped from a file cannot have them; `llama.py` copies the weights therefore.
Source: madvise(2), MADV_HUGEPAGE, and MADV_COLLAPSE of Linux 6.1. Called by: `llama.py`.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HUGE = 2 << 20  # bytes of a huge page on x86-64, and on arm64 with pages of 4 KiB
_WORTH_BYTES = 2 * HUGE  # smaller mappings are stacks and arenas

_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_MAPS = Path("/proc/self/maps")
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@contextmanager
def huge_pages(setting: Path = _SETTING) -> Iterator[None]:
    """Have what the process allocates meanwhile lie in huge pages, as far as the system allows.

    Thread: any. What other threads map meanwhile is taken along; what they have unmapped is refused.
    """
    if not _are_wanted(setting):
        yield
        return
    before = set(_large_mappings())
    yield
    for start, end in set(_large_mappings()) - before:
        _collapse(-(-start // HUGE) * HUGE, end // HUGE * HUGE)


def _are_wanted(setting: Path) -> bool:
    """Whether the system has huge pages and may give some: MADV_COLLAPSE itself does not ask."""
    try:
        return "[never]" not in setting.read_text()
    except OSError:
        return False


def _large_mappings() -> Iterator[tuple[int, int]]:
    """First and last address of each writable mapping but a file's and the heap.

    Source: proc_pid_maps(5), which escapes the line breaks of a file's name; any other byte may be in it.
    """
    try:
        lines = _MAPS.read_bytes().removesuffix(b"\n").split(b"\n")
    except OSError:  # not Linux, or a Linux that shows no /proc
        return
    for line in lines:
        addresses, permissions, _offset, _device, _inode, *name = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split(b"-"))
        if not name and permissions.startswith(b"rw") and end - start >= _WORTH_BYTES:
            yield start, end


def _collapse(start: int, end: int) -> None:
    """Page by page, since at a page that was never touched a longer call would stop."""
    if _libc.madvise(start, end - start, _MADV_HUGEPAGE) == 0:
        for address in range(start, end, HUGE):
            _libc.madvise(address, HUGE, _MADV_COLLAPSE)
