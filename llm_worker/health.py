"""The worker's own small HTTP listener: is it alive, is it of use, how busy is it.

It only reads; who may see that is the operator's choice of address. Prometheus text has no label: a worker is
one process with one model, and the scraper knows its address.

Called by: the command line. Thread: event loop.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from socket import AF_INET, AF_INET6, create_server, has_dualstack_ipv6, socket
from typing import Any, TypeAlias

import orjson
from aiohttp import web

from llm_ingress.endpoint import Endpoint
from llm_worker.errors import WorkerConfigError
from llm_worker.snapshot import WorkerSnapshot

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
CLOSE_S = 1.0

Look: TypeAlias = Callable[[], WorkerSnapshot]
Handler: TypeAlias = Callable[[WorkerSnapshot], web.Response]


def listen_for_health(endpoint: Endpoint) -> socket:
    """Open the socket. Raises: WorkerConfigError if the address cannot be had."""
    is_ipv6 = ":" in endpoint.host
    try:
        return create_server(
            (endpoint.host, endpoint.port),
            family=AF_INET6 if is_ipv6 else AF_INET,
            dualstack_ipv6=is_ipv6 and has_dualstack_ipv6(),
        )
    except OSError as error:
        raise WorkerConfigError(f"cannot listen for health checks on {endpoint}: {error.strerror}") from error


@asynccontextmanager
async def serve_health(listener: socket, look: Look) -> AsyncIterator[None]:
    """Answer on an open socket until the block ends; takes the socket over."""
    app = web.Application()
    for path, handler in (("/health", health), ("/ready", ready), ("/metrics", metrics)):
        app.router.add_get(path, partial(_answer, handler, look))
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=CLOSE_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        yield
    finally:
        await runner.cleanup()


async def _answer(handler: Handler, look: Look, _request: web.Request) -> web.Response:
    return handler(look())


def health(worker: WorkerSnapshot) -> web.Response:
    """200 as long as this process lives."""
    return _json(
        {
            "status": _status_of(worker),
            "name": worker.name,
            "model": asdict(worker.model),
            "jobs": worker.n_jobs,
            "summaries": worker.n_summaries,
            **asdict(worker.capacity),
            "rings": [asdict(ring) for ring in worker.rings],
        }
    )


def ready(worker: WorkerSnapshot) -> web.Response:
    """Whether an ingress can grant it a lane; a busy worker is ready."""
    status = _status_of(worker)
    return _json({"status": status}, status=200 if status == "ok" else 503)


def metrics(worker: WorkerSnapshot) -> web.Response:
    """The same in Prometheus text."""
    lines = [line for name, text, value in _measured(worker) for line in _exposed(name, text, value)]
    return web.Response(body="".join(lines).encode(), headers={"content-type": PROMETHEUS})


def _status_of(worker: WorkerSnapshot) -> str:
    if worker.has_failed:
        return "failed"
    if worker.is_draining:
        return "draining"
    return "ok" if worker.n_attached else "no_ingress"


def _measured(worker: WorkerSnapshot) -> Iterator[tuple[str, str, float]]:
    capacity = worker.capacity
    yield "slots", "Requests that can be decoded at once.", capacity.max_inflight
    yield "available_slots", "Lanes it would take now.", capacity.available_slots
    yield "open_lanes", "Lanes it holds, in preparation or running.", worker.n_jobs
    yield "inflight_requests", "Requests accepted and still running.", capacity.inflight
    yield "decoding_requests", "Requests in the current batch.", capacity.decoding
    yield "step_seconds", "Duration of a usual step.", capacity.step_ms / 1000
    yield "step_age_seconds", "Time since the last step ended, 0 when idle.", capacity.step_age_s
    yield "kv_promised_tokens", "KV cells promised to running requests.", capacity.kv_promised_tokens
    yield "kv_promised_bytes", "What those cells take.", capacity.kv_promised_bytes
    yield "kv_bytes", "KV kept, of running requests and of earlier ones.", capacity.kv_bytes
    yield "sessions", "Conversations whose KV is kept.", capacity.sessions
    yield "prompt_tokens_per_second", "Speed of a prompt of some 2,000.", capacity.prompt_tokens_per_second
    yield "generated_tokens_per_second", "Tokens generated per second.", capacity.tokens_per_second
    yield "known_ingresses", "Ingresses it serves or dials.", len(worker.rings)
    yield "attached_ingresses", "Ingresses that could grant it a lane.", worker.n_attached
    yield "summaries_total", "Summaries of outgrown conversations asked of its engine.", worker.n_summaries
    yield "draining", "1 when it takes nothing more.", worker.is_draining


def _exposed(name: str, text: str, value: float) -> tuple[str, str, str]:
    full, kind = f"llm_worker_{name}", "counter" if name.endswith("_total") else "gauge"
    return f"# HELP {full} {text}\n", f"# TYPE {full} {kind}\n", f"{full} {float(value):g}\n"


def _json(content: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")
