"""Python's garbage collector, as a process needs it that holds thousands of requests.

Nearly all memory is freed without it, when the last reference goes. A look at everything there is finds next
to nothing then, and stops the process: for a second where ten thousand requests wait. Called by: `cli.py`.
"""

import gc

# Net allocations until the youngest are looked at; times that until those who stayed are; times that until
# everything is. Half of the default, and twenty times: after some 700,000 objects, about what 10,000 requests
# take. It bounds what closed connections leave until then, six small objects each.
THRESHOLDS = (700, 5, 200)


def spare_what_is_loaded() -> None:
    """Leave out what is there by now, which is there to stay, and look at the rest less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
