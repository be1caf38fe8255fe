"""The HTTP surface: which path is answered by what.

Paths that take a lane go to `exchange.py` in plain ASGI. The rest (health, models, further routes such as a
page) never take one: they answer at once when every lane is taken, and Starlette serves them.
Owns: the bodies being read, and how many requests are on token paths. Called by: hypercorn.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from llm_ingress import coordinator
from llm_ingress.api import errors as api
from llm_ingress.api.errors import ApiError
from llm_ingress.api.infer import normal_id
from llm_ingress.asgi import Call, Message, Receive, Scope, Send
from llm_ingress.bodies import Bodies
from llm_ingress.conversation import conversation_of_session
from llm_ingress.conversations import Conversations
from llm_ingress.dialects import DIALECTS, Dialect
from llm_ingress.errors import ConfigError, HistoryFault, RefusalReason
from llm_ingress.exchange import FORWARDED_FOR, Exchange, Surroundings
from llm_ingress.gateway import Gateway, GatewaySnapshot, WorkerSnapshot
from llm_ingress.history import ConversationKey
from llm_ingress.relays import Relays
from llm_ingress.tenants import Tenancy
from llm_ingress.wire import Heartbeat, ModelCard

logger = logging.getLogger(__name__)

TOKEN_PATH_METHODS = ("POST", "OPTIONS")
ALL_METHODS = ("GET", "HEAD", *TOKEN_PATH_METHODS)
OWNER = "llm-ring"
CAPACITY_FIELDS = ("inflight", "decoding", "max_inflight", "available_slots")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicConfig:
    """Bounds of what clients may send, and whose it is."""

    max_request_bytes: int = 16 * 1024 * 1024
    max_reading_bytes: int = 256 * 1024 * 1024  # of all bodies being read together
    body_timeout_s: float = 30.0
    tenancy: Tenancy = field(default_factory=Tenancy)

    def __post_init__(self) -> None:
        if self.max_request_bytes < 1:
            raise ConfigError(f"max_request_bytes is {self.max_request_bytes}, must be at least 1")
        if self.max_reading_bytes < self.max_request_bytes:
            raise ConfigError(
                f"max_reading_bytes is {self.max_reading_bytes}, must be at least "
                f"max_request_bytes, {self.max_request_bytes}"
            )
        if not self.body_timeout_s > 0:
            raise ConfigError(f"body_timeout_s is {self.body_timeout_s}, must be more than 0")


class Public:
    """The ASGI application of one ingress. Thread: event loop."""

    def __init__(
        self,
        gateway: Gateway,
        config: PublicConfig | None = None,
        *,
        conversations: Conversations | None = None,
        routes: Sequence[BaseRoute] = (),
    ) -> None:
        config = config or PublicConfig()
        self._around = Surroundings(
            gateway=gateway,
            conversations=conversations or Conversations(),
            tenancy=config.tenancy,
            relays=Relays(),
        )
        self._bodies = Bodies(
            limit_bytes=config.max_request_bytes,
            total_bytes=config.max_reading_bytes,
            timeout_s=config.body_timeout_s,
        )
        self._status = _Status(gateway, self._bodies)
        self._site = _site([*self._status.routes(), *_Sessions(self._around).routes(), *routes])
        self._is_draining = False
        self._n_exchanges = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is on a token path."""
        return self._n_exchanges == 0

    def tick(self) -> None:
        """Act on what time alone decides; called several times a second."""
        for tenant, session_id in self._around.conversations.tick():
            self._around.gateway.forget(tenant, conversation_of_session(session_id))

    def drain(self) -> None:
        """Take no more requests, those that are still arriving included; each answer ends its connection."""
        self._is_draining = True
        self._bodies.turn_away(self._status.draining)

    def fail(self) -> None:
        """Tell from now on that this process is about to end for a fault."""
        self._status.has_failed = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        elif scope["type"] == "http":
            call = Call(scope, receive, send, is_last=self._is_draining)
            try:
                await self._answer(call)
            except Exception:
                logger.exception("request %s failed", call.request_id)
                if not call.has_started:
                    await call.refuse(api.internal())

    async def _answer(self, call: Call) -> None:
        dialect = DIALECTS.get(call.path)
        if dialect is not None and call.method == "POST":
            await self._exchange(dialect, call)
        elif not await call.discard():  # nothing else takes a body, and hypercorn must not be left with one
            await call.refuse_unread(api.request_too_large(0))
        elif call.method == "OPTIONS" and (dialect is not None or call.path == "*"):
            await call.start(204, (("allow", ", ".join(TOKEN_PATH_METHODS if dialect else ALL_METHODS)),))
            await call.finish()
        elif dialect is None:
            await self._visit(call)
        else:
            await call.refuse(api.wrong_method(call.method, call.path, TOKEN_PATH_METHODS))

    async def _exchange(self, dialect: Dialect, call: Call) -> None:
        self._n_exchanges += 1
        try:
            await Exchange(self._around, dialect, call).run(self._bodies)
        finally:
            self._n_exchanges -= 1

    async def _visit(self, call: Call) -> None:
        """Let Starlette answer, with the headers that every answer carries."""

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.has_started = True
                message["headers"] = [*message.get("headers", ()), *call.common_headers()]
            await call.send(message)

        await self._site(call.scope, call.receive, send)


