"""What conversations have said so far: records that workers left, kept unread.

A conversation belongs to one tenant and ends when it was not used for `ttl_s`, when its client deletes it, or
to make room: then the tenant with most conversations loses the one it used longest ago. One that a turn is
under way in is never lost, and room is made only once there is something to keep: a turn that is refused or
fails costs nobody anything. Whose conversation ended in another way than by its own wish is told so: an
answer without what was said before would be wrong, and nobody could see it.

Owns: the records of every conversation, and which have ended. Called by: `conversations.py`. Pure, with the
time as a parameter: monotonic seconds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from llm_ingress.errors import ConfigError, ConversationFull, ConversationGone, NoTurn, RefusalReason
from llm_ingress.shares import Shares
from llm_ingress.turns import LENGTH_BYTES, Does, TurnRecord

FULL = 2  # times what is to be kept of a conversation
ENDED_REMEMBERED = 10_000  # conversations whose clients would be told


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryConfig:
    """Bounds of what is kept.

    One conversation past its bound is shortened by the worker of its next turn. `FULL` times that is the end.
    """

    max_conversations: int = 1000
    max_conversation_bytes: int = 1024 * 1024
    max_bytes: int = 256 * 1024 * 1024  # of all
    ttl_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("max_conversations", "max_conversation_bytes"):
            value = getattr(self, name)
            if not value >= 1:
                raise ConfigError(f"{name} is {value}, must be at least 1")
        if self.max_bytes < self.max_conversation_bytes:
            raise ConfigError(
                f"max_bytes is {self.max_bytes}, must be at least "
                f"max_conversation_bytes, {self.max_conversation_bytes}"
            )
        if not self.ttl_s > 0:
            raise ConfigError(f"ttl_s is {self.ttl_s}, must be more than 0")


class ConversationKey(NamedTuple):
    """Which conversation: another tenant's of the same id is another."""

    tenant: str
    id: str


@dataclass(slots=True, eq=False, kw_only=True)
class Conversation:
    """One conversation and what its turns left, oldest first."""

    key: ConversationKey
    records: list[bytes] = field(default_factory=list)
    n_bytes: int = 0  # of the records, as they travel
    used_at: float = 0.0
    is_busy: bool = False  # a turn is under way

    def take(self, record: TurnRecord) -> None:
        """Let a record follow the others, or take their place."""
        if record.does is Does.REPLACES:
            self.records.clear()
            self.n_bytes = 0
        self.records.append(record.content)
        self.n_bytes += LENGTH_BYTES + len(record.content)


