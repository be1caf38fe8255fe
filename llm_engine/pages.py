"""Memory for the states of sequences, in pages of its own, which go back to the system once it is dropped.

States are megabytes each, and live as long as a cache has room for them. From malloc, whatever is freed stays
with the process as a hole, and a state that is longer by one token does not fit into it: conversations that
grew left a process with twice what its cache may take. Fresh pages cost 2 ms for a state of 200 tokens, which
takes a second to compute.

Called by: `backend.py` on the step thread, `sessionfile.py` on those of the disk.
"""

import mmap

import numpy as np
import numpy.typing as npt

_PAGED_BYTES = 128 << 10  # a smaller hole is soon filled with something else
_HUGE_BYTES = 4 << 20  # from here on huge pages halve what fresh pages cost


def state_buffer(n_bytes: int) -> npt.NDArray[np.uint8]:
    """So many bytes, whatever is in them. Raises: MemoryError."""
    if n_bytes < _PAGED_BYTES:
        return np.empty(n_bytes, np.uint8)
    try:
        pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {n_bytes} bytes for a state") from error
    if n_bytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)