class _Status:
    """The endpoints that tell how the ring is."""

    def __init__(self, gateway: Gateway, bodies: Bodies) -> None:
        self.has_failed = False
        self._gateway = gateway
        self._bodies = bodies

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/v1/models", self.models),
        ]

    async def models(self, request: Request) -> Response:
        """GET /v1/models: exactly the names a request may ask for."""
        cards = self._gateway.models()
        data = [_model_entry(name, card) for card in cards for name in (card.name, *card.aliases)]
        return _json({"object": "list", "data": data})

    async def health(self, request: Request) -> Response:
        """GET /health: 200 as long as this process lives."""
        facts = {**_health(self._gateway.snapshot()), "reading_bytes": self._bodies.n_bytes}
        return _json({**facts, "status": "failed"} if self.has_failed else facts)

    async def ready(self, request: Request) -> Response:
        """GET /ready: whether it is worth sending requests here; busy is ready."""
        snapshot = self._gateway.snapshot()
        if snapshot.draining:
            return _error(self.draining())
        if not _serving(snapshot):
            return _error(self._not_ready(RefusalReason.NO_WORKERS, "no worker is attached"))
        return _json({"status": "ready"})

    def draining(self) -> ApiError:
        """Return what a request is told that comes too late."""
        return self._not_ready(RefusalReason.DRAINING, "the server is shutting down")

    def _not_ready(self, reason: RefusalReason, why: str) -> ApiError:
        return api.overloaded(reason, self._gateway.retry_after_s(reason), why)


class _Sessions:
    """The coordinator's endpoints beside the one that takes a lane."""

    def __init__(self, around: Surroundings) -> None:
        self._gateway = around.gateway
        self._conversations = around.conversations
        self._tenancy = around.tenancy

    def routes(self) -> list[Route]:
        return [
            Route("/coordinator/health", self.health),
            Route("/coordinator/health/workers", self.workers),
            Route("/coordinator/stats", self.stats),
            Route("/coordinator/sessions/{session_id}", self.delete, methods=["DELETE"]),
        ]

    async def health(self, request: Request) -> Response:
        """GET /coordinator/health: 200 as long as this process lives."""
        kept, bounds = self._conversations.snapshot(), self._conversations.config
        return _json(coordinator.health(self._gateway.snapshot(), kept, bounds))

    async def workers(self, request: Request) -> Response:
        """GET /coordinator/health/workers: who is attached."""
        return _json(coordinator.workers(self._gateway.snapshot()))

    async def stats(self, request: Request) -> Response:
        """GET /coordinator/stats: what is under way."""
        return _json(coordinator.stats(self._gateway.snapshot(), self._conversations.snapshot()))

    async def delete(self, request: Request) -> Response:
        """DELETE /coordinator/sessions/{id}: forget a conversation of this client's."""
        session_id = normal_id(request.path_params["session_id"])
        forwarded = request.headers.getlist(FORWARDED_FOR.decode())
        host = request.client.host if request.client else ""
        tenant = self._tenancy.tenant_of(host, forwarded, request.query_params.get("user"))
        self._gateway.forget(tenant, conversation_of_session(session_id))
        try:
            was_there = await self._conversations.forget(ConversationKey(tenant, session_id))
        except HistoryFault as fault:
            logger.error("a conversation was not deleted: %s", fault)
            return _error(api.internal("The session could not be deleted."))
        return Response(status_code=204) if was_there else _error(api.unknown_session(session_id))


