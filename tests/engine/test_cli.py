"""`llm-engine` as its user meets it: where its answer goes, and what is wrong with its flags."""

import subprocess
import sys
from pathlib import Path

import pytest

from llm_engine import llama
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


@pytest.mark.skipif(llama.has_gpu(), reason="needs a build of llama.cpp that finds no GPU")
def test_layers_for_a_gpu_that_is_not_there_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """They would lie on the CPU without a word, in 16 slots whose answers depend on each other."""
    assert main(["--prompt", "Hi", "--model", "smollm2", "--n-gpu-layers", "-1"]) == 1
    complaint = "--n-gpu-layers is -1: this build of llama.cpp finds no GPU"
    assert capsys.readouterr().err == f"llm-engine: {complaint}\n"
