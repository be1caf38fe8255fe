"""Turns of conversations: one begins when the last has ended, and is kept before its client has the end.

    turn = await conversations.begin(key, n_request_bytes, timeout_s)    # it may wait in line
    turn.body(request); closing = await turn.keep(record); turn.end()    # end, whatever happened

A turn that is not kept (it failed, or its client left before it had all of the answer) has never been.
Owns: the history, its file, and who is next in each conversation. Called by: `exchange.py`, `public.py`.
Thread: event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from llm_ingress.errors import ConversationGone, HistoryFault, NoTurn, RefusalReason, WireError
from llm_ingress.history import Conversation, ConversationKey, History, HistoryConfig
from llm_ingress.history_file import HistoryFile
from llm_ingress.lines import Lines, Ticket
from llm_ingress.turns import TurnRecord, pack_asked, unpack_turn

logger = logging.getLogger(__name__)

# Beyond it a client asks faster than it reads answers. Each waits with its body in memory.
WAITING_PER_CONVERSATION = 8
WAITING_IN_ALL = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationsSnapshot:
    """How much is kept, and how many turns wait for the one before them."""

    n_conversations: int
    n_bytes: int
    n_waiting: int


class Conversations:
    """The conversations of one ingress."""

    def __init__(
        self,
        config: HistoryConfig | None = None,
        file: HistoryFile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or HistoryConfig()
        self._history = History(self.config)
        self._file = file
        self._clock = clock
        self._lines = Lines(max_waiting=WAITING_PER_CONVERSATION, max_waiting_in_all=WAITING_IN_ALL)
        self._waiters: dict[ConversationKey, dict[Ticket, asyncio.Future[None]]] = {}
        self._deletions: set[asyncio.Task[None]] = set()
        self._lost: list[ConversationKey] = []  # since the last tick
        self._undeleted: set[ConversationKey] = set()  # they have ended, and may be in the file yet
        if file is not None:
            now = clock()
            self._history.restore(file.load(now), now)

    async def begin(self, key: ConversationKey, n_request_bytes: int, timeout_s: float) -> "Turn":
        """Wait for the turns before it, and begin one.

        Raises: NoTurn, ConversationGone, ConversationFull.
        """
        ticket = await self._come_first(key, timeout_s)
        try:
            conversation = self._history.begin(key, n_request_bytes, self._clock())
        except BaseException:
            self._lines.leave(ticket)
            raise
        self._tidy()
        return Turn(self, conversation, ticket)

    async def forget(self, key: ConversationKey) -> bool:
        """Delete a conversation; return whether there was one.

        A turn of it that is under way is answered, and not kept; those that wait end: they meant to follow.

        Raises: HistoryFault if it is still in the file; to be asked again.
        """
        if not self._history.forget(key) and key not in self._undeleted:
            return False
        for waiter in self._waiters.get(key, {}).values():
            if not waiter.done():
                waiter.set_exception(ConversationGone("It was deleted while this request waited"))
        if self._file is not None:
            await self._erase(self._file, [key])
        return True

    def close(self) -> None:
        """Close the file, if there is one, once all is written."""
        if self._file is not None:
            self._file.close()

    def tick(self) -> list[ConversationKey]:
        """End what was not used for too long; called several times a second.

        Returns what has ended against its client's wish since the last time.
        """
        self._history.expire(self._clock())
        self._tidy()
        lost, self._lost = self._lost, []
        return lost

    def snapshot(self) -> ConversationsSnapshot:
        """Return how much is kept now."""
        return ConversationsSnapshot(
            n_conversations=self._history.n_conversations,
            n_bytes=self._history.n_bytes,
            n_waiting=self._lines.n_waiting,
        )

    def holds(self, conversation: Conversation) -> bool:
        """Whether it is there yet: it was not deleted, and something was said in it or is about to be."""
        return self._history.holds(conversation)

    async def write(self, conversation: Conversation, record: TurnRecord) -> None:
        """Keep what a turn left: in the file first. Raises: HistoryFault, with nothing kept."""
        if self._file is not None and conversation.key in self._undeleted:
            await self._erase(self._file, [conversation.key])  # it would stand before this turn at a restart
        if self._file is not None and self._history.holds(conversation):
            await self._file.keep(conversation.key, record)
        self._history.keep(conversation, record)

    def end(self, conversation: Conversation, ticket: Ticket) -> None:
        """End a turn; the next one may begin."""
        self._history.end(conversation, self._clock())
        self._tidy()
        self._lines.leave(ticket)

    async def _come_first(self, key: ConversationKey, timeout_s: float) -> Ticket:
        waiter = asyncio.get_running_loop().create_future()
        ticket = self._lines.enter(key, partial(_wake, waiter))
        if ticket.is_first:
            return ticket
        waiters = self._waiters.setdefault(key, {})
        waiters[ticket] = waiter
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError as error:
            self._lines.leave(ticket)
            message = f"the turns before it took longer than {timeout_s:g} s"
            raise NoTurn(RefusalReason.QUEUE_TIMEOUT, message) from error
        except BaseException:
            self._lines.leave(ticket)
            raise
        finally:
            del waiters[ticket]
            if not waiters:
                del self._waiters[key]
        return ticket

    def _tidy(self) -> None:
        """Delete from the file what has ended against its client's wish."""
        lost = self._history.take_lost()
        self._lost += lost
        if lost and self._file is not None:
            deletion = asyncio.get_running_loop().create_task(self._delete(self._file, lost))
            self._deletions.add(deletion)
            deletion.add_done_callback(self._deletions.discard)

    async def _delete(self, file: HistoryFile, lost: list[ConversationKey]) -> None:
        try:
            await self._erase(file, lost)
        except HistoryFault as fault:
            logger.warning("%d conversations that have ended stay in the file: %s", len(lost), fault)

    async def _erase(self, file: HistoryFile, keys: list[ConversationKey]) -> None:
        """Delete from the file. Raises: HistoryFault, with nothing deleted, and remembered as that."""
        self._undeleted.update(keys)
        await file.forget(keys)
        self._undeleted.difference_update(keys)


