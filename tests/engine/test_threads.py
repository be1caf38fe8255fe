"""The threads an engine leaves behind in its process."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")

# In a process of its own: here another test may have computed on this thread before.
COUNT_THREADS = """
import os
import time
from llm_engine import gguf
from llm_engine.backend import LlamaBackend, context_params
from llm_engine.config import EngineConfig
from llm_engine.model import Model

config = EngineConfig(model="smollm2", threads=3)
model = Model.load(gguf.resolve(config.model).path)
before = len(os.listdir("/proc/self/task"))
LlamaBackend.create(model, context_params(config, 256), "any")
deadline = time.monotonic() + 5  # a thread is listed for a moment after it was joined
while (after := len(os.listdir("/proc/self/task"))) > before and time.monotonic() < deadline:
    time.sleep(0.01)
print(before, after)
"""


def test_warming_up_leaves_no_openmp_team() -> None:
    """A second team in the process makes the first sleep at its barriers instead of spinning."""
    command = [sys.executable, "-c", COUNT_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after == before
