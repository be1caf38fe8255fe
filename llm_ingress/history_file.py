"""The history in a file, so that a restart loses nothing that was answered: SQLite, on a thread of its own.

What is in it is written before a client has the end of its answer, and read when the process starts; in
between the history in memory is the one that counts. Each change is one transaction, so that an end in the
middle of it leaves the one before. One process has the file at a time.
Owns: the connection and its thread. Called by: the command lines, which open it; `conversations.py`.
"""

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

from llm_ingress.errors import ConfigError, HistoryFault
from llm_ingress.history import Conversation, ConversationKey
from llm_ingress.turns import Does, TurnRecord

APPLICATION_ID = 0x6C6C6D68  # "llmh", in the file's header
VERSION = 1
LOCK_TIMEOUT_S = 2.0  # an earlier process may be just about to end

_SET_UP = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS conversations (
    tenant TEXT NOT NULL, id TEXT NOT NULL, used_at REAL NOT NULL, PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS records (
    n INTEGER PRIMARY KEY, tenant TEXT NOT NULL, id TEXT NOT NULL, content BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS records_of ON records (tenant, id);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
COMMIT;
"""
_ALL = """
SELECT tenant, id, used_at, content FROM conversations JOIN records USING (tenant, id) ORDER BY tenant, id, n
"""


class HistoryFile:
    """An open file. `wall_clock` is what times in it are told by: unix seconds."""

    def __init__(self, path: Path, wall_clock: Callable[[], float] = time.time) -> None:
        """Raises: ConfigError if it cannot be used."""
        self._path = path
        self._wall_clock = wall_clock
        self._connection = _open(path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llm-ingress-history")

    def load(self, now: float) -> list[Conversation]:
        """Everything in it; `now` is the moment on the clock of the history in memory.

        Raises: ConfigError, with the file closed, if it is broken.
        """
        age_of_zero = self._wall_clock() - now
        try:
            rows = self._connection.execute(_ALL).fetchall()
        except sqlite3.Error as error:
            self.close()
            raise ConfigError(f"the history file {self._path} cannot be read: {error}") from error
        return list(_conversations(rows, age_of_zero))

    async def keep(self, key: ConversationKey, record: TurnRecord) -> None:
        """Write what a turn left. Raises: HistoryFault, with nothing written."""
        await self._run(lambda: self._keep(key, record))

    async def forget(self, keys: Sequence[ConversationKey]) -> None:
        """Delete conversations. Raises: HistoryFault, with nothing deleted."""
        await self._run(lambda: self._forget(keys))

    def close(self) -> None:
        """Finish what is under way, and close the file."""
        self._thread.shutdown()
        self._connection.close()

    async def _run(self, change: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, change)
        except sqlite3.Error as error:
            raise HistoryFault(f"the history file cannot be written: {error}") from error

    # On the thread.

    def _keep(self, key: ConversationKey, record: TurnRecord) -> None:
        with self._connection as transaction:
            if record.does is Does.REPLACES:
                transaction.execute("DELETE FROM records WHERE tenant = ? AND id = ?", key)
            transaction.execute(
                "INSERT OR REPLACE INTO conversations (tenant, id, used_at) VALUES (?, ?, ?)",
                (*key, self._wall_clock()),
            )
            transaction.execute(
                "INSERT INTO records (tenant, id, content) VALUES (?, ?, ?)", (*key, record.content)
            )

    def _forget(self, keys: Sequence[ConversationKey]) -> None:
        with self._connection as transaction:
            for table in ("records", "conversations"):
                transaction.executemany(f"DELETE FROM {table} WHERE tenant = ? AND id = ?", keys)


def _open(path: Path) -> sqlite3.Connection:
    """Raises: ConfigError."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # what people said is for nobody else
        connection = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"the history file {path} cannot be opened: {error}") from error
    try:
        _set_up(connection)
    except (sqlite3.Error, ConfigError) as error:
        connection.close()
        raise ConfigError(f"the history file {path} cannot be used: {error}") from error
    return connection


def _set_up(connection: sqlite3.Connection) -> None:
    """Raises: sqlite3.Error, also while another process has the file; ConfigError for one of another kind."""
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    (kind,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (n_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if n_tables and (kind, version) != (APPLICATION_ID, VERSION):
        raise ConfigError("it is a database of another kind")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")  # also when the machine stops, not only the process
    connection.executescript(_SET_UP)


def _conversations(
    rows: Sequence[tuple[str, str, float, bytes]], age_of_zero: float
) -> Iterator[Conversation]:
    for (tenant, name), records in groupby(rows, key=lambda row: row[:2]):
        conversation = Conversation(key=ConversationKey(tenant, name))
        for _, _, used_at, content in records:
            conversation.used_at = used_at - age_of_zero
            conversation.take(TurnRecord(closing=b"", content=content))
        yield conversation