class Turn:
    """One turn under way."""

    def __init__(self, conversations: Conversations, conversation: Conversation, ticket: Ticket) -> None:
        self._conversations = conversations
        self._conversation = conversation
        self._ticket = ticket
        self._writing: asyncio.Task[None] | None = None

    @property
    def is_void(self) -> bool:
        """Whether nothing is left of its conversation, once it has ended."""
        return not self._conversations.holds(self._conversation)

    def body(self, request: bytes) -> bytes:
        """The body of its lane: the request, and what was said before."""
        limit_bytes = self._conversations.config.max_conversation_bytes
        return pack_asked(request, self._conversation.records, limit_bytes=limit_bytes)

    async def keep(self, data: bytes) -> bytes:
        """Keep the record that its worker left; return the last of the answer.

        Whoever waits for it may leave: it is kept all the same.

        Raises: HistoryFault, with nothing kept.
        """
        try:
            record = unpack_turn(data)
        except WireError as error:
            raise HistoryFault(f"its worker left no record: {error}") from error
        self._writing = asyncio.create_task(self._conversations.write(self._conversation, record))
        await asyncio.shield(self._writing)
        return record.closing

    def end(self) -> None:
        """Let the next turn begin, once this one is kept or not."""
        if self._writing is None or self._writing.done():
            self._end()
        else:
            self._writing.add_done_callback(self._end)

    def _end(self, writing: "asyncio.Task[None] | None" = None) -> None:
        if writing is not None and not writing.cancelled() and writing.exception() is not None:
            logger.error("a turn was not kept, and its client has left: %s", writing.exception())
        self._conversations.end(self._conversation, self._ticket)


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
