"""The lock file at which the writers of a SQLite database wait for each other.

SQLite's own busy handler sleeps for up to 100 ms, so that one busy process keeps all others from writing for
seconds. With short sleeps at a lock that is held for one transaction at a time, all get their share.
"""

import logging
import os
import threading
import time

from djqueue.core.forks import after_fork
from djqueue.core.shown import in_one_line

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("djqueue.storage")

SUFFIX = "-djqueue"
SHORTEST, LONGEST = 0.000_1, 0.000_5
"""Seconds between attempts to take the lock."""


class LockFile:
    """A lock that one thread of all processes holds at a time: on the file `<database>-djqueue`.

    Without the file, it is a lock of this process.

    Args:
        database: Path of the database; empty for a database in memory.
    """

    def __init__(self, database: str) -> None:
        self._database = database
        self._file: int | None = None
        self._has_file = fcntl is not None and bool(database)
        self._lock = threading.Lock()
        after_fork(self._reopen)

    def acquire(self, limit: float) -> bool:
        """Take the lock within so many seconds; False if it was held for longer."""
        until = time.monotonic() + limit
        if not self._lock.acquire(timeout=max(0, limit)):
            return False
        is_locked = False
        try:
            is_locked = self._flock(until)
        finally:
            if not is_locked:
                self._lock.release()
        return is_locked

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._lock.release()

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _flock(self, until: float) -> bool:
        if self._file is None and self._has_file:
            self._file = self._open()
        if self._file is None:
            return True
        pause = SHORTEST
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    return False
                time.sleep(pause)
                pause = min(pause * 1.2, LONGEST)
            else:
                return True

    def _open(self) -> int | None:
        path = self._database + SUFFIX
        try:
            # Whoever may write to the database may lock the file.
            mode = os.stat(self._database).st_mode & 0o777
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
                os.fchmod(file, mode)
            except FileExistsError:
                file = os.open(path, os.O_RDONLY)
        except OSError as error:
            self._has_file = False
            logger.warning(
                "Could not open the lock file %s, so writers wait in SQLite's busy handler: %s",
                path,
                in_one_line(error),
            )
            return None
        return file

    def _reopen(self) -> None:
        """Open the file anew in a forked child: a lock on the parent's file is held by both."""
        file, self._file = self._file, None
        self._lock = threading.Lock()
        if file is not None:
            os.close(file)
