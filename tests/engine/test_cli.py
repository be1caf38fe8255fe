"""`llm-engine` as its user meets it: where its answer goes, and what is wrong with its flags."""

import subprocess
import sys
from pathlib import Path

import pytest

from llm_engine.cli import main

COMMAND = (sys.executable, "-m", "llm_engine", "--model", "smollm2", "--ctx-size", "256", "--prompt", "Hi")
FULL = Path("/dev/full")


@pytest.mark.model
@pytest.mark.skipif(not FULL.exists(), reason="needs a disk that is always full")
def test_answer_that_cannot_be_written_is_one_line_and_status_1() -> None:
    with FULL.open("w") as full:
        done = subprocess.run(COMMAND, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.endswith("\nllm-engine: the answer cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--max-inflight 0", "--max-inflight is 0, not a whole number in 1..256"),
        ("--max-inflight 8 --batch-size 4", "--batch-size 4 is less than --max-inflight 8"),
        ("--threads 0", "--threads is 0, not"),
        ("--model=", "--model is empty, must be"),
        ("--model no/ctx_size/in.gguf", "no/ctx_size/in.gguf: no such file"),
    ],
)
def test_an_option_that_is_wrong_is_called_as_its_flag(
    capsys: pytest.CaptureFixture[str], flags: str, complaint: str
) -> None:
    assert main(["--prompt", "Hi", *flags.split()]) == 1
    assert capsys.readouterr().err.startswith(f"llm-engine: {complaint}")
