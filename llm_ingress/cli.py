"""`llm-ingress`, and the flags of everything that serves the public surface.

Called by: the operator; `examples/serve/cli.py`, for the flags and what they make. Environment variables
stand in for the flags people set in containers; a flag wins over its variable.
"""

import argparse
import asyncio
import ipaddress
import logging
import math
import os
import re
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
from llm_ingress.frames import MAX_LANE_BYTES
from llm_ingress.gateway import AtCap, Budgets, Gateway, GatewayConfig
from llm_ingress.history import FULL, HistoryConfig
from llm_ingress.history_file import HistoryFile
from llm_ingress.public import Public, PublicConfig
from llm_ingress.serving import Listener, ServingConfig, listen, serve
from llm_ingress.tenants import Tenancy, TenantBy, parse_proxies
from llm_ingress.tls import LiveContext, control_context, follow

LOOPBACK = "127.0.0.1"
PLAIN_PORT, TLS_PORT = 8080, 8443
CONTROL_BIND = f"{LOOPBACK}:8444"
READING_BYTES = 256 * 1024 * 1024  # of all bodies being read together
HISTORY_IN_MEMORY, HISTORY_IN_SQLITE = "memory", "sqlite:"
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
    _add_seconds(
        control, "--heartbeat-timeout", bounds.heartbeat_timeout_s, "a worker silent for so long is lost"
    )
    _add_seconds(
        control, "--heartbeat-interval", bounds.heartbeat_interval_s, "how often workers are set to be heard"
    )
    _add_seconds(
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


def add_public_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that `serving_config`, `public_config` and `gateway_config` read.

    The status named is that of a request whose answer has not begun; one that has ends in an error event.
    """
    listener = parser.add_argument_group("public listener")
    listener.add_argument(
        "--bind",
        default=os.environ.get("HOST") or LOOPBACK,
        metavar="HOST",
        help=f"address to listen on, :: for all of IPv4 and IPv6 (default: {LOOPBACK}; environment: HOST)",
    )
    listener.add_argument(
        "--port",
        type=int,
        default=os.environ.get("PORT") or None,
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
    _add_count(limits, "--ring-streams", 64, "requests held at once, waiting or running; beyond it 503")
    limits.add_argument(
        "--request-timeout",
        type=float,
        metavar="S",
        help="seconds a request may take in all, then 504 (default: off)",
    )
    limits.add_argument(
        "--max-request-bytes",
        type=int,
        default=16 * 1024 * 1024,
        metavar="BYTES",
        help="largest request body, beyond it 413 (default: 16 MiB)",
    )
    _add_seconds(
        limits, "--body-timeout", 30, "a request's headers may take this long, and then its body, else 408"
    )
    limits.add_argument(
        "--response-buffer",
        type=int,
        default=256 * 1024,
        metavar="BYTES",
        help="unread bytes at which a slow client's answer is paused (default: 256 KiB)",
    )
    _add_seconds(limits, "--stall-timeout", 10, "a client whose answer was paused so long in all is dropped")
    _add_seconds(
        limits, "--no-worker-timeout", 10, "a request waits this long while no worker is attached, then 503"
    )
    _add_count(limits, "--max-attempts", 3, "times a request may lose its worker, then 502")
    _add_seconds(limits, "--drain-timeout", 30, "on SIGTERM or Ctrl-C running answers may take this long")
    _add_budget_flags(parser)


def _add_budget_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("conversations and budgets")
    budgets = Budgets()
    group.add_argument(
        "--affinity-wait-ms",
        type=float,
        default=GatewayConfig().affinity_wait_ms,
        metavar="MS",
        help="a request waits at most this long for the worker that holds its conversation, and no longer"
        " than computing that anew would take (default: %(default)g)",
    )
    _add_count(
        group, "--max-sessions", budgets.max_sessions, "sessions: conversations with a conversation_id"
    )
    _add_count(group, "--max-sessions-per-worker", budgets.max_sessions_per_worker, "sessions of one worker")
    _add_count(group, "--max-kv-mib", budgets.max_kv_mib, "KV of running requests in all, MiB")
    _add_count(
        group, "--max-kv-mib-per-worker", budgets.max_kv_mib_per_worker, "KV of those of one worker, MiB"
    )
    _add_count(
        group,
        "--max-in-flight-decodes",
        os.environ.get("MAX_IN_FLIGHT_DECODES") or budgets.max_in_flight_decodes,
        "requests with workers at once; environment: MAX_IN_FLIGHT_DECODES",
    )
    group.add_argument(
        "--max-in-flight-decodes-per-worker",
        type=int,
        default=os.environ.get("MAX_IN_FLIGHT_DECODES_PER_WORKER") or None,
        metavar="N",
        help="requests with one worker at once (default: its slots;"
        " environment: MAX_IN_FLIGHT_DECODES_PER_WORKER)",
    )
    group.add_argument(
        "--at-cap",
        type=AtCap,
        choices=tuple(AtCap),
        help="what becomes of a request while one of these is spent: it waits, or gets 503 at once"
        " (default: park on /v1, refuse on /coordinator)",
    )


def _add_count(group: "argparse._ArgumentGroup", flag: str, default: int | str, help_text: str) -> None:
    group.add_argument(
        flag, type=int, default=default, metavar="N", help=f"{help_text} (default: %(default)s)"
    )


def add_history_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that `open_conversations` reads, but for `--session-ttl`."""
    bounds = HistoryConfig()
    history = parser.add_argument_group("conversations of /coordinator/infer")
    history.add_argument(
        "--history",
        default=HISTORY_IN_MEMORY,
        metavar="WHERE",
        help=f"{HISTORY_IN_MEMORY}, or {HISTORY_IN_SQLITE}PATH to outlive a restart (default: %(default)s)",
    )
    _add_count(
        history,
        "--history-conversations",
        bounds.max_conversations,
        "conversations kept; beyond it the one unused for longest ends",
    )
    history.add_argument(
        "--history-conversation-bytes",
        type=int,
        default=bounds.max_conversation_bytes,
        metavar="BYTES",
        help="kept of one conversation; beyond it older turns become a summary (default: 1 MiB)",
    )
    history.add_argument(
        "--history-bytes",
        type=int,
        default=bounds.max_bytes,
        metavar="BYTES",
        help="kept of all conversations; beyond it the ones unused for longest end (default: 256 MiB)",
    )


def add_session_ttl_flag(parser: argparse.ArgumentParser) -> None:
    """The flag that says how long what is not used is kept."""
    _add_seconds(
        parser,
        "--session-ttl",
        HistoryConfig().ttl_s,
        "a conversation not used for so long ends, with 0 none",
    )


def _add_seconds(group: "argparse._ActionsContainer", flag: str, default: float, help_text: str) -> None:
    group.add_argument(
        flag, type=float, default=default, metavar="S", help=f"{help_text}; seconds (default: %(default)s)"
    )


def serving_config(args: argparse.Namespace) -> ServingConfig:
    """Where to listen.

    Raises: ConfigError, also for plain HTTP that other machines could reach.
    """
    if args.tls_cert is None and not args.insecure and not is_loopback(args.bind):
        raise ConfigError(
            f"refusing plain HTTP on {args.bind or 'every address'}, which other machines can reach: "
            "give --tls-cert and --tls-key, or --insecure"
        )
    default_port = PLAIN_PORT if args.tls_cert is None else TLS_PORT
    return ServingConfig(
        host=args.bind,
        port=default_port if args.port is None else args.port,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        head_timeout_s=public_config(args).body_timeout_s,
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
    """Bounds of lanes; `--session-ttl` is among them. Raises: ConfigError."""
    return GatewayConfig(
        ring_streams=args.ring_streams,
        queue_timeout_s=args.queue_timeout,
        request_timeout_s=args.request_timeout,
        response_buffer_bytes=args.response_buffer,
        stall_timeout_s=args.stall_timeout,
        no_worker_timeout_s=args.no_worker_timeout,
        max_attempts=args.max_attempts,
        affinity_wait_ms=args.affinity_wait_ms,
        budgets=Budgets(
            max_sessions=args.max_sessions,
            max_sessions_per_worker=args.max_sessions_per_worker,
            max_kv_mib=args.max_kv_mib,
            max_kv_mib_per_worker=args.max_kv_mib_per_worker,
            max_in_flight_decodes=args.max_in_flight_decodes,
            max_in_flight_decodes_per_worker=args.max_in_flight_decodes_per_worker,
            session_ttl_s=args.session_ttl or math.inf,
        ),
        at_cap=args.at_cap,
    )


def in_flags(error: Exception, args: argparse.Namespace) -> str:
    """Return what is wrong with the options, each called as the flag that sets it."""
    text = str(error)
    for name in vars(args):
        # A word of everyday use is an option only where the sentence is about it.
        option = rf"(?<!\S){name}(_s|_bytes)?(?=[ ,]|$)" if "_" in name else rf"^{name}(?= is )"
        text = re.sub(option, f"--{name.replace('_', '-')}", text)
    return text


def open_conversations(args: argparse.Namespace) -> Conversations:
    """What conversations said before, from the file if there is one. Raises: ConfigError."""
    config = HistoryConfig(
        max_conversations=args.history_conversations,
        max_conversation_bytes=args.history_conversation_bytes,
        max_bytes=args.history_bytes,
        ttl_s=args.session_ttl or math.inf,
    )
    where: str = args.history
    if where == HISTORY_IN_MEMORY:
        return Conversations(config)
    path = where.removeprefix(HISTORY_IN_SQLITE)
    if path in ("", where):
        raise ConfigError(f"--history {where!r} is neither {HISTORY_IN_MEMORY} nor {HISTORY_IN_SQLITE}PATH")
    return Conversations(config, HistoryFile(Path(path)))


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
    """SIGTERM and Ctrl-C ask for the drain, and again for its end. Call on the event loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain.ask)


if __name__ == "__main__":
    sys.exit(main())
