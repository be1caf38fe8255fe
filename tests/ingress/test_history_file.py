"""The history's file: what was kept is there after a restart, whatever ended the process before."""

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from llm_ingress.errors import ConfigError, HistoryFault
from llm_ingress.history import ConversationKey
from llm_ingress.history_file import HistoryFile
from llm_ingress.turns import Does, TurnRecord

A, B = ConversationKey("t", "a"), ConversationKey("t", "b")
ANOTHERS = ConversationKey("another", "a")

# Counts for some tenths of a second. A trigger takes no WITH of its own, but one in a query.
SLOW = """
SELECT count(*) FROM (
    WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000000) SELECT i FROM n
)
"""


@asynccontextmanager
async def opened(path: Path, wall_now: float = 1000.0) -> AsyncIterator[HistoryFile]:
    file = HistoryFile(path, wall_clock=lambda: wall_now)
    try:
        yield file
    finally:
        file.close()


def record(content: bytes, does: Does = Does.FOLLOWS) -> TurnRecord:
    return TurnRecord(does=does, closing=b"never kept", content=content)


def before_each_record(path: Path, statement: str) -> None:
    """Let the file do something whenever a record is to be written: what a disk might."""
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(f"CREATE TRIGGER disk BEFORE INSERT ON records BEGIN {statement}; END")
    connection.close()


def loaded(file: HistoryFile, now: float = 0.0) -> dict[ConversationKey, list[bytes]]:
    return {one.key: one.records for one in file.load(now)}


async def test_what_was_kept_is_there_again_in_order(tmp_path: Path) -> None:
    async with opened(tmp_path / "h") as file:
        for key, content in ((A, b"1"), (B, b"x"), (A, b"2"), (ANOTHERS, b"mine"), (A, b"3")):
            await file.keep(key, record(content))
    async with opened(tmp_path / "h") as file:
        assert loaded(file) == {A: [b"1", b"2", b"3"], B: [b"x"], ANOTHERS: [b"mine"]}
        assert sum(one.n_bytes for one in file.load(0.0)) == 8 + 5 * 4


async def test_a_replaced_history_is_replaced_in_the_file(tmp_path: Path) -> None:
    async with opened(tmp_path / "h") as file:
        await file.keep(A, record(b"1"))
        await file.keep(B, record(b"x"))
        await file.keep(A, record(b"summary", Does.REPLACES))
        await file.keep(A, record(b"2"))
        assert loaded(file) == {A: [b"summary", b"2"], B: [b"x"]}


async def test_what_was_deleted_does_not_come_back(tmp_path: Path) -> None:
    async with opened(tmp_path / "h") as file:
        for key in (A, B, ANOTHERS):
            await file.keep(key, record(b"said"))
        await file.forget([A, B])
    async with opened(tmp_path / "h") as file:
        assert loaded(file) == {ANOTHERS: [b"said"]}


async def test_how_long_ago_it_was_used_outlives_the_restart(tmp_path: Path) -> None:
    async with opened(tmp_path / "h", wall_now=1000.0) as file:
        await file.keep(A, record(b"said"))
    async with opened(tmp_path / "h", wall_now=1070.0) as file:
        (conversation,) = file.load(now=5.0)
        assert conversation.used_at == pytest.approx(5.0 - 70.0)


async def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    async with opened(tmp_path / "h") as file:
        await file.keep(A, record(b"said"))
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


async def test_a_second_process_is_told_that_it_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm_ingress.history_file.LOCK_TIMEOUT_S", 0.05)
    async with opened(tmp_path / "h"):
        with pytest.raises(ConfigError, match="locked"):
            HistoryFile(tmp_path / "h")


@pytest.mark.parametrize("name", ["missing/h", "text", "database"])
async def test_a_file_that_is_no_history_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "text").write_text("no database " * 100)
    with sqlite3.connect(tmp_path / "database") as another:
        another.execute("CREATE TABLE other (x)")
    another.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="history file"):
        HistoryFile(tmp_path / name)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


async def test_a_file_that_is_broken_further_in_is_named(tmp_path: Path) -> None:
    path = tmp_path / "h"
    async with opened(path) as file:
        for _ in range(100):
            await file.keep(A, record(b"said" * 1000))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    file = HistoryFile(path)
    with pytest.raises(ConfigError, match=r"history file .*h cannot be read: .*malformed"):
        file.load(0.0)


async def test_a_change_that_fails_changes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "h") as file:
        await file.keep(A, record(b"1"))
    before_each_record(tmp_path / "h", "SELECT RAISE(ABORT, 'disk full')")
    async with opened(tmp_path / "h") as file:
        with pytest.raises(HistoryFault, match="disk full"):
            await file.keep(A, record(b"summary", Does.REPLACES))
        assert loaded(file) == {A: [b"1"]}


async def test_the_event_loop_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    async with opened(tmp_path / "h"):
        pass
    before_each_record(tmp_path / "h", SLOW)
    async with opened(tmp_path / "h") as file:
        keeping = asyncio.create_task(file.keep(A, record(b"said")))
        n_turns = 0
        while not keeping.done():
            await asyncio.sleep(0)
            n_turns += 1
        assert n_turns > 100
        assert loaded(file) == {A: [b"said"]}


WRITER = """
import asyncio, sys
from pathlib import Path
from llm_ingress.history import ConversationKey
from llm_ingress.history_file import HistoryFile
from llm_ingress.turns import Does, TurnRecord

async def write():
    file = HistoryFile(Path(sys.argv[1]))
    for n in range(10**6):
        does = Does.REPLACES if n % 10 == 0 else Does.FOLLOWS
        content = b"%d " % n * 500
        await file.keep(ConversationKey("t", str(n % 3)), TurnRecord(does=does, closing=b"", content=content))
        print(n, flush=True)

asyncio.run(write())
"""


async def test_a_process_killed_in_the_middle_of_writing_has_lost_nothing_it_had_kept(tmp_path: Path) -> None:
    path = tmp_path / "h"
    for _ in range(3):
        path.unlink(missing_ok=True)
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        for _ in range(40):
            assert writer.stdout.readline()
        writer.kill()
        n_kept = 40 + len(writer.stdout.read().splitlines())
        writer.wait()
        writer.stdout.close()
        async with opened(path) as file:
            found = loaded(file)
        last = {key: [int(content.split()[0]) for content in records] for key, records in found.items()}
        # One more may have been written whose writer did not live to say so.
        assert last in (written(n_kept), written(n_kept + 1))
        contents = [content for records in found.values() for content in records]
        assert all(content == b"%d " % int(content.split()[0]) * 500 for content in contents)


def written(n_turns: int) -> dict[ConversationKey, list[int]]:
    """Which turns are in the file after so many."""
    kept: dict[ConversationKey, list[int]] = {}
    for n in range(n_turns):
        mine = kept.setdefault(ConversationKey("t", str(n % 3)), [])
        if n % 10 == 0:
            mine.clear()
        mine.append(n)
    return kept
