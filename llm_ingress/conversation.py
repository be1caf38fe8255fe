"""Which conversation a request goes on with, told by digests in which nothing can be read.

By the key its client gives, else by its messages. An unchanged client sends all of them again with each turn,
so what was the whole of one turn is the beginning of the next:

    turn 1   [ system | user 1 ]
    turn 2   [ system | user 1 | answer 1 | user 2 ]
                      ^ known since turn 1

A beginning counts only from the first message of the user on: a system prompt is no conversation, however
many begin with it. Pure. Called by: `dialects.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

DIGEST_BYTES = 16
# Beginnings of a request that are looked for, the longest first: a turn adds two messages, more with tools.
BEGINNINGS_MAX = 16
USER = "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What is known of one turn's conversation before it is answered.

    `session` is there for one with a name of its own, which lasts until it expires: `conversation_id`.
    """

    anchor: bytes  # the same in every turn, and wherever it is computed
    beginnings: tuple[bytes, ...]  # what an earlier turn may be known by, longest first
    whole: bytes | None  # what the next turn may know this one by
    session: bytes | None = None

    @classmethod
    def of_key(cls, key: str, *, session: str | None = None) -> Self:
        """The conversation that goes by a key."""
        digest = _digest_of(key)
        return cls(
            anchor=digest,
            beginnings=(digest,),
            whole=digest,
            session=None if session is None else _digest_of(session),
        )

    @classmethod
    def of_messages(cls, messages: Sequence[tuple[str, str]]) -> Self:
        """The conversation of these (role, text)s. Each is hashed once, however long the history."""
        n = len(messages)
        first = next((i for i, (role, _) in enumerate(messages) if role == USER), n - 1)
        oldest = max(first, n - 1 - BEGINNINGS_MAX)
        hashed = blake2b(digest_size=DIGEST_BYTES, person=b"messages")
        anchor, beginnings = b"", []
        for i, (role, text) in enumerate(messages):
            data = text.encode()
            hashed.update(b"%s %d\n%s" % (role.encode(), len(data), data))
            if i == first:
                anchor = hashed.digest()
            if oldest <= i < n - 1:
                beginnings.append(hashed.digest())
        has_user = messages[first][0] == USER
        return cls(
            anchor=anchor,
            beginnings=tuple(reversed(beginnings)),
            whole=hashed.digest() if has_user else None,
        )


def conversation_of(
    *, cache_key: str | None, conversation_id: str | None, messages: Sequence[tuple[str, str]]
) -> Conversation:
    """Return the conversation of a request that may name it in two ways, or in none."""
    key = cache_key or conversation_id
    if key:
        return Conversation.of_key(key, session=conversation_id or None)
    return Conversation.of_messages(messages)


def conversation_of_session(session_id: str) -> Conversation:
    """Return the conversation that is kept here under an id."""
    return Conversation.of_key(session_id, session=session_id)


def _digest_of(key: str) -> bytes:
    return blake2b(key.encode(), digest_size=DIGEST_BYTES, person=b"key").digest()
