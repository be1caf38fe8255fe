"""Which worker holds a conversation: the one that answered its last turn, and has its KV.

Keys match exactly and belong to one tenant. What is not in the table (another ingress served it, or this one
was started again) is placed by rendezvous hashing of what is the same in every turn, so that ingresses agree
without talking.

Owns: the table, bounded and expiring, and the count of what came back. Pure. Called by: `placement.py`.
"""

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

from llm_ingress.conversation import Conversation

ENTRIES_PER_TENANT = 8192
ENTRIES_IN_ALL = 65536


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker process, and how many tokens of the conversation it has."""

    instance_id: str
    n_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AffinityFacts:
    """Counts of turns.

    Whose holder was there; whose holder had room when they came; that went to it at once; that went to it, at
    once or after a wait.
    """

    entries: int  # turns that are remembered
    known: int
    had_room: int
    returned_at_once: int
    returned: int


@dataclass(frozen=True, slots=True)
class _Entry:
    holder: Holder
    noted_at: float


class Affinity:
    """The holders of each tenant's conversations, the oldest forgotten first."""

    def __init__(
        self, *, ttl_s: float, per_tenant: int = ENTRIES_PER_TENANT, in_all: int = ENTRIES_IN_ALL
    ) -> None:
        self._n_known = 0
        self._n_had_room = 0
        self._n_returned_at_once = 0
        self._n_returned = 0
        self._ttl_s = ttl_s
        self._per_tenant = per_tenant
        self._in_all = in_all
        self._n_entries = 0
        # Both in the order in which they were last noted.
        self._tenants: OrderedDict[str, OrderedDict[bytes, _Entry]] = OrderedDict()

    def __len__(self) -> int:
        return self._n_entries

    @property
    def facts(self) -> AffinityFacts:
        """What to tell of it."""
        return AffinityFacts(
            entries=self._n_entries,
            known=self._n_known,
            had_room=self._n_had_room,
            returned_at_once=self._n_returned_at_once,
            returned=self._n_returned,
        )

    def count_turn(self, *, has_room: bool) -> None:
        """Count a turn whose holder is there."""
        self._n_known += 1
        self._n_had_room += has_room

    def count_return(self, *, at_once: bool) -> None:
        """Count a turn that has gone to its holder."""
        self._n_returned += 1
        self._n_returned_at_once += at_once

    def holder_of(self, tenant: str, conversation: Conversation, now: float) -> Holder | None:
        """Return who holds the longest beginning that is known."""
        entries = self._tenants.get(tenant)
        if entries is None:
            return None
        for digest in conversation.beginnings:
            entry = entries.get(digest)
            if entry is not None and now - entry.noted_at < self._ttl_s:
                return entry.holder
        return None

    def note(self, tenant: str, conversation: Conversation, holder: Holder, now: float) -> None:
        """Remember who has answered a turn."""
        if conversation.whole is None:
            return
        self._expire(tenant, now)
        self._expire(next(iter(self._tenants), tenant), now)
        entries = self._tenants.setdefault(tenant, OrderedDict())
        self._tenants.move_to_end(tenant)
        self._n_entries -= entries.pop(conversation.whole, None) is not None
        entries[conversation.whole] = _Entry(holder, now)
        self._n_entries += 1
        if len(entries) > self._per_tenant:
            self._drop_oldest(tenant)
        if self._n_entries > self._in_all:
            self._drop_oldest(next(iter(self._tenants)))

    def forget(self, tenant: str, conversation: Conversation) -> None:
        """Remember nothing of a conversation that goes by a key."""
        for digest in conversation.beginnings:
            if digest in self._tenants.get(tenant, ()):
                self._drop(tenant, digest)

    def _expire(self, tenant: str, now: float) -> None:
        """Drop what has expired of a tenant: two for each that comes, so that in the end none stays."""
        for _ in range(2):
            oldest = next(iter(self._tenants.get(tenant, {}).values()), None)
            if oldest is None or now - oldest.noted_at < self._ttl_s:
                return
            self._drop_oldest(tenant)

    def _drop_oldest(self, tenant: str) -> None:
        self._drop(tenant, next(iter(self._tenants[tenant])))

    def _drop(self, tenant: str, digest: bytes) -> None:
        entries = self._tenants[tenant]
        del entries[digest]
        self._n_entries -= 1
        if not entries:
            del self._tenants[tenant]


def weight_of(anchor: bytes, worker: str) -> int:
    """Return how much a conversation favours a worker: the highest weight is its favourite everywhere.

    Who joins or leaves takes along only the conversations that favour it.
    """
    return int.from_bytes(blake2b(worker.encode(), digest_size=8, key=anchor).digest())


def patience_s(n_tokens: int, prompt_tokens_per_second: float, limit_s: float) -> float:
    """Return how long it is worth to wait for a holder: as long as computing its tokens again would take."""
    if not prompt_tokens_per_second > 0:
        return limit_s if n_tokens else 0.0
    return min(limit_s, n_tokens / prompt_tokens_per_second)
