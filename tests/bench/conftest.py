"""Where the benchmarks under test put what they measure."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Flags that say where figures and plot go."""
    return ["--json", str(tmp_path / "out.json"), "--png", str(tmp_path / "out.png")]


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Any]:
    """Reads what a mode wrote."""
    yield lambda: json.loads((tmp_path / "out.json").read_text())["results"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
