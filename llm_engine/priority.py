"""Who gives way to the decode.

The threads of a step wait for each other hundreds of times, so a busy thread beside them of the same priority
costs two thirds of the speed. Whatever else is busy runs at nice 10.
"""

import os
import sys
import threading

NICENESS = 10


def yield_to_decode() -> None:
    """Let the calling thread run only where the decode leaves room."""
    # Elsewhere priorities belong to processes, and a thread's number might name somebody else's.
    if sys.platform == "linux":
        thread_id = threading.get_native_id()
        nice = max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread_id))
        os.setpriority(os.PRIO_PROCESS, thread_id, nice)