def _site(routes: Sequence[BaseRoute]) -> Starlette:
    site = Starlette(
        routes=routes,
        exception_handlers={404: _not_found, 405: _wrong_method, Exception: _fault},
    )
    site.router.redirect_slashes = False
    return site


async def _not_found(request: Request, error: Exception) -> Response:
    return _error(api.unknown_route(request.method, request.url.path))


async def _fault(request: Request, error: Exception) -> Response:
    """Answer in the API's words; Starlette then raises the error on, and it is logged."""
    return _error(api.internal())


async def _wrong_method(request: Request, error: Exception) -> Response:
    """Answer OPTIONS, which Starlette knows no better, and refuse the rest."""
    assert isinstance(error, HTTPException)
    allowed = (*(error.headers or {}).get("Allow", "").split(", "), "OPTIONS")
    if request.method == "OPTIONS":
        return Response(status_code=204, headers={"allow": ", ".join(allowed)})
    return _error(api.wrong_method(request.method, request.url.path, allowed))


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def _error(error: ApiError) -> Response:
    return Response(error.body(), error.status, dict(error.headers), media_type="application/json")


def _model_entry(name: str, card: ModelCard) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": card.created, "owned_by": OWNER}


def _serving(snapshot: GatewaySnapshot) -> list[WorkerSnapshot]:
    return [worker for worker in snapshot.workers if worker.is_live and not worker.is_draining]


def _health(snapshot: GatewaySnapshot) -> dict[str, Any]:
    beats = [worker.heartbeat for worker in snapshot.workers if worker.is_live and worker.heartbeat]
    return {
        "status": _status_of(snapshot),
        "draining": snapshot.draining,
        **{field: sum(getattr(beat, field) for beat in beats) for field in CAPACITY_FIELDS},
        "ring_streams": snapshot.ring_streams,
        "lanes": {state.value: n for state, n in snapshot.lanes.items()},
        "accepted": snapshot.accepted,
        "finished": snapshot.finished,
        "cancelled": snapshot.cancelled,
        "failed": snapshot.failed,
        "open": snapshot.open,
        "dropped_frames": snapshot.dropped_frames,
        "affinity": asdict(snapshot.affinity),
        "budgets": asdict(snapshot.budgets),
        "model": _model_facts(snapshot.workers[0].card) if snapshot.workers else None,
        "workers": [_worker_facts(worker) for worker in snapshot.workers],
    }


def _status_of(snapshot: GatewaySnapshot) -> str:
    if snapshot.draining:
        return "draining"
    return "ok" if _serving(snapshot) else "no_workers"


def _model_facts(card: ModelCard) -> dict[str, Any]:
    return {
        "name": card.name,
        "aliases": card.aliases,
        "file": card.file,
        "n_params": card.n_params,
        "n_ctx": card.n_ctx,
        "fingerprint": card.fingerprint,
    }


def _worker_facts(worker: WorkerSnapshot) -> dict[str, Any]:
    return {
        "name": worker.name,
        "model": worker.card.name,
        "is_live": worker.is_live,
        "is_draining": worker.is_draining,
        "heard_ago_s": round(worker.heard_ago_s, 3),
        "credit": worker.credit,
        "lanes": worker.n_held,
        "granted": worker.n_granted,
        **_beat_facts(worker.heartbeat),
    }


def _beat_facts(heartbeat: Heartbeat | None) -> dict[str, Any]:
    if heartbeat is None:
        return {}
    return {name: getattr(heartbeat, name) for name in Heartbeat.__slots__}
