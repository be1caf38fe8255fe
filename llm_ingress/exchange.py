"""One request on a token path, from its body to the last byte of its answer.

Called by: `public.py`, one task a request. A second task of each waits for the client to leave.

The status is decided once: nothing is sent before the worker's head and its first bytes (or the end) are
there, so whatever fails until then is a real status. After it, a failure is the dialect's error event.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from llm_ingress.api import errors as api
from llm_ingress.api.errors import ApiError
from llm_ingress.asgi import Call, ClientLeft, Express
from llm_ingress.bodies import Bodies
from llm_ingress.conversations import Conversations, Turn
from llm_ingress.dialects import Asked, Dialect
from llm_ingress.errors import (
    ConversationFull,
    ConversationGone,
    HistoryFault,
    NoTurn,
    RefusalReason,
    Refused,
    UnknownModel,
)
from llm_ingress.gateway import Gateway, Lane, LaneRequest, Outcome, OutcomeReason
from llm_ingress.history import ConversationKey
from llm_ingress.media import check_media
from llm_ingress.relays import Relays
from llm_ingress.tenants import Tenancy
from llm_ingress.wire import Head

logger = logging.getLogger(__name__)

# After its lane has ended, a client has this long to take what is left of the answer.
FLUSH_TIMEOUT_S = 30.0
FORWARDED_FOR = b"x-forwarded-for"

_REFUSALS = {
    OutcomeReason.QUEUE_TIMEOUT: RefusalReason.QUEUE_TIMEOUT,
    OutcomeReason.DISPLACED: RefusalReason.RING_FULL,
    OutcomeReason.NO_WORKERS: RefusalReason.NO_WORKERS,
    OutcomeReason.DRAIN_ENDED: RefusalReason.DRAINING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all exchanges of one public surface share."""

    gateway: Gateway
    conversations: Conversations
    tenancy: Tenancy
    relays: Relays


