"""The garbage collector does not stop an ingress that holds many requests."""

import subprocess
import sys

# Ten thousand requests are some 400,000 objects. What was loaded before is not looked at with them.
PROGRAM = """
import gc
from llm_ingress import cli
from llm_ingress.collector import spare_what_is_loaded

full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
spare_what_is_loaded()
assert gc.get_freeze_count() > 10_000, gc.get_freeze_count()
full.clear()
held = [[n] for n in range(400_000)]
assert not full, full
"""


def test_ten_thousand_requests_bring_about_no_look_at_everything() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
