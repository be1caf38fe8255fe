"""A directory in which engines keep KV over their restarts, each in a folder of its own.

    DIR/lock                   held while a folder is taken or swept
    DIR/FINGERPRINT-N/lock     held by the engine whose folder it is
    DIR/FINGERPRINT-N/7.kv     what is kept

An engine takes the first folder of its fingerprint that nobody holds, with what lies there: after a restart
its own. So two engines never write in one folder. What lies in a folder that nobody holds is left alone, for
an engine that may come back, until it has outlived its time.

Owns: the files of one folder. Called by: `diskthreads.py`, and at the start `engine.py`.
"""

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from llm_engine.diskcache import Stored
from llm_engine.errors import ConfigError, SessionFileError
from llm_engine.hostcache import KvState
from llm_engine.sessionfile import FILE_MODE, TEMPORARY_SUFFIX, read_header, read_state, write_session

logger = logging.getLogger(__name__)

FOLDER_MODE = 0o700  # what lies there is what users wrote

_MAX_FOLDERS = 1000  # of one fingerprint
_N_FINGERPRINT = 16  # digits of it in a folder's name; the whole of it stands in each file
_FOLDER_NAME = re.compile(rf"[0-9a-f]{{{_N_FINGERPRINT}}}-\d+")
_SUFFIX = ".kv"


def make_session_dir(root: Path) -> None:
    """Have a directory to keep folders in.

    Raises: ConfigError if there is none and none can be made, or nothing can be made in it.
    """
    try:
        root.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        with _locked(root):
            pass
    except OSError as error:
        raise ConfigError(f"session_dir {root}: {error.strerror}") from error


class SessionDir:
    """One engine's folder, its own until `close`. Files are named by number."""

    def __init__(self, folder: Path, fingerprint: str, lock: int, ttl_s: float | None) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._lock = lock
        self._ttl_s = ttl_s

    @classmethod
    def take(cls, root: Path, fingerprint: str, ttl_s: float | None) -> Self:
        """Take the first folder that nobody holds.

        Raises: ConfigError.
        """
        try:
            with _locked(root):
                for number in range(_MAX_FOLDERS):
                    folder = root / f"{fingerprint[:_N_FINGERPRINT]}-{number}"
                    folder.mkdir(FOLDER_MODE, exist_ok=True)
                    folder.chmod(FOLDER_MODE)
                    if (lock := _try_lock(folder)) is not None:
                        return cls(folder, fingerprint, lock, ttl_s)
        except OSError as error:
            raise ConfigError(f"session_dir {root}: {error.strerror}") from error
        raise ConfigError(f"session_dir {root}: {_MAX_FOLDERS} engines use it already")

    def found(self) -> list[tuple[Stored, float]]:
        """What lies here and may still be used, with its last use in monotonic seconds; removes the rest."""
        _remove_old(self._folder, self._expired_before())
        found = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            try:
                header = read_header(path)
                if header.fingerprint != self._fingerprint:
                    raise SessionFileError("it is another model's")
                stored = Stored(int(path.stem), header.run, header.is_checkpoint, header.n_bytes)
                age_s = max(0.0, time.time() - path.stat().st_mtime)
                found.append((stored, time.monotonic() - age_s))
            except (OSError, ValueError, SessionFileError) as error:
                self._discard(path, error)
        return found

    def write(self, stored: Stored, state: KvState, used_at: float) -> None:
        """Keep it; `used_at` is monotonic seconds. Raises: OSError."""
        age_s = time.monotonic() - used_at
        write_session(self._path(stored), stored.run, state, time.time() - age_s)

    def read(self, stored: Stored) -> KvState | None:
        """Return its state; None if the file is no good, which is then removed."""
        path = self._path(stored)
        try:
            return read_state(path)
        except (OSError, MemoryError, SessionFileError) as error:
            self._discard(path, error)
            return None

    def remove(self, stored: Stored) -> None:
        _unlink(self._path(stored))

    def sweep(self) -> None:
        """Remove what has outlived its time in folders that nobody holds."""
        root = self._folder.parent
        with _locked(root):
            for folder in root.iterdir():
                if folder != self._folder and _FOLDER_NAME.fullmatch(folder.name):
                    lock = _try_lock(folder)
                    if lock is not None:
                        _remove_old(folder, self._expired_before())
                        os.close(lock)

    def close(self) -> None:
        """Leave the folder to the next engine."""
        os.close(self._lock)

    def _path(self, stored: Stored) -> Path:
        return self._folder / f"{stored.number}{_SUFFIX}"

    def _expired_before(self) -> float:
        return time.time() - self._ttl_s if self._ttl_s is not None else 0.0

    def _discard(self, path: Path, error: Exception) -> None:
        logger.warning("%s is of no use and removed: %s", path, error)
        _unlink(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = _open_lock(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder while it is open; None if somebody else does."""
    lock = _open_lock(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _open_lock(folder: Path) -> int:
    return os.open(folder / "lock", os.O_RDWR | os.O_CREAT, FILE_MODE)


def _remove_old(folder: Path, before: float) -> None:
    """What was last used `before`, and what nobody finished writing."""
    for path in folder.iterdir():
        is_old = path.suffix == _SUFFIX and path.stat().st_mtime < before
        if is_old or path.suffix == TEMPORARY_SUFFIX:
            _unlink(path)


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error.strerror)