class History:
    """The conversations of one ingress. Thread: event loop."""

    def __init__(self, config: HistoryConfig) -> None:
        self._config = config
        self._conversations: dict[ConversationKey, Conversation] = {}  # by when they were used last
        self._ended: dict[ConversationKey, None] = {}  # likewise
        self._shares = Shares()  # conversations of each tenant
        self._n_bytes = 0
        self._n_busy = 0
        self._n_said = 0  # conversations in which something was said
        self._lost: list[ConversationKey] = []

    @property
    def n_conversations(self) -> int:
        """How many are kept, those in their first turn included."""
        return len(self._conversations)

    @property
    def n_bytes(self) -> int:
        """Bytes of all records."""
        return self._n_bytes

    def restore(self, conversations: Iterable[Conversation], now: float) -> None:
        """Take over what an earlier process kept; what is past its time or the bounds ends at once."""
        for conversation in sorted(conversations, key=lambda one: one.used_at):
            # By a wall clock that was set back it was used in times to come, and would outlive all others.
            conversation.used_at = min(conversation.used_at, now)
            self._add(conversation)
        self.expire(now)
        self._make_room()

    def begin(self, key: ConversationKey, n_request_bytes: int, now: float) -> Conversation:
        """Begin a turn: of a new conversation if there is none.

        Raises: ConversationGone if there was one; ConversationFull if with this request it is too long to be
            shortened; NoTurn for a new one while turns are under way in all that may be kept.
        """
        limit_bytes = FULL * self._config.max_conversation_bytes
        conversation = self._conversations.get(key)
        if conversation is None:
            conversation = self._open(key)
        elif conversation.n_bytes + n_request_bytes > limit_bytes:
            raise ConversationFull(
                f"With this request it is longer than {limit_bytes} bytes, too long to be shortened"
            )
        assert not conversation.is_busy, f"two turns at once in {key.id}"
        conversation.is_busy = True
        self._n_busy += 1
        self._use(conversation, now)
        return conversation

    def keep(self, conversation: Conversation, record: TurnRecord) -> bool:
        """Keep what a turn left; return whether there was still a conversation to keep it for."""
        if not self.holds(conversation):
            return False
        self._n_bytes -= conversation.n_bytes
        self._n_said += not conversation.records
        conversation.take(record)
        self._n_bytes += conversation.n_bytes
        return True

    def end(self, conversation: Conversation, now: float) -> None:
        """End a turn. A conversation in which nothing was said in full is none."""
        conversation.is_busy = False
        self._n_busy -= 1
        if self.holds(conversation):
            self._use(conversation, now)
            if not conversation.records:
                self._remove(conversation)
        self._make_room()

    def holds(self, conversation: Conversation) -> bool:
        """Whether a conversation was not deleted while a turn of it was under way."""
        return self._conversations.get(conversation.key) is conversation

    def forget(self, key: ConversationKey) -> bool:
        """Delete a conversation at its client's wish; return whether there was one. Its id is free again."""
        self._ended.pop(key, None)
        conversation = self._conversations.get(key)
        if conversation is not None:
            self._remove(conversation)
        return conversation is not None

    def expire(self, now: float) -> None:
        """End those not used for too long."""
        for conversation in tuple(self._unused_since(now - self._config.ttl_s)):
            if not conversation.is_busy:
                self._lose(conversation)

    def take_lost(self) -> list[ConversationKey]:
        """Return, once, the conversations that ended against their clients' wish."""
        lost, self._lost = self._lost, []
        return lost

    def _open(self, key: ConversationKey) -> Conversation:
        if key in self._ended:
            raise ConversationGone("It was not used for too long, or had to make room for others")
        if self._n_busy >= self._config.max_conversations:
            message = f"turns are under way in all {self._n_busy} conversations that are kept"
            raise NoTurn(RefusalReason.SYSTEM_SESSIONS_FULL, message)
        conversation = Conversation(key=key)
        self._add(conversation)
        return conversation

    def _add(self, conversation: Conversation) -> None:
        self._conversations[conversation.key] = conversation
        self._shares.take(conversation.key.tenant)
        self._n_bytes += conversation.n_bytes
        self._n_said += bool(conversation.records)

    def _remove(self, conversation: Conversation) -> None:
        del self._conversations[conversation.key]
        self._shares.give_back(conversation.key.tenant)
        self._n_bytes -= conversation.n_bytes
        self._n_said -= bool(conversation.records)

    def _lose(self, conversation: Conversation) -> None:
        """End a conversation whose client did not ask for it."""
        self._remove(conversation)
        self._lost.append(conversation.key)
        self._ended[conversation.key] = None
        if len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _use(self, conversation: Conversation, now: float) -> None:
        conversation.used_at = now
        self._conversations[conversation.key] = self._conversations.pop(conversation.key)

    def _unused_since(self, moment: float) -> Iterator[Conversation]:
        for conversation in self._conversations.values():
            if conversation.used_at > moment:
                return
            yield conversation

    def _make_room(self) -> None:
        """End idle conversations until the rest is within its bounds, or none is idle."""
        while self._is_beyond() and (victim := self._victim()) is not None:
            self._lose(victim)

    def _is_beyond(self) -> bool:
        is_too_many = self._n_said > self._config.max_conversations
        return is_too_many or self._n_bytes > self._config.max_bytes

    def _victim(self) -> Conversation | None:
        """The conversation used longest ago of whoever has most, and of those that are idle."""
        idle = (self._idle_of(tenant) for tenant in self._shares.above(0))
        return next(filter(None, idle), None)

    def _idle_of(self, tenant: str) -> Conversation | None:
        """The conversation that a tenant used longest ago, of those that are idle."""
        mine = (one for one in self._conversations.values() if one.key.tenant == tenant)
        return next((one for one in mine if not one.is_busy), None)
