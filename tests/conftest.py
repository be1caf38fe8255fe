"""The models of the tests, each written or found once per session, and how property tests search."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.models import smollm2_path, write_qwen35_like, write_sliding_window

# A busy machine is slow, not wrong. On CI the examples are the same every time.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, or whatever `LLM_TEST_MODEL` names."""
    return smollm2_path()


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recurrent and attention hybrid, qwen35-shaped, with random weights."""
    path = tmp_path_factory.mktemp("hybrid") / "hybrid.gguf"
    write_qwen35_like(path)
    return path


@pytest.fixture(scope="session")
def sliding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gemma3-shaped sliding-window model with random weights."""
    path = tmp_path_factory.mktemp("sliding") / "sliding.gguf"
    write_sliding_window(path)
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)
