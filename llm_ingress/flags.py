"""The flags of everything that serves the public surface, and what they make.

Called by: `cli.py`, and `examples/serve/cli.py`. Environment variables stand in for the flags people set in
containers; a flag wins over its variable.
"""

import argparse
import ipaddress
import math
import os
import re
from pathlib import Path

from llm_ingress.conversations import Conversations
from llm_ingress.errors import ConfigError
from llm_ingress.gateway import AtCap, Budgets, GatewayConfig
from llm_ingress.history import HistoryConfig
from llm_ingress.history_file import HistoryFile
from llm_ingress.public import PublicConfig
from llm_ingress.serving import ServingConfig

LOOPBACK = "127.0.0.1"
PLAIN_PORT, TLS_PORT = 8080, 8443
READING_BYTES = 256 * 1024 * 1024  # of all bodies being read together
HISTORY_IN_MEMORY, HISTORY_IN_SQLITE = "memory", "sqlite:"


def add_public_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that `serving_config`, `public_config` and `gateway_config` read.

    The status named is that of a request whose answer has not begun; one that has ends in an error event.
    """
    _add_listener_flags(parser)
    _add_limit_flags(parser)
    _add_budget_flags(parser)


def _add_listener_flags(parser: argparse.ArgumentParser) -> None:
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


def _add_limit_flags(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits")
    add_seconds(limits, "--queue-timeout", 60, "a request waits this long for a slot, then 503")
    limits.add_argument(
        "--ring-streams",
        type=int,
        metavar="N",
        help="requests held at once, waiting or running; beyond it 503"
        f" (default: {GatewayConfig().ring_streams}, in llm-serve twice its slots, if that is more)",
    )
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
    add_seconds(
        limits, "--body-timeout", 30, "a request's headers may take this long, and then its body, else 408"
    )
    limits.add_argument(
        "--response-buffer",
        type=int,
        default=256 * 1024,
        metavar="BYTES",
        help="unread bytes at which a slow client's answer is paused (default: 256 KiB)",
    )
    add_seconds(limits, "--stall-timeout", 10, "a client whose answer was paused so long in all is dropped")
    add_seconds(
        limits, "--no-worker-timeout", 10, "a request waits this long while no worker is attached, then 503"
    )
    _add_count(limits, "--max-attempts", 3, "times a request may lose its worker, then 502")
    add_seconds(limits, "--drain-timeout", 30, "on SIGTERM or Ctrl-C running answers may take this long")


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
    group.add_argument(
        "--max-in-flight-decodes",
        type=int,
        default=os.environ.get("MAX_IN_FLIGHT_DECODES") or None,
        metavar="N",
        help=f"requests with workers at once (default: {budgets.max_in_flight_decodes}, in llm-serve as many"
        " as it has slots, if that is more; environment: MAX_IN_FLIGHT_DECODES)",
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


def _add_count(group: "argparse._ArgumentGroup", flag: str, default: int, help_text: str) -> None:
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
    add_seconds(
        parser,
        "--session-ttl",
        HistoryConfig().ttl_s,
        "a conversation not used for so long ends, with 0 none",
    )


def add_seconds(group: "argparse._ActionsContainer", flag: str, default: float, help_text: str) -> None:
    group.add_argument(
        flag, type=float, default=default, metavar="S", help=f"{help_text}; seconds (default: %(default)s)"
    )


def serving_config(args: argparse.Namespace) -> ServingConfig:
    """Where to listen.

    Raises: ConfigError, also for plain HTTP that other machines could reach.
    """
    if args.tls_cert is None and not args.insecure and not _is_loopback(args.bind):
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


def gateway_config(args: argparse.Namespace, *, n_slots: int = 0) -> GatewayConfig:
    """Bounds of lanes; `--session-ttl` is among them. Raises: ConfigError.

    `n_slots`: of the worker in this process, which are not to stay empty for a limit that nobody set.
    """
    n_lanes, n_decodes = args.ring_streams, args.max_in_flight_decodes
    if n_lanes is None:
        n_lanes = max(2 * n_slots, GatewayConfig().ring_streams)
    if n_decodes is None:
        n_decodes = max(n_slots, Budgets().max_in_flight_decodes)
    return GatewayConfig(
        ring_streams=n_lanes,
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
            max_in_flight_decodes=n_decodes,
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


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
