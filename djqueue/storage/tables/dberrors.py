"""Errors of databases, with the database and the remedy; who keeps djqueue's tables from being written."""

import errno
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from time import monotonic, time_ns
from traceback import walk_tb
from types import TracebackType
from typing import Any, NoReturn

from django.core.exceptions import SynchronousOnlyOperation
from django.db import (
    DataError,
    Error,
    IntegrityError,
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
    connections,
)
from django.db.transaction import TransactionManagementError

from djqueue import migrations
from djqueue.core import procfs
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.messages import hide_row, in_one_line
from djqueue.core.overview import Finding

REFUSED = re.compile(
    r"password authentication failed|no password supplied|role \S+ does not exist|no pg_hba\.conf entry"
    r"|authentication failed|access denied|permission denied",
    re.IGNORECASE,
)
NO_DATABASE = re.compile(r"database \S+ does not exist|unknown database", re.IGNORECASE)
PARAMETER = re.compile(
    r"invalid \S+ value|invalid (connection option|integer value)|unrecognized configuration parameter"
    r"|invalid value for parameter",
    re.IGNORECASE,
)
NO_TABLE = re.compile(
    r"no such (table|column)|has no column named|(relation|column) \S+ (of relation \S+ )?does not exist"
    r"|table \S+ doesn't exist|unknown column",
    re.IGNORECASE,
)
LOCKED = re.compile(r"database (table )?is locked", re.IGNORECASE)
DEADLOCK = re.compile(r"deadlock (detected|found)", re.IGNORECASE)
TRY_AGAIN = "Two transactions waited for each other, and this one was undone: try again."
NO_ROOM = re.compile("too many (clients|connections)|remaining connection slots")
PASSING = re.compile("administrator command|is (starting up|shutting down)|in recovery mode")
NO_LOCKS = re.compile(r"out of shared memory|max_locks_per_transaction", re.IGNORECASE)
FULL = re.compile(r"disk is full|no space left on device", re.IGNORECASE)
TIMED_OUT = re.compile(
    r"due to (?P<timeout>(?:statement|lock|transaction|idle-in-transaction) timeout)", re.IGNORECASE
)
READ_ONLY = re.compile(r"readonly database|unable to open database file", re.IGNORECASE)
STANDBY = re.compile(r"in a read-only transaction", re.IGNORECASE)
BROKEN = re.compile(r"disk I/O error", re.IGNORECASE)
UNKNOWN = "Is it running?"
"""The remedy for other errors."""
IN_COROUTINE = (
    "djqueue was called in async code, where Django does not let databases be used: await the async method, "
    "whose name begins with an a, such as aenqueue(...) for enqueue(...)"
)
MIGRATING = "django.db.migrations.executor"


def remedy(alias: str, error: Error) -> str:
    """Return a sentence that says what to do."""
    text = str(error)
    if DEADLOCK.search(text):
        return TRY_AGAIN
    if holder := " ".join(getattr(error, "__notes__", ())):
        return f"{holder} End that transaction, or keep such transactions short."
    if "://" in alias:
        return _remedy_of_url(text)
    if NO_TABLE.search(text):
        return _migrate(alias)
    if REFUSED.search(text):
        return f"Check USER and PASSWORD of DATABASES[{alias!r}], and what that user may do."
    if NO_DATABASE.search(text):
        return f"Check NAME of DATABASES[{alias!r}], or create the database."
    if PARAMETER.search(text):
        return f"Check OPTIONS of DATABASES[{alias!r}]."
    if LOCKED.search(text):
        return (
            f"Another connection{_of_holders(alias)} holds SQLite's write lock: keep transactions short, or "
            f"raise 'timeout' in OPTIONS of DATABASES[{alias!r}]."
        )
    return _remedy_of_server(text)


def _of_holders(alias: str) -> str:
    """Return the processes whose lock keeps others from writing to a file of SQLite, as the end of a noun."""
    path = str(connections[alias].settings_dict["NAME"])
    holders = _holders_of(path) if os.path.isfile(path) else []
    return f", of the process {' and '.join(holders)}," if holders else ""


def write_lock_holder(alias: str) -> str:
    """Return a sentence that names the processes that keep others from writing to a file of SQLite, or ""."""
    holders = _holders_of(str(connections[alias].settings_dict["NAME"]))
    return f"SQLite's write lock is held by the process {' and '.join(holders)}." if holders else ""


def _holders_of(path: str) -> list[str]:
    return procfs.lock_holders(f"{path}-shm", WRITE_BYTE) or procfs.lock_holders(path)


