"""`llm-ingress`, and the flags of everything that serves the public surface.

Called by: the operator; `examples/serve/cli.py`, for the flags and what they make. Environment variables
stand in for the flags people set in containers; a flag wins over its variable.
"""

import argparse
import asyncio
import ipaddress
import logging
import os
import signal
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from llm_ingress.certs_cli import add_certs_command
from llm_ingress.errors import ConfigError
from llm_ingress.gateway import GatewayConfig
from llm_ingress.public import PublicConfig
from llm_ingress.serving import Drain, ServingConfig
from llm_ingress.tls import LiveContext

LOOPBACK = "127.0.0.1"
PLAIN_PORT, TLS_PORT = 8080, 8443
READING_BYTES = 256 * 1024 * 1024  # of all bodies being read together
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="llm-ingress",
        description="Take requests of OpenAI clients, and hand them to the workers of a ring.",
    )
    add_certs_command(parser.add_subparsers(metavar="COMMAND", required=True))
    args = parser.parse_args(argv)
    return int(args.run(args))


def add_public_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that `serving_config`, `public_config` and `gateway_config` read."""
    listener = parser.add_argument_group("public listener")
    listener.add_argument(
        "--bind",
        default=os.environ.get("HOST", LOOPBACK),
        metavar="HOST",
        help=f"address to listen on (default: {LOOPBACK}; environment: HOST)",
    )
    listener.add_argument(
        "--port",
        type=int,
        default=os.environ.get("PORT"),
        metavar="N",
        help=f"port, 0 for any free one (default: {PLAIN_PORT}, {TLS_PORT} with TLS; environment: PORT)",
    )
    listener.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="certificate chain, PEM; serves HTTPS"
    )
    listener.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key, PEM")
    listener.add_argument(
        "--insecure", action="store_true", help="allow plain HTTP on an address beyond this machine"
    )
    limits = parser.add_argument_group("limits")
    _add_seconds(limits, "--queue-timeout", 60, "a request waits this long for a slot, then 503")
    limits.add_argument(
        "--ring-streams",
        type=int,
        default=64,
        metavar="N",
        help="requests held at once, waiting or running; beyond it 503 (default: %(default)s)",
    )
    limits.add_argument(
        "--request-timeout", type=float, metavar="S", help="seconds a request may take in all (default: off)"
    )
    limits.add_argument(
        "--max-request-bytes",
        type=int,
        default=16 * 1024 * 1024,
        metavar="BYTES",
        help="largest request body, beyond it 413 (default: 16 MiB)",
    )
    _add_seconds(limits, "--body-timeout", 30, "a request's body may take this long, then 408")
    limits.add_argument(
        "--response-buffer",
        type=int,
        default=256 * 1024,
        metavar="BYTES",
        help="unread bytes at which a slow client's answer is paused (default: 256 KiB)",
    )
    _add_seconds(limits, "--stall-timeout", 10, "a client whose answer was paused so long in all is dropped")
    _add_seconds(limits, "--no-worker-timeout", 10, "a request waits this long for a worker to come back")
    limits.add_argument(
        "--max-attempts",
        type=int,
        default=3,
        metavar="N",
        help="workers a request may lose before it is given up (default: %(default)s)",
    )
    _add_seconds(limits, "--drain-timeout", 30, "on SIGTERM or Ctrl-C running answers may take this long")


def _add_seconds(group: "argparse._ArgumentGroup", flag: str, default: float, help_text: str) -> None:
    group.add_argument(
        flag, type=float, default=default, metavar="S", help=f"{help_text}; seconds (default: %(default)s)"
    )


def serving_config(args: argparse.Namespace) -> ServingConfig:
    """Where to listen.

    Raises: ConfigError, also for plain HTTP that other machines could reach.
    """
    if args.tls_cert is None and not args.insecure and not is_loopback(args.bind):
        raise ConfigError(
            f"refusing plain HTTP on {args.bind}, which other machines can reach: "
            "give --tls-cert and --tls-key, or --insecure"
        )
    default_port = PLAIN_PORT if args.tls_cert is None else TLS_PORT
    return ServingConfig(
        host=args.bind,
        port=default_port if args.port is None else args.port,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        drain_timeout_s=args.drain_timeout,
    )


def public_config(args: argparse.Namespace) -> PublicConfig:
    """Bounds of what clients may send. Raises: ConfigError."""
    return PublicConfig(
        max_request_bytes=args.max_request_bytes,
        max_reading_bytes=max(READING_BYTES, args.max_request_bytes),
        body_timeout_s=args.body_timeout,
    )


def gateway_config(args: argparse.Namespace) -> GatewayConfig:
    """Bounds of lanes. Raises: ConfigError."""
    return GatewayConfig(
        ring_streams=args.ring_streams,
        queue_timeout_s=args.queue_timeout,
        request_timeout_s=args.request_timeout,
        response_buffer_bytes=args.response_buffer,
        stall_timeout_s=args.stall_timeout,
        no_worker_timeout_s=args.no_worker_timeout,
        max_attempts=args.max_attempts,
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def set_up_logging() -> None:
    """One line per lifecycle fact and finished request, on standard error."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)


def reload_on_hangup(contexts: Iterable[LiveContext]) -> None:
    """SIGHUP loads the certificates again at once. Call on the event loop."""
    reloaded = tuple(contexts)

    def reload() -> None:
        for context in reloaded:
            context.reload(datetime.now(UTC))

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


def drain_on_signals(drain: Drain) -> None:
    """SIGTERM and Ctrl-C ask for the drain; asked twice, it ends at once. Call on the event loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain.ask)