class Exchange:
    """One request and the lane it takes. Thread: event loop."""

    def __init__(self, around: Surroundings, dialect: Dialect, call: Call) -> None:
        self._gateway = around.gateway
        self._conversations = around.conversations
        self._relays = around.relays
        self._tenancy = around.tenancy
        self._dialect = dialect
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._began_at = time.monotonic()
        self._lane: Lane | None = None
        self._turn: Turn | None = None  # of a conversation, once it is this request's
        self._task: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._express: Express | None = None  # while a stream is relayed
        self._flush_timer: asyncio.TimerHandle | None = None
        self._is_ending = False
        self._is_aborted = False

    async def run(self, bodies: Bodies) -> None:
        """Read, admit, answer."""
        try:
            check_media(self._call.header(b"content-type"), self._call.headers(b"content-encoding"))
            body = await bodies.read(self._call)
        except ClientLeft:
            return
        except ApiError as error:
            self._log_refusal(error)
            await self._call.refuse_unread(error)
            return
        self._task = asyncio.current_task()
        watcher = asyncio.create_task(self._watch())
        try:
            lane = await self._enter(body)
            del body  # the lane keeps it
            await self._answer(lane)
        except ApiError as error:
            self._log_refusal(error)
            self._is_ending = True
            await self._call.refuse(error)
        except asyncio.CancelledError:
            if not self._is_aborted or self._task is None:
                raise
            self._task.uncancel()
        finally:
            watcher.cancel()
            self._leave()

    async def _enter(self, body: bytes) -> Lane:
        """Take a place in the ring, in a conversation once it is this request's turn. Raises: ApiError."""
        asked = self._dialect.read(body)
        tenant = self._tenancy.tenant_of(
            self._call.client_host, self._call.headers(FORWARDED_FOR), asked.user
        )
        if asked.session_id is not None:
            self._turn = await self._begin_turn(ConversationKey(tenant, asked.session_id), len(body))
            body = self._turn.body(body)
        return self._open_lane(asked, tenant, body)

    async def _begin_turn(self, key: ConversationKey, n_bytes: int) -> Turn:
        """Wait until the turns before it have ended. Raises: ApiError."""
        limit_bytes = self._conversations.config.max_conversation_bytes
        if n_bytes > limit_bytes:
            raise api.prompt_too_large(limit_bytes)
        try:
            return await self._conversations.begin(key, n_bytes, self._gateway.config.queue_timeout_s)
        except NoTurn as error:
            wait_s = self._gateway.retry_after_s(error.reason)
            raise api.overloaded(error.reason, wait_s, str(error)) from error
        except ConversationFull as error:
            raise api.session_full(str(error)) from error
        except ConversationGone as error:
            raise api.session_gone(str(error)) from error

    def _open_lane(self, asked: Asked, tenant: str, body: bytes) -> Lane:
        """Raises: ApiError."""
        request = LaneRequest(
            path=self._call.path,
            body=body,
            model=asked.model,
            request_id=self._call.request_id,
            tenant=tenant,
            conversation=asked.conversation,
        )
        try:
            self._lane = self._gateway.open_lane(request, self._on_change, self._dialect.at_cap)
        except UnknownModel as error:
            raise api.model_not_found(error.model) from error
        except Refused as error:
            raise api.overloaded(error.reason, error.retry_after_s, error.message) from error
        return self._lane

    def _leave(self) -> None:
        """Whatever the answer came to: leave its lane, and let the conversation's next turn begin."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        if self._lane is not None:
            self._gateway.leave(self._lane)
            self._log_end(self._lane)
        if self._turn is not None:
            self._end_turn(self._turn)
        # Lane and task both lead back here: without this their bodies wait for the garbage collector.
        self._lane = self._task = None

    def _end_turn(self, turn: Turn) -> None:
        """Let the conversation's next turn begin. Where nothing is left of it, its session ends with it."""
        turn.end()
        if turn.is_void and self._lane is not None and (gone := self._lane.request.conversation) is not None:
            self._gateway.forget(self._lane.request.tenant, gone)

    async def _answer(self, lane: Lane) -> None:
        while lane.outcome is None and not lane.unread:
            await self._change()
        head = lane.head
        if lane.outcome is not None and (error := self._failure(lane.outcome)) is not None:
            await self._refuse(lane, error)
        elif head is not None and _is_stream(head):
            await self._relay(lane, head)
        else:
            await self._collect(lane)

    async def _relay(self, lane: Lane, head: Head) -> None:
        """Pass a stream on, as it comes. Most of it goes by the short way, while this waits."""
        await self._call.start(head.status, (*head.headers, _lane_header(lane)))
        self._express = self._call.express
        while True:
            if lane.unread:
                await self._call.write(self._gateway.take(lane))
            elif lane.outcome is None:
                await self._change()
            else:
                break
        last = await self._last_words(lane.outcome)
        self._is_ending = True
        await self._call.finish(last)

    async def _last_words(self, outcome: Outcome) -> bytes:
        """What a stream ends with, behind all that its worker sent: of a turn, once that is kept."""
        error = self._failure(outcome)
        if error is None and self._turn is not None and outcome.end is not None:
            try:
                return await self._turn.keep(outcome.end.record)
            except HistoryFault as fault:
                logger.error("request %s: %s", self._call.request_id, fault)
                error = api.internal("The turn could not be kept: the conversation is as it was before.")
        return b"" if error is None else self._dialect.error_event(error)

    async def _collect(self, lane: Lane) -> None:
        """Send the answer in one piece, once it is complete."""
        pieces = []
        while lane.outcome is None or lane.unread:
            if lane.unread:
                pieces.append(self._gateway.take(lane))
            else:
                await self._change()
        error = self._failure(lane.outcome)
        if error is not None or lane.head is None:
            await self._refuse(lane, error or api.internal())
            return
        length = ("content-length", str(sum(map(len, pieces))))
        await self._call.start(lane.head.status, (*lane.head.headers, length, _lane_header(lane)))
        await self._call.write(b"".join(pieces))
        self._is_ending = True
        await self._call.finish()

    async def _refuse(self, lane: Lane, error: ApiError) -> None:
        self._is_ending = True
        await self._call.refuse(error, (_lane_header(lane),))

    def _failure(self, outcome: Outcome) -> ApiError | None:
        """Return the error a client meets at the end of its lane, None if the answer is complete."""
        reason = outcome.reason
        if reason in _REFUSALS:
            refusal = _REFUSALS[reason]
            return api.overloaded(refusal, self._gateway.retry_after_s(refusal), outcome.message)
        if reason is OutcomeReason.DEADLINE:
            return api.deadline_passed(f"The request was {outcome.message}.")
        if reason in (OutcomeReason.WORKER_LOST, OutcomeReason.ATTEMPTS_SPENT):
            message = "The worker that answered was lost, and no other could go on."
            is_hopeless = reason is OutcomeReason.ATTEMPTS_SPENT
            return api.worker_unavailable(message, is_hopeless=is_hopeless)
        if reason is OutcomeReason.WORKER_FAILED:
            return self._dialect.worker_failed()
        return None

    # What wakes the answer, and what ends it early.

    async def _change(self) -> None:
        """Wait until the lane has something new. Nothing is lost: no turn of the loop lies between."""
        self._waiter = self._loop.create_future()
        await self._waiter

    def _on_change(self) -> None:
        lane = self._lane
        if lane is None or lane.outcome is not None or self._express is None:
            self._wake()
        elif self._waiter is not None:
            self._relays.add(self)
        if lane is not None and lane.outcome is not None:
            self._on_end(lane.outcome)

    def pass_on(self) -> None:
        """Send what is unread by the short way, or leave it to the answer's task if that is shut."""
        lane, express = self._lane, self._express
        if self._waiter is None or lane is None or express is None or not lane.unread:
            return
        if express.takes(lane.unread):
            express.write(self._gateway.take(lane))
        else:
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _on_end(self, outcome: Outcome) -> None:
        if outcome.reason is OutcomeReason.STALLED:
            self._abort()
        else:
            self._flush_timer = self._loop.call_later(FLUSH_TIMEOUT_S, self._abort)

    async def _watch(self) -> None:
        """Wait for the client to leave, and stop its work at once, whatever the answer waits for."""
        while (await self._call.receive())["type"] != "http.disconnect":
            pass
        if self._lane is not None:
            self._gateway.leave(self._lane)
        # Past its last byte hypercorn reports every connection as left, and is still tidying it up.
        if not self._is_ending:
            self._abort()

    def _abort(self) -> None:
        """Stop answering; the connection, or its HTTP/2 stream, is then broken off."""
        self._is_aborted = True
        if self._task is not None:
            self._task.cancel()

    # One line a request.

    def _log_refusal(self, error: ApiError) -> None:
        logger.info(
            "request %s refused: status=%d code=%s param=%s reason=%s",
            self._call.request_id,
            error.status,
            error.code,
            error.param,
            error.extra.get("reason"),
        )

    def _log_end(self, lane: Lane) -> None:
        logger.info(
            "request %s lane %d: model=%s %s total_ms=%.0f outcome=%s",
            self._call.request_id,
            lane.id,
            lane.model,
            " ".join(f"{name}={value:.0f}" for name, value in self._account(lane) if value is not None),
            (time.monotonic() - self._began_at) * 1000,
            lane.outcome.reason if lane.outcome else "fault",
        )

    def _account(self, lane: Lane) -> Iterator[tuple[str, float | None]]:
        """Yield what is known of the answer: by the worker's END, or by the progress it made."""
        end = lane.outcome.end if lane.outcome else None
        yield "n_prompt", end.n_prompt if end else lane.tally.n_prompt
        yield "n_cached", end.n_cached if end else None
        yield "n_out", end.n_completion if end else lane.tally.n_generated
        yield "ttft_ms", lane.first_token_at and (lane.first_token_at - self._began_at) * 1000


def _is_stream(head: Head) -> bool:
    return any(
        name == "content-type" and value.startswith("text/event-stream") for name, value in head.headers
    )


def _lane_header(lane: Lane) -> tuple[str, str]:
    return ("x-lane-id", str(lane.id))
