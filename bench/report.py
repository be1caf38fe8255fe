"""Tables, medians with their spread, and JSON: how every benchmark shows its figures."""

import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def spread(values: Sequence[float], digits: int = 1) -> str:
    """`median (min-max)`."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least so many percent of them do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table that is Markdown as it stands."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for n, row in enumerate(cells):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if n == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def write_json(path: str | None, mode: str, settings: Mapping[str, Any], results: Any) -> None:
    """Keep the raw figures of a run, with the command and the machine they came from."""
    if path is None:
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "mode": mode,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "machine": {"cpu": _cpu_name(), "cores": os.cpu_count(), "python": platform.python_version()},
        "settings": dict(settings),
        "results": results,
    }
    target.write_text(json.dumps(document, indent=2) + "\n")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
