"""A load of equal answer streams, and what one event of it costs the process that relays it.

A source writes, at every step, one event to every stream; the subject, a process of its own, relays it; a
light process reads. The figure is the subject's CPU time, user and system, from the moment the reader has
all events of the warm-up until it has all the others, divided by their number.

Shared by the commands `relay` and `ring`: their flags, one measurement, the table, the plot.
"""

import argparse
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from bench.flags import add_files, numbers
from bench.plots import Panel, Point
from bench.readers import read_streams
from bench.report import spread
from bench.sources import WARM_UP_STEPS, Load
from bench.targets import alternate
from bench.usage import usage

HEADER = ("streams", "transport", "subject", "CPU us per chunk", "of it system", "events a write", "RSS MiB")
USUAL_EVENT_US = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A process that relays, where it listens, and the pipe to the source behind it.

    `event_us` is how long it is given for one event: more than it needs, so that events are not merged on the
    way. One that needs more than usual is sent fewer.
    """

    name: str
    pid: int
    port: int
    source: Connection
    event_us: float = USUAL_EVENT_US


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measurement. Units: microseconds an event, events the reader got in one write, MiB."""

    cpu_us: float
    system_us: float
    events_a_write: float
    rss_mib: float


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the flags that every measurement of streams has."""
    flags = argparse.ArgumentParser(
        prog=f"python -m bench {name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--streams",
        type=numbers,
        default=[1, 8, 64, 200, 500],
        help="numbers of streams, comma separated (1,8,64,200,500)",
    )
    flags.add_argument("--chunks", type=int, help="events in each stream (100, or more for few streams)")
    flags.add_argument("--size", type=int, default=190, help="bytes of one event (190)")
    flags.add_argument("--interval-ms", type=float, default=1.0, help="pause between steps, at least (1)")
    flags.add_argument("--runs", type=int, default=5, help="measurements of each number of streams (5)")
    add_files(flags)
    return flags


def compare(args: argparse.Namespace, transport: str, subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """Measure the subjects in alternating runs, at each number of streams."""
    results = []
    for n_streams in args.streams:
        measures = {
            subject.name: _measure(subject, transport, _load(args, n_streams, subject))
            for subject in subjects
        }
        runs = alternate(f"{n_streams} streams", args.runs, measures)
        results += [
            {"streams": n_streams, "transport": transport, "subject": name, "runs": [asdict(r) for r in each]}
            for name, each in runs.items()
        ]
    return results


def _measure(subject: Subject, transport: str, load: Load) -> Callable[[int], Run]:
    return lambda _: measure(subject, transport, load)


def measure(subject: Subject, transport: str, load: Load) -> Run:
    """Send one load through a subject."""
    context = multiprocessing.get_context("spawn")
    reader, reader_end = context.Pipe()
    client = context.Process(target=read_streams, args=(reader_end, transport, subject.port, load))
    client.start()
    reader_end.close()
    subject.source.send(load)
    assert reader.recv() == "warm"
    before = usage(subject.pid)
    subject.source.send("go")
    n_events, n_writes = reader.recv()
    after = usage(subject.pid)
    subject.source.send("end")
    client.join()
    assert client.exitcode == 0, "the reader failed"
    n_measured = load.n_chunks * load.n_streams
    return Run(
        cpu_us=(after.cpu_s - before.cpu_s) / n_measured * 1e6,
        system_us=(after.system_s - before.system_s) / n_measured * 1e6,
        events_a_write=n_events / n_writes,
        rss_mib=after.rss_mib,
    )


def rows(results: Sequence[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    """Return the table below `HEADER`."""
    for result in results:
        runs = [Run(**run) for run in result["runs"]]
        yield (
            result["streams"],
            result["transport"],
            result["subject"],
            spread([run.cpu_us for run in runs]),
            spread([run.system_us for run in runs]),
            spread([run.events_a_write for run in runs], 2),
            f"{statistics.median(run.rss_mib for run in runs):.0f}",
        )


def panels(results: Sequence[dict[str, Any]]) -> list[Panel]:
    """CPU time and memory over the number of streams."""
    shown = {"CPU us per chunk": "cpu_us", "of it system": "system_us", "RSS MiB": "rss_mib"}
    return [Panel(x="streams", y=label, series=_series(results, figure)) for label, figure in shown.items()]


def _series(results: Sequence[dict[str, Any]], figure: str) -> dict[str, list[Point]]:
    """A line for each subject and transport."""
    series: dict[str, list[Point]] = {}
    for result in results:
        points = series.setdefault(f"{result['subject']}, {result['transport']}", [])
        points.append((result["streams"], [run[figure] for run in result["runs"]]))
    return series


def _load(args: argparse.Namespace, n_streams: int, subject: Subject) -> Load:
    n_chunks = args.chunks or max(100, 5_000 // n_streams)
    return Load(
        n_streams=n_streams,
        n_chunks=max(WARM_UP_STEPS, round(n_chunks * USUAL_EVENT_US / subject.event_us)),
        size_bytes=args.size,
        interval_s=args.interval_ms / 1000 + n_streams * subject.event_us / 1e6,
    )