def _remedy_of_url(text: str) -> str:
    """Return what to do about a database that a URL names, outside of its project."""
    if NO_TABLE.search(text):
        return "Tables of djqueue are missing or out of date: run manage.py migrate in the Django project."
    if REFUSED.search(text):
        return "Check the user name and the password in the URL, and what that user may do."
    if NO_DATABASE.search(text):
        return "Check the database's name in the URL, or create the database."
    if PARAMETER.search(text):
        return "Check the parameters after the ? in the URL."
    if LOCKED.search(text):
        return "Another connection holds SQLite's write lock: raise the timeout in the URL (?timeout=120)."
    return _remedy_of_server(text)


def _remedy_of_server(text: str) -> str:
    if found := TIMED_OUT.search(text):
        return f"Raise the {found['timeout']} of this connection, or end what keeps it waiting."
    if NO_ROOM.search(text):
        return "Raise max_connections of the server or the limit of the role, or let fewer processes connect."
    if PASSING.search(text):
        return "The server is starting, stopping or ending connections: another attempt may succeed."
    if NO_LOCKS.search(text):
        return (
            "A transaction holds a lock for each unique and concurrency key of its jobs: enqueue fewer of "
            "them in one transaction, or raise max_locks_per_transaction of the server."
        )
    if _lacks_descriptors():
        return "This process has too many open files: raise its limit, or find what leaves them open."
    if FULL.search(text):
        return "Free space on the disk of the database."
    if READ_ONLY.search(text):
        return "This process needs write access to the database file and to its folder."
    if STANDBY.search(text):
        return "Connect to the primary server, with a user who may write."
    if BROKEN.search(text):
        return "Check the disk of the database, which may be full."
    return UNKNOWN


def _lacks_descriptors() -> bool:
    """Return whether this process can open no file: drivers do not say so."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False


def _migrate(alias: str) -> str:
    command = f"manage.py migrate --database {alias}"
    if not _is_migrating():
        return (
            f"Tables of djqueue are missing or out of date: run {command}. If that changes nothing, run "
            "manage.py djqueue upgrade."
        )
    return (
        "A migration uses djqueue before its tables are there: add "
        f"('djqueue', {latest_migration()!r}) to the dependencies of that migration, then run {command}."
    )


def _is_migrating() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == MIGRATING:
            return True
    return False


def latest_migration() -> str:
    """Return the name of djqueue's last migration, after which all tables exist."""
    return max(found.name for found in pkgutil.iter_modules(migrations.__path__))


AWAY = (OperationalError, InterfaceError, InternalError, ProgrammingError)
"""Errors of an unreachable server or missing tables."""


def refuses_rows(error: Exception) -> bool:
    """Return whether a database may have refused the values of some rows, and may take the others."""
    state = getattr(error.__cause__, "sqlstate", None) or ""
    if not state:
        return isinstance(error, (DataError, IntegrityError, ValueError, OverflowError))
    # P0001: a trigger of the project has raised an exception. 54: the row is too large for an index.
    return state == "P0001" or state[:2] in ("22", "23", "44", "54")


class NamedErrors:
    """Converts database errors in a block. Stateless, so that blocks and threads can share one."""

    __slots__ = ("_alias",)

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Raise the user's error for a database error."""
        if isinstance(error, SynchronousOnlyOperation):
            raise SynchronousOnlyOperation(IN_COROUTINE) from None
        if isinstance(error, Error):
            raise_named(self._alias, error)


@cache
def named(alias: str) -> NamedErrors:
    """Convert database errors in the block to errors that name the database and the remedy."""
    return NamedErrors(alias)


def raise_named(alias: str, error: Error) -> NoReturn:
    """Raise the user's error for a database error."""
    hide_row(error)
    # A broken transaction is the caller's responsibility, and so is a row that the project refuses.
    if not isinstance(error, AWAY) or isinstance(error, TransactionManagementError) or refuses_rows(error):
        raise error
    drop_if_broken(alias)
    raise unavailable(alias, error) from error


def drop_if_broken(alias: str) -> None:
    """Close this thread's connection if it is broken, so that the next use opens a new one."""
    connection = connections[alias]
    if connection.in_atomic_block or connection.connection is None:
        return
    if connection.is_usable():
        connection.errors_occurred = False
    else:
        connection.close()


def unavailable(alias: str, error: Error, consequence: str = "") -> StorageUnavailableError:
    """Return the error for a user.

    Args:
        alias: The database.
        error: The database error.
        consequence: Text on what it means for the operation.
    """
    reason = in_one_line(error)
    end = "" if reason.endswith((".", "?", "!")) else "."
    what_to_do = remedy(alias, error)
    raised = StorageUnavailableError(
        f"the database {alias!r} cannot be used{consequence}: {reason}{end} {what_to_do}"
    )
    if what_to_do != UNKNOWN:
        raised.remedy = what_to_do
    return raised


