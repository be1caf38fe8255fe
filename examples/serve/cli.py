"""`llm-serve`: ingress, worker, engine and chat page in one process.

The engine is loaded before anything else runs, so that its step thread keeps its priority; from then on the
event loop's thread is niced, because a busy one beside the decode would cost most of its speed.
"""

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from llm_engine.cli import (
    add_engine_flags,
    add_max_tokens_flag,
    add_session_ttl_flag,
    add_version_flag,
    engine_config,
    in_flags,
)
from llm_engine.config import EngineConfig
from llm_engine.engine import Engine
from llm_engine.errors import ConfigError as EngineConfigError
from llm_engine.errors import EngineError
from llm_engine.priority import yield_to_decode
from llm_ingress.cli import drain_on_signals, reload_on_hangup, set_up_logging
from llm_ingress.conversations import Conversations
from llm_ingress.draining import Drain
from llm_ingress.errors import ConfigError
from llm_ingress.flags import (
    add_history_flags,
    add_public_flags,
    gateway_config,
    open_conversations,
    public_config,
    serving_config,
)
from llm_ingress.gateway import Gateway, GatewayConfig
from llm_ingress.public import Public, PublicConfig
from llm_ingress.serving import Listener, ServingConfig, listen, serve
from llm_worker.cli import add_compaction_flag
from llm_worker.local import LocalRing
from llm_worker.worker import Worker, WorkerConfig

logger = logging.getLogger(__name__)

EXIT_FAULT = 1
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    set_up_logging()
    # While it loads: what Python's own handler raises inside llama.cpp's log callback would be lost.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        # What can be wrong with options or port is known before a model is loaded.
        settings = _settings(args)
        with (
            closing(listen(settings.serving)) as listener,
            closing(open_conversations(args)) as conversations,
            _load(settings.engine) as engine,
        ):
            yield_to_decode()
            return asyncio.run(_run(settings, listener, conversations, engine))
    except (ConfigError, EngineConfigError) as error:
        print(f"llm-serve: {in_flags(error, args)}", file=sys.stderr)
        return EXIT_FAULT
    except EngineError as error:
        print(f"llm-serve: {error}", file=sys.stderr)
        return EXIT_FAULT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llm-serve",
        description="Serve a GGUF model to many OpenAI clients, with a chat page at /, all in one process.",
    )
    add_version_flag(parser)
    add_engine_flags(parser)
    add_max_tokens_flag(parser)
    add_compaction_flag(parser)
    add_session_ttl_flag(parser)
    add_public_flags(parser)
    add_history_flags(parser)
    return parser


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """The options of each part."""

    engine: EngineConfig
    serving: ServingConfig
    public: PublicConfig
    gateway: GatewayConfig
    worker: WorkerConfig


def _settings(args: argparse.Namespace) -> _Settings:
    engine = engine_config(args, max_tokens=args.max_tokens, session_ttl=args.session_ttl)
    return _Settings(
        engine=engine,
        serving=serving_config(args),
        public=public_config(args),
        gateway=gateway_config(args, n_slots=engine.n_slots),
        worker=WorkerConfig(compaction=args.compaction),
    )


def _load(config: EngineConfig) -> Engine:
    started = time.monotonic()
    engine = Engine.spawn(config)
    info = engine.info
    logger.info(
        "%s is loaded in %.1f s: %d slots of %d tokens",
        info.file,
        time.monotonic() - started,
        info.max_inflight,
        info.n_ctx,
    )
    return engine


async def _run(settings: _Settings, listener: Listener, conversations: Conversations, engine: Engine) -> int:
    """Serve until the drain is over."""
    gateway = Gateway(settings.gateway)
    drain = Drain()
    worker = Worker(engine, settings.worker, [LocalRing(gateway)], on_fault=drain.fail)
    drain_on_signals(drain)
    if listener.tls is not None:
        reload_on_hangup([listener.tls])
    worker.start()
    try:
        app = Public(gateway, settings.public, conversations=conversations, routes=[Route("/", _page)])
        await serve(app, gateway, listener, settings.serving, drain)
    finally:
        worker.close()
    if drain.has_failed.is_set():
        return EXIT_FAULT
    if drain.is_urgent.is_set():
        engine.close(keep_sessions=False)
        return EXIT_INTERRUPTED
    return 0


async def _page(_request: Request) -> HTMLResponse:
    page = files("llm_serve").joinpath("ui/index.html").read_text(encoding="utf-8")
    return HTMLResponse(page)


if __name__ == "__main__":
    sys.exit(main())
