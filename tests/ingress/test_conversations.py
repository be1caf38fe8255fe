"""Turns of conversations on an event loop: in line, kept or not, and whatever their clients do."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from llm_ingress.conversations import WAITING_PER_CONVERSATION, Conversations, Turn
from llm_ingress.errors import ConversationGone, HistoryFault, NoTurn, RefusalReason
from llm_ingress.history import ConversationKey, HistoryConfig
from llm_ingress.history_file import HistoryFile
from llm_ingress.turns import TurnRecord, pack_asked, pack_turn

KEY = ConversationKey("t", "a")
LONG_S = 60.0


@pytest.fixture(params=["memory", "sqlite"])
async def conversations(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Conversations]:
    file = HistoryFile(tmp_path / "h") if request.param == "sqlite" else None
    conversations = Conversations(HistoryConfig(), file)
    yield conversations
    conversations.close()


async def begin(conversations: Conversations, key: ConversationKey = KEY, timeout_s: float = LONG_S) -> Turn:
    return await conversations.begin(key, 1, timeout_s)


def waiting(conversations: Conversations) -> "asyncio.Task[Turn]":
    return asyncio.create_task(begin(conversations))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def left(content: bytes) -> bytes:
    return pack_turn(TurnRecord(closing=b"closing of " + content, content=content))


def carried(request: bytes, history: list[bytes]) -> bytes:
    """The body of a turn's lane."""
    return pack_asked(request, history, limit_bytes=HistoryConfig().max_conversation_bytes)


async def say(conversations: Conversations, content: bytes) -> None:
    turn = await begin(conversations)
    assert await turn.keep(left(content)) == b"closing of " + content
    turn.end()


async def heard(conversations: Conversations) -> bytes:
    turn = await begin(conversations)
    turn.end()
    return turn.body(b"ask")


async def test_a_turn_finds_those_before_it(conversations: Conversations) -> None:
    await say(conversations, b"one")
    await say(conversations, b"two")
    assert await heard(conversations) == carried(b"ask", [b"one", b"two"])


async def test_turns_of_one_conversation_begin_in_order_each_after_the_last(
    conversations: Conversations,
) -> None:
    first = await begin(conversations)
    second, third = waiting(conversations), waiting(conversations)
    await settle()
    assert (second.done(), third.done()) == (False, False)
    assert conversations.snapshot().n_waiting == 2
    await first.keep(left(b"one"))
    first.end()
    turn = await second
    assert turn.body(b"") == carried(b"", [b"one"])
    assert not third.done()
    turn.end()  # it failed
    assert (await third).body(b"") == carried(b"", [b"one"])


async def test_who_leaves_the_line_wedges_nobody(conversations: Conversations) -> None:
    first = await begin(conversations)
    second, third = waiting(conversations), waiting(conversations)
    await settle()
    second.cancel()
    await settle()
    assert conversations.snapshot().n_waiting == 1
    first.end()
    third_turn = await third
    fourth = waiting(conversations)
    await settle()
    # Its turn has come and its client leaves, both before it could notice either.
    third_turn.end()
    fourth.cancel()
    (await begin(conversations)).end()


async def test_waiting_has_an_end(conversations: Conversations) -> None:
    first = await begin(conversations)
    with pytest.raises(NoTurn) as refused:
        await begin(conversations, timeout_s=0.01)
    assert refused.value.reason is RefusalReason.QUEUE_TIMEOUT
    first.end()
    (await begin(conversations)).end()


async def test_a_line_is_bounded(conversations: Conversations) -> None:
    first = await begin(conversations)
    others = [waiting(conversations) for _ in range(WAITING_PER_CONVERSATION)]
    await settle()
    with pytest.raises(NoTurn) as refused:
        await begin(conversations)
    assert refused.value.reason is RefusalReason.RING_FULL
    first.end()
    for other in others:
        (await other).end()
    assert conversations.snapshot().n_waiting == 0


