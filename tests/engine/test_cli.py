"""`llm-engine` as its user meets it: where its answer goes, and what is wrong with its flags."""

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-m", "llm_engine", "--model", "smollm2", "--ctx-size", "256", "--prompt", "Hi")
FULL = Path("/dev/full")


@pytest.mark.model
@pytest.mark.skipif(not FULL.exists(), reason="needs a disk that is always full")
def test_answer_that_cannot_be_written_is_one_line_and_status_1() -> None:
    with FULL.open("w") as full:
        done = subprocess.run(COMMAND, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "llm-engine: the answer cannot be written: No space left on device\n"