def is_unreachable(alias: str, error: StorageUnavailableError) -> bool:
    """Return whether no connection to the server could be made, so that another attempt would wait as long.

    A connection that was open may have been ended by a restart of the server, which answers a new one. SQLite
    has no server: its error says that the file is locked, which may be over a moment later.
    """
    cause = error.__cause__
    if connections[alias].vendor == "sqlite" or not isinstance(cause, (OperationalError, InterfaceError)):
        return False
    return any(frame.f_code.co_name == "get_new_connection" for frame, _ in walk_tb(cause.__traceback__))


WHOLE_TABLE = ["AccessExclusiveLock", "ExclusiveLock", "ShareRowExclusiveLock", "ShareLock"]
"""Modes of PostgreSQL's locks that keep all others from writing to a table."""
LOCKED_FOR = 10.0
"""Seconds after which a lock that keeps all others from writing is a problem."""
LOCKS = """
    SELECT k.name, k.pid, a.application_name, a.state,
        COALESCE(k.waited, EXTRACT(EPOCH FROM clock_timestamp() - a.xact_start)) AS seconds,
        EXISTS (SELECT FROM pg_locks w WHERE NOT w.granted AND w.relation = k.relation) AS is_waited_for
    FROM (
        SELECT l.relation, c.relname AS name,
            CASE WHEN l.granted THEN l.pid ELSE (pg_blocking_pids(l.pid))[1] END AS pid,
            CASE WHEN NOT l.granted THEN EXTRACT(EPOCH FROM clock_timestamp() - l.waitstart) END AS waited
        FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
        WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND left(c.relname, 8) = 'djqueue_' AND l.pid <> pg_backend_pid()
            AND l.mode = ANY(?)
    ) k LEFT JOIN pg_stat_activity a ON a.pid = k.pid
    ORDER BY seconds DESC NULLS LAST
"""
"""Tables of djqueue that cannot be written, because a session has locked them, or waits for a lock of the
whole table behind another session. The seconds are null for another role's session, unless this role has
pg_read_all_stats."""
WRITE_BYTE = 120
"""Byte of the file DATABASE-shm that SQLite locks while a transaction writes."""


def locked_tables(
    rows: Callable[[str, list[str]], Iterable[tuple[Any, ...]]], locked_for: float | None = None
) -> Iterator[Finding]:
    """Yield the sessions of PostgreSQL that keep others from writing for long.

    Args:
        rows: Returns the rows of a statement, in which `?` is a parameter.
        locked_for: Seconds after which that is a problem, if other than `LOCKED_FOR`.
    """
    locked_for = LOCKED_FOR if locked_for is None else locked_for
    seen = set()
    for table, pid, application, state, seconds, is_waited_for in undated.dated(rows(LOCKS, WHOLE_TABLE)):
        is_long = is_waited_for if seconds is None else seconds >= locked_for
        if is_long and pid not in seen:
            seen.add(pid)
            about = ", ".join(filter(None, (application, state)))
            time = "" if seconds is None else f" for {float(seconds):.0f} s"
            yield problem(
                f"the table {table} has been locked{time} by the session {pid}"
                + (f" ({about})" if about else ""),
                f"End its transaction, or the session: SELECT pg_terminate_backend({pid})",
            )


class UndatedLocks:
    """Since when this process has seen the locks whose age the database does not show to its role."""

    def __init__(self) -> None:
        self._since = monotonic()
        self._first_seen: dict[tuple[str, int], float] = {}

    def dated(self, locks: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield rows of LOCKS with the seconds since a lock was first seen. These stay unknown while this
        process is so young that it could not have seen what is a problem.
        """
        now, before = monotonic(), self._first_seen
        self._first_seen = {}
        for table, pid, application, state, seconds, is_waited_for in locks:
            if seconds is None:
                first = self._first_seen[table, pid] = before.get((table, pid), now)
                if now - self._since >= LOCKED_FOR:
                    seconds = now - first
            yield table, pid, application, state, seconds, is_waited_for


undated = UndatedLocks()


def locked_file(alias: str) -> Iterator[Finding]:
    """Yield that SQLite is locked, if nothing has been written for long: workers write every few seconds."""
    path = str(connections[alias].settings_dict["NAME"])
    written = []
    for name in (path, f"{path}-wal"):
        with suppress(FileNotFoundError):
            written.append(os.stat(name).st_mtime)
    # The system's times of files, by the system's clock.
    seconds = time_ns() / 1e9 - max(written, default=0)
    if seconds < LOCKED_FOR:
        return
    holders = _holders_of(path)
    by = f" by the process {' and '.join(holders)}" if holders else ""
    yield problem(
        f"the database {alias!r} is locked{by}, and nothing has been written for {seconds:.0f} s",
        "End the transaction that writes, or its process.",
    )


def problem(text: str, remedy: str) -> Finding:
    """Return a finding of the health check of the storage."""
    return Finding("health.storage", "error", text, remedy)
