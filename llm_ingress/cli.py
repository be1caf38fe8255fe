"""`llm-ingress`: the public listener and that of the workers, until a signal ends it.

Called by: the operator; `examples/serve/cli.py`, for what signals do.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from llm_ingress.certs import CertificateFiles, is_worker_name
from llm_ingress.certs_cli import add_certs_command
from llm_ingress.collector import spare_what_is_loaded
from llm_ingress.control import ControlConfig, serve_control
from llm_ingress.conversations import Conversations
from llm_ingress.draining import Drain
from llm_ingress.endpoint import parse_endpoint
from llm_ingress.errors import ConfigError
from llm_ingress.flags import (
    LOOPBACK,
    add_history_flags,
    add_public_flags,
    add_seconds,
    add_session_ttl_flag,
    gateway_config,
    in_flags,
    open_conversations,
    public_config,
    serving_config,
)
from llm_ingress.frames import MAX_LANE_BYTES
from llm_ingress.gateway import Gateway, GatewayConfig
from llm_ingress.history import FULL, HistoryConfig
from llm_ingress.public import Public, PublicConfig
from llm_ingress.serving import Listener, listen, serve
from llm_ingress.tenants import Tenancy, TenantBy, parse_proxies
from llm_ingress.tls import LiveContext, control_context, follow

CONTROL_BIND = f"{LOOPBACK}:8444"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
EXIT_FAULT = 1
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    args = _parser().parse_args(argv)
    return int(args.run(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llm-ingress",
        description="Take requests of OpenAI clients, and hand them to the workers of a ring.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('llm-ring')}")
    parser.set_defaults(run=_serve)
    _add_control_flags(parser)
    add_public_flags(parser)
    add_history_flags(parser)
    add_session_ttl_flag(parser)
    _add_tenant_flags(parser)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", description="without one: serve")
    add_certs_command(commands)
    return parser


def _add_control_flags(parser: argparse.ArgumentParser) -> None:
    control = parser.add_argument_group("control listener, where workers attach over mutual TLS")
    control.add_argument(
        "--pki",
        type=Path,
        metavar="DIR",
        help="folder that `llm-ingress certs init` made: ca.pem, cert.pem, key.pem; required to serve",
    )
    control.add_argument(
        "--control-bind",
        default=CONTROL_BIND,
        metavar="HOST:PORT",
        help="address to listen on, [::] for all of IPv4 and IPv6, port 0 for any free one"
        " (default: %(default)s)",
    )
    control.add_argument(
        "--allow-worker",
        action="append",
        metavar="NAME",
        help="a worker that may attach, by the name in its certificate; repeats (default: all of the CA)",
    )
    bounds = GatewayConfig()
    add_seconds(
        control, "--heartbeat-timeout", bounds.heartbeat_timeout_s, "a worker silent for so long is lost"
    )
    add_seconds(
        control, "--heartbeat-interval", bounds.heartbeat_interval_s, "how often workers are set to be heard"
    )
    add_seconds(
        control,
        "--claim-timeout",
        bounds.claim_timeout_s,
        "a worker that says nothing of a lane it holds for so long loses it, though it is heard",
    )


def _add_tenant_flags(parser: argparse.ArgumentParser) -> None:
    tenants = parser.add_argument_group("tenants, who take turns")
    tenants.add_argument(
        "--tenant-by",
        type=TenantBy,
        choices=tuple(TenantBy),
        default=TenantBy.ADDRESS,
        help="what tells them apart: the client's address, or the request's `user` (default: %(default)s)",
    )
    tenants.add_argument(
        "--trusted-proxy",
        action="append",
        default=[],
        metavar="ADDR",
        help="address or CIDR range whose X-Forwarded-For is believed; repeats (default: none)",
    )


def _serve(args: argparse.Namespace) -> int:
    set_up_logging()
    try:
        with (
            closing(listen(serving_config(args))) as listener,
            closing(open_conversations(args)) as conversations,
        ):
            return asyncio.run(_run(args, listener, conversations))
    except ConfigError as error:
        print(f"llm-ingress: {in_flags(error, args)}", file=sys.stderr)
        return EXIT_FAULT


async def _run(args: argparse.Namespace, listener: Listener, conversations: Conversations) -> int:
    """Serve both listeners until the drain is over."""
    drain = Drain()
    drain_on_signals(drain)
    ring, public = _ring_config(args), replace(public_config(args), tenancy=_tenancy(args))
    _check_that_lanes_fit(ring, public, conversations.config)
    gateway = Gateway(ring)
    app = Public(gateway, public, conversations=conversations)
    control_tls = LiveContext(control_context, _control_files(args), datetime.now(UTC))
    control = await serve_control(gateway, control_tls.for_listener(), _control_config(args))
    reload_on_hangup([control_tls] if listener.tls is None else [control_tls, listener.tls])
    follower = asyncio.create_task(follow([control_tls]))
    print(f"Workers attach at https://{control.endpoint}", flush=True)
    spare_what_is_loaded()
    try:
        await serve(app, gateway, listener, serving_config(args), drain)
    finally:
        follower.cancel()
        # Only now: a worker that is told takes no more lanes, and parked ones are to finish like the others.
        control.drain()
        await control.close()
    return EXIT_INTERRUPTED if drain.is_urgent.is_set() else 0


def _ring_config(args: argparse.Namespace) -> GatewayConfig:
    return replace(
        gateway_config(args),
        heartbeat_interval_s=args.heartbeat_interval,
        heartbeat_timeout_s=args.heartbeat_timeout,
        claim_timeout_s=args.claim_timeout,
    )


def _check_that_lanes_fit(ring: GatewayConfig, public: PublicConfig, history: HistoryConfig) -> None:
    """Raises: ConfigError if workers would end the connection over the largest request or conversation."""
    lane = MAX_LANE_BYTES - ring.response_buffer_bytes
    for name, value, most in (
        ("max_request_bytes", public.max_request_bytes, lane),
        ("max_conversation_bytes", history.max_conversation_bytes, lane // FULL),
    ):
        if value > most:
            raise ConfigError(
                f"{name} is {value}, must be at most {most}: with the progress of its answer, up to "
                f"response_buffer_bytes, {ring.response_buffer_bytes}, it is to fit into a lane"
            )


def _control_files(args: argparse.Namespace) -> CertificateFiles:
    if args.pki is None:
        raise ConfigError(
            "give --pki, the folder of the ingress's certificate: `llm-ingress certs init` makes it"
        )
    return CertificateFiles.in_folder(args.pki)


def _control_config(args: argparse.Namespace) -> ControlConfig:
    endpoint = parse_endpoint(args.control_bind)
    allow = None if args.allow_worker is None else frozenset(args.allow_worker)
    for name in allow or ():
        if not is_worker_name(name):
            raise ConfigError(f"--allow-worker {name!r} can be no worker's name")
    return ControlConfig(host=endpoint.host, port=endpoint.port, allow=allow)


def _tenancy(args: argparse.Namespace) -> Tenancy:
    return Tenancy(by=args.tenant_by, trusted=parse_proxies(args.trusted_proxy))


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
    """SIGTERM and Ctrl-C ask for the drain, and again for its end. Call on the event loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain.ask)


if __name__ == "__main__":
    sys.exit(main())
