"""Memory for the states of sequences, in pages of its own, which go back to the system once it is dropped.

States are megabytes each, and live as long as a cache has room for them. From malloc, whatever is freed stays
with the process as a hole, and a state that is longer by one token does not fit into it: conversations that
grew left a process with twice what its cache may take. Fresh pages cost 2 ms for a state of 200 tokens, which
takes a second to compute.

Called by: `backend.py` on the step thread, `sessionfile.py` on those of the disk.
"""

import mmap
import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import numpy.typing as npt

from llm_engine.priority import yield_to_decode

_PAGED_BYTES = 128 << 10  # a smaller hole is soon filled with something else
_HUGE_BYTES = 4 << 20  # from here on huge pages halve what fresh pages cost
_SPARE_BYTES = 64 << 20  # beyond it none is kept ready
_CAN_RESIZE = sys.platform == "linux"  # pages in memory


def state_buffer(n_bytes: int) -> npt.NDArray[np.uint8]:
    """So many bytes, whatever is in them. Raises: MemoryError."""
    if n_bytes < _PAGED_BYTES:
        return np.empty(n_bytes, np.uint8)
    return np.frombuffer(_pages(n_bytes), np.uint8)


class Spare:
    """State buffers whose pages are there already, one at a time; the next is made ready meanwhile.

    Where memory is new to a virtual machine its host has to find it first: 0.1 s for 2,000 tokens, in which
    no stream gets one. Owns: the one that is ready, and the thread that makes it. Thread: the step thread.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "llm-engine-pages", initializer=yield_to_decode)
        self._n_bytes = 0  # of the next: what was asked for, and a little more
        self._next: Future[mmap.mmap] | None = None

    def take(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """As `state_buffer`."""
        is_at_work = self._next is not None and not self._next.done()
        if is_at_work or not _CAN_RESIZE or not _HUGE_BYTES <= n_bytes <= _SPARE_BYTES:
            return state_buffer(n_bytes)
        self._n_bytes = max(self._n_bytes, n_bytes + n_bytes // 4)
        made, self._next = self._next, self._thread.submit(_touched_pages, self._n_bytes)
        if made is None or made.exception() is not None:
            return state_buffer(n_bytes)
        pages = made.result()
        pages.resize(n_bytes)
        return np.frombuffer(pages, np.uint8)

    def settle(self) -> None:
        """Wait until the next is ready."""
        if self._next is not None:
            wait([self._next])

    def close(self) -> None:
        """Make no more."""
        self._thread.shutdown(cancel_futures=True)


def _touched_pages(n_bytes: int) -> mmap.mmap:
    """Raises: MemoryError."""
    pages = _pages(n_bytes)
    np.frombuffer(pages, np.uint8).fill(0)  # without the GIL
    return pages


def _pages(n_bytes: int) -> mmap.mmap:
    """Raises: MemoryError."""
    try:
        pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {n_bytes} bytes for a state") from error
    if n_bytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
