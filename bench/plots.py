"""Plots as PNG files: medians as lines, with bars from the smallest run to the largest."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Point: TypeAlias = tuple[float | str, Sequence[float]]  # where, and what each run gave there


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plot of the row: a line for each series; only its points where they are at names."""

    x: str
    y: str
    series: Mapping[str, Sequence[Point]]


def over(x: str, figure: str, results: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """A line for each server whose runs have the figure, over what the results were taken at."""
    return {
        name: [(result[x], [run[figure] for run in result["runs"][name]]) for result in results]
        for name, runs in results[0]["runs"].items()
        if figure in runs[0]
    }


def one_by_one(results: Mapping[str, Sequence[float]]) -> dict[str, list[Point]]:
    """A line for each series of figures, over their numbers."""
    return {name: [(n, [figure]) for n, figure in enumerate(figures, 1)] for name, figures in results.items()}


def write_png(path: str | None, title: str, panels: Sequence[Panel]) -> None:
    """Draw the panels beside each other."""
    if path is None:
        return
    from matplotlib.figure import Figure  # an optional dependency, and slow to import

    figure = Figure(figsize=(5.5 * len(panels), 4), layout="constrained")
    figure.suptitle(title)
    names = dict.fromkeys(name for panel in panels for name in panel.series)
    colours = {name: f"C{n}" for n, name in enumerate(names)}
    for place, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, points in panel.series.items():
            middles = [statistics.median(runs) for _, runs in points]
            below = [middle - min(runs) for middle, (_, runs) in zip(middles, points, strict=True)]
            above = [max(runs) - middle for middle, (_, runs) in zip(middles, points, strict=True)]
            xs = [x for x, _ in points]
            style: dict[str, Any] = {"color": colours[name], "marker": "o", "capsize": 3}
            style["linestyle"] = "none" if isinstance(xs[0], str) else "solid"
            place.errorbar(xs, middles, yerr=[below, above], label=name, **style)
        place.set(xlabel=panel.x, ylabel=panel.y)
        place.set_ylim(bottom=0)
        place.grid(alpha=0.3)
        place.legend()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
