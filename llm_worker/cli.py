"""`llm-worker`: an engine that serves the lanes of one ingress or of many, dialling out to each.

What is wrong on this machine (flags, certificate files, a model that does not load) is one line and exit
status 1; what is wrong with an ingress is logged, and it is dialled until it answers. The engine is loaded
before anything else runs, so that its step thread keeps its priority; the event loop's thread is then niced.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from socket import socket
from typing import Any
from urllib.parse import urlsplit

from llm_engine.cli import (
    add_engine_flags,
    add_max_tokens_flag,
    add_session_ttl_flag,
    add_version_flag,
    engine_config,
    in_flags,
)
from llm_engine.engine import Engine
from llm_engine.errors import ConfigError as EngineConfigError
from llm_engine.errors import EngineError
from llm_engine.priority import yield_to_decode
from llm_ingress.certs import WORKER_SCHEME, CertificateFiles, read_facts
from llm_ingress.draining import Drain
from llm_ingress.endpoint import PORT_MAX, parse_endpoint
from llm_ingress.errors import ConfigError
from llm_ingress.tls import LiveContext, follow, worker_context
from llm_worker.compaction import Policy
from llm_worker.discovery import Discovery, Query, Target, system_resolver
from llm_worker.errors import WorkerConfigError
from llm_worker.health import listen_for_health, serve_health
from llm_worker.remote import RemoteRing
from llm_worker.worker import Worker, WorkerConfig

logger = logging.getLogger(__name__)

CONTROL_PORT = 8444
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
PART_S = 2.0  # for the last words to ingresses that may not listen
EXIT_FAULT = 1
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for, checked; the certificate is loaded and good."""

    worker: WorkerConfig
    tls: LiveContext
    urls: tuple[str, ...]
    query: Query | None
    discovery_interval_s: float
    drain_timeout_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    args = parser_of_flags().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    # While it loads: what Python's own handler raises inside llama.cpp's log callback would be lost.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        options = options_of(args)
        with ExitStack() as stack:
            # Before the model, which takes time to load: a port that is taken is known at once.
            listener = (
                None if args.health_bind is None else listen_for_health(parse_endpoint(args.health_bind))
            )
            if listener is not None:
                stack.enter_context(closing(listener))
            engine = stack.enter_context(_load(args))
            yield_to_decode()
            return asyncio.run(_run(options, engine, listener))
    except (ConfigError, EngineConfigError, WorkerConfigError) as error:
        print(f"llm-worker: {in_flags(error, args)}", file=sys.stderr)
        return EXIT_FAULT
    except EngineError as error:
        print(f"llm-worker: {error}", file=sys.stderr)
        return EXIT_FAULT


# --- flags -----------------------------------------------------------------------------------------------


def parser_of_flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llm-worker",
        description="Serve a GGUF model to the clients of one or more ingresses, dialling out to each.",
    )
    add_version_flag(parser)
    add_engine_flags(parser)
    add_max_tokens_flag(parser)
    add_compaction_flag(parser)
    add_session_ttl_flag(parser)
    _add_ring_flags(parser)
    _add_discovery_flags(parser)
    _add_operating_flags(parser)
    return parser


def add_compaction_flag(parser: argparse.ArgumentParser) -> None:
    """The flag whose value is `args.compaction`, a `Policy`."""
    parser.add_argument(
        "--compaction",
        type=Policy,
        choices=tuple(Policy),
        default=Policy.NONE,
        help="for a conversation that outgrew the context, where its request's `truncation` says nothing:"
        " none refuses it, summary has the model summarise its older turns (default: %(default)s)",
    )


def _add_ring_flags(parser: argparse.ArgumentParser) -> None:
    ring = parser.add_argument_group("ring")
    ring.add_argument(
        "--ingress-url",
        action="append",
        metavar="URL",
        help=f"control listener of an ingress, https://HOST[:{CONTROL_PORT}]; repeats"
        " (environment: COORDINATOR_URL, separated by commas)",
    )
    ring.add_argument(
        "--pki",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder that `llm-ingress certs worker` made: ca.pem, cert.pem, key.pem",
    )
    ring.add_argument(
        "--name",
        default=os.environ.get("WORKER_ID"),
        help="label in logs and metrics (default: the name in the certificate; environment: WORKER_ID)",
    )
    ring.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="NAME",
        help="another name that clients may ask for the model by; repeats",
    )
    ring.add_argument(
        "--takeover",
        action="store_true",
        help="take the place of a living worker with the same certificate, instead of being refused;"
        " once at each ingress, so a second process that has it too does not come back",
    )
    ring.add_argument(
        "--heartbeat-interval",
        type=float,
        default=WorkerConfig().heartbeat_interval_s,
        metavar="S",
        help="seconds between signs of life; the ingress has the same flag (default: %(default)s)",
    )


def _add_discovery_flags(parser: argparse.ArgumentParser) -> None:
    discovery = parser.add_argument_group("discovery")
    discovery.add_argument(
        "--discovery-dns",
        metavar="NAME[:PORT]",
        help="serve every ingress this name leads to: SRV, else A and AAAA; with a port A and AAAA only"
        f" (port otherwise: SRV's, or {CONTROL_PORT}). Each is dialled by address, and must have the name"
        " (with SRV, the name SRV gives) in its certificate",
    )
    discovery.add_argument(
        "--discovery-interval",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds between look-ups (default: %(default)s)",
    )


def _add_operating_flags(parser: argparse.ArgumentParser) -> None:
    operating = parser.add_argument_group("operating")
    operating.add_argument(
        "--health-bind",
        metavar="HOST:PORT",
        help="serve /health, /ready and /metrics there, in plain HTTP; [::] takes IPv4 too"
        " (default: nowhere)",
    )
    operating.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="on SIGTERM or Ctrl-C what is held may take this long; what is left goes on at another worker;"
        " seconds (default: %(default)s)",
    )