async def test_a_deleted_conversation_ends_those_that_meant_to_follow(conversations: Conversations) -> None:
    await say(conversations, b"one")
    first = await begin(conversations)
    second = waiting(conversations)
    await settle()
    assert await conversations.forget(KEY)
    with pytest.raises(ConversationGone):
        await second
    await first.keep(left(b"two"))
    first.end()
    assert conversations.snapshot().n_conversations == 0
    assert await heard(conversations) == carried(b"ask", [])
    assert not await conversations.forget(KEY)


async def test_a_turn_is_kept_whose_client_leaves_while_it_is_written(conversations: Conversations) -> None:
    turn = await begin(conversations)
    keeping = asyncio.create_task(turn.keep(left(b"one")))
    await asyncio.sleep(0)
    keeping.cancel()
    await settle()
    turn.end()
    assert await heard(conversations) == carried(b"ask", [b"one"])


@pytest.mark.parametrize("data", [b"", b"\0", b'{"role":"user"}'])
async def test_a_turn_that_left_no_record_is_not_kept(conversations: Conversations, data: bytes) -> None:
    turn = await begin(conversations)
    with pytest.raises(HistoryFault):
        await turn.keep(data)
    turn.end()
    assert await heard(conversations) == carried(b"ask", [])


async def test_a_restart_loses_nothing_and_what_has_ended_does_not_come_back(tmp_path: Path) -> None:
    first = Conversations(HistoryConfig(max_conversations=2), HistoryFile(tmp_path / "h"))
    for name in ("a", "b", "c"):
        turn = await begin(first, ConversationKey("t", name))
        await turn.keep(left(name.encode()))
        turn.end()
    await first.forget(ConversationKey("t", "b"))
    first.close()
    again = Conversations(HistoryConfig(), HistoryFile(tmp_path / "h"))
    assert again.snapshot().n_conversations == 1
    turn = await begin(again, ConversationKey("t", "c"))
    assert turn.body(b"") == carried(b"", [b"c"])
    turn.end()
    again.close()


async def test_a_turn_that_cannot_be_written_has_never_been(tmp_path: Path) -> None:
    HistoryFile(tmp_path / "h").close()
    connection = sqlite3.connect(tmp_path / "h")
    with connection:
        connection.execute(
            "CREATE TRIGGER disk BEFORE INSERT ON records WHEN NEW.content = CAST('two' AS BLOB)"
            " BEGIN SELECT RAISE(ABORT, 'disk full'); END"
        )
    connection.close()
    conversations = Conversations(HistoryConfig(), HistoryFile(tmp_path / "h"))
    await say(conversations, b"one")
    turn = await begin(conversations)
    with pytest.raises(HistoryFault, match="disk full"):
        await turn.keep(left(b"two"))
    turn.end()
    assert await heard(conversations) == carried(b"ask", [b"one"])
    conversations.close()


class DiskThatFails(HistoryFile):
    """A file from which nothing can be deleted while its disk fails."""

    fails = True

    async def forget(self, keys: Sequence[ConversationKey]) -> None:
        if self.fails:
            raise HistoryFault("disk full")
        await super().forget(keys)


async def test_what_could_not_be_deleted_is_there_to_be_deleted_again(tmp_path: Path) -> None:
    disk = DiskThatFails(tmp_path / "h")
    conversations = Conversations(HistoryConfig(), disk)
    await say(conversations, b"one")
    for _ in range(2):
        with pytest.raises(HistoryFault, match="disk full"):
            await conversations.forget(KEY)
        assert await heard(conversations) == carried(b"ask", [])
    disk.fails = False
    assert await conversations.forget(KEY)
    assert not await conversations.forget(KEY)
    conversations.close()


async def test_what_could_not_be_deleted_does_not_come_back_before_what_was_said_since(
    tmp_path: Path,
) -> None:
    disk = DiskThatFails(tmp_path / "h")
    conversations = Conversations(HistoryConfig(), disk)
    await say(conversations, b"one")
    with pytest.raises(HistoryFault):
        await conversations.forget(KEY)
    turn = await begin(conversations)
    with pytest.raises(HistoryFault):
        await turn.keep(left(b"two"))
    turn.end()
    disk.fails = False
    await say(conversations, b"three")
    conversations.close()
    again = Conversations(HistoryConfig(), HistoryFile(tmp_path / "h"))
    assert await heard(again) == carried(b"ask", [b"three"])
    again.close()
