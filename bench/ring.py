"""`python -m bench ring`: what one chunk costs the ingress when its worker is at the far end of the ring.

Three processes, as in a deployment: the ingress (no engine); a fake worker over mutual TLS that writes, at
every step, one event of `--size` bytes with its progress to every stream; a light reader, over HTTP/1.1,
HTTP/1.1 in TLS, or HTTP/2 in TLS with a hundred streams on a connection.

`--beside` measures other gateways in alternating runs with it, in front of a fake backend that writes the
same events over HTTP. Each is a command found on PATH, and left out if it is not there.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from bench import streams
from bench.attached import AttachedWorker, attached, issue
from bench.peers import PEERS, beside, found
from bench.plots import write_png
from bench.readers import TRANSPORTS
from bench.report import print_table, write_json
from bench.sources import obey
from bench.streams import Subject


def main(argv: Sequence[str]) -> int:
    """Measure over each transport and print one table."""
    parser = streams.parser("ring", __doc__)
    parser.add_argument(
        "--transport", type=_some_of(TRANSPORTS), default=["http1"], help=f"of {','.join(TRANSPORTS)} (http1)"
    )
    parser.add_argument("--beside", type=_some_of(PEERS), default=[], help=f"of {','.join(PEERS)} (none)")
    args = parser.parse_args(argv)
    peers = found(args.beside)
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        issue(folder)
        for transport in args.transport:
            with _subjects(folder, transport, peers) as subjects:
                results += streams.compare(args, transport, subjects)
    print_table(streams.HEADER, list(streams.rows(results)))
    write_json(args.json, "ring", vars(args), results)
    write_png(args.png, "one chunk over the ring", streams.panels(results))
    return 0


def _some_of(names: Collection[str]) -> Callable[[str], list[str]]:
    def some(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(names):
            raise argparse.ArgumentTypeError(f"no such thing: {','.join(unknown)}")
        return text.split(",")

    return some


@contextmanager
def _subjects(folder: Path, transport: str, peers: Sequence[str]) -> Iterator[list[Subject]]:
    """Start the ingress and what is measured beside it."""
    with ExitStack() as stack:
        ours = stack.enter_context(attached(folder, _worker, tls=transport != "http1"))
        ingress = Subject(name="llm-ingress", pid=ours.pid, port=ours.port, source=ours.worker)
        yield [ingress, *(stack.enter_context(beside(folder, transport, peers)))]


def _worker(parent: Connection, folder: Path, control_port: int) -> None:
    asyncio.run(_work(parent, AttachedWorker(folder, control_port)))


async def _work(parent: Connection, worker: AttachedWorker) -> None:
    await worker.attach(parent)
    await obey(parent, worker)
    await worker.leave()