def options_of(args: argparse.Namespace) -> Options:
    """Raises: ConfigError, also for certificate files that cannot be used; WorkerConfigError."""
    if args.drain_timeout < 0:
        raise WorkerConfigError(f"drain_timeout is {args.drain_timeout}, must not be negative")
    if not args.discovery_interval > 0:
        raise WorkerConfigError(f"discovery_interval is {args.discovery_interval}, must be more than 0")
    urls = _urls(args)
    if not urls and args.discovery_dns is None:
        raise WorkerConfigError("give --ingress-url or --discovery-dns: there is no ingress to serve")
    files = CertificateFiles.in_folder(args.pki)
    tls = LiveContext(worker_context, files, datetime.now(UTC), keeps_names=True)
    return Options(
        worker=WorkerConfig(
            name=args.name or _certified_name(files),
            aliases=tuple(args.alias),
            takeover=args.takeover,
            heartbeat_interval_s=args.heartbeat_interval,
            compaction=args.compaction,
        ),
        tls=tls,
        urls=urls,
        query=None if args.discovery_dns is None else _query(args.discovery_dns),
        discovery_interval_s=args.discovery_interval,
        drain_timeout_s=args.drain_timeout,
    )


def _urls(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the ingresses named, each once."""
    given = args.ingress_url or os.environ.get("COORDINATOR_URL", "").split(",")
    return tuple(dict.fromkeys(_url(text.strip()) for text in given if text.strip()))


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme != "https" or "@" in parts.netloc or parts.path not in ("", "/") or parts.query:
        raise WorkerConfigError(f"ingress URL {text!r} must be https://HOST:PORT")
    endpoint = parse_endpoint(parts.netloc, default_port=CONTROL_PORT)
    if endpoint.port == 0:
        raise WorkerConfigError(f"ingress URL {text!r} has the port 0, must be 1 to {PORT_MAX}")
    return f"https://{endpoint}"


def _query(text: str) -> Query:
    endpoint = parse_endpoint(text, default_port=0)
    return Query(name=endpoint.host, port=endpoint.port or None, default_port=CONTROL_PORT)


def _certified_name(files: CertificateFiles) -> str:
    """Return the worker's name in its certificate, which was found to have one."""
    return read_facts(files.cert).names[0].removeprefix(WORKER_SCHEME)


# --- running ---------------------------------------------------------------------------------------------


def _load(args: argparse.Namespace) -> Engine:
    started = time.monotonic()
    engine = Engine.spawn(engine_config(args, max_tokens=args.max_tokens, session_ttl=args.session_ttl))
    info = engine.info
    logger.info(
        "%s is loaded in %.1f s: %d slots of %d tokens",
        info.file,
        time.monotonic() - started,
        info.max_inflight,
        info.n_ctx,
    )
    return engine


async def _run(options: Options, engine: Engine, listener: socket | None) -> int:
    """Serve until the drain is over."""
    drain = Drain()
    _obey_signals(drain, options.tls)
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(_serving(options, engine, on_fault=drain.fail))
        if listener is not None:
            await stack.enter_async_context(serve_health(listener, worker.snapshot))
        await drain.begun.wait()
        await _drain(worker, options.drain_timeout_s, drain)
    if drain.has_failed.is_set():
        return EXIT_FAULT
    if drain.is_urgent.is_set():
        engine.close(keep_sessions=False)
        return EXIT_INTERRUPTED
    return 0


def _obey_signals(drain: Drain, tls: LiveContext) -> None:
    """SIGTERM and Ctrl-C ask for the drain, and again for its end; SIGHUP loads the certificate again."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain.ask)
    loop.add_signal_handler(signal.SIGHUP, lambda: tls.reload(datetime.now(UTC)))


@asynccontextmanager
async def _serving(
    options: Options, engine: Engine, *, on_fault: Callable[[], None]
) -> AsyncIterator[Worker]:
    """A worker that pulls from every ingress named or found, until the block ends."""
    attended: dict[str, RemoteRing] = {}

    def dial(url: str, server_hostname: str | None = None) -> RemoteRing:
        return RemoteRing(url, options.tls, server_hostname=server_hostname, attended=attended)

    rings = [dial(url) for url in options.urls]
    worker = Worker(engine, options.worker, rings, on_fault)
    worker.start()
    discovery = _discovery(options, worker, lambda target: dial(target.url, target.name))
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(follow([options.tls]))]
    if discovery is not None:
        tasks.append(asyncio.create_task(discovery.run(options.discovery_interval_s)))
    try:
        yield worker
    finally:
        for task in tasks:
            task.cancel()
        worker.close()
        await _part([*rings, *(discovery.rings.values() if discovery else ())])


def _discovery(
    options: Options, worker: Worker, dial: Callable[[Target], RemoteRing]
) -> Discovery[RemoteRing] | None:
    if options.query is None:
        return None
    return Discovery(options.query, system_resolver(), dial=dial, holder=worker)


async def _drain(worker: Worker, timeout_s: float, drain: Drain) -> None:
    """Finish what is held, within `timeout_s` and as long as that is possible."""
    ends = (worker.drain(), drain.is_urgent.wait(), drain.has_failed.wait())
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(end) for end in ends]
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    n_open = worker.snapshot().n_jobs
    if n_open:
        logger.warning("drain ended with %d lanes open, which go on at another worker", n_open)


async def _part(rings: Sequence[RemoteRing]) -> None:
    """Let what was said last reach the ingresses."""
    if rings:
        await asyncio.wait([asyncio.create_task(ring.closed()) for ring in rings], timeout=PART_S)


if __name__ == "__main__":
    sys.exit(main())
