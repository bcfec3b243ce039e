"""The differences between SQLite and PostgreSQL: transactions, row locks, lists of values, bulk inserts."""

import json
import math
import os
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from time import monotonic, sleep
from typing import Any, NamedTuple
from weakref import WeakSet

from django.apps import apps
from django.db import OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from djqueue.core.deadlines import remaining
from djqueue.core.errors import ConfigurationError, StorageReplacedError
from djqueue.core.logs import Log
from djqueue.core.messages import in_one_line
from djqueue.core.threads import after_fork
from djqueue.storage.tables.dberrors import WHOLE_TABLE
from djqueue.storage.tables.dialects import OnSqlite

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = Log("djqueue.storage")
Row = tuple[Any, ...]
COPY_FROM = 200
"""Rows of one insert from which PostgreSQL takes them by COPY."""
OLDEST_SQLITE = (3, 35)
"""It has RETURNING."""
LOCK_TIMEOUT = 5.0
"""Seconds for which a call waits for a lock of another transaction, unless the project has set others."""
LIMITS = {
    "statement_timeout": "30s",
    "idle_in_transaction_session_timeout": "60s",
    "application_name": "djqueue",
}
"""Settings of own connections to PostgreSQL, unless the project has set them."""
NETWORK = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""Options of own connections to PostgreSQL, so that they notice within 25 s that the network is gone."""
PREPARED = 5
"""Executions of a statement after which the server keeps its plan for the connection."""
PLANS = ("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "jit")
"""Settings that are off, so that a plan that was made while a table was empty does not read all of it later.
A bitmap would read, sort, and try to lock the groups of, all ready jobs of a queue for each claim. Statements
that must read a table are not compiled either, which takes much longer than running them."""
NEGLIGIBLE = 0.1
"""Seconds by which a wait may be longer than asked for."""
SYNCED = (
    "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"
)
"""Lets the commit of a transaction wait for the disk of PostgreSQL."""
LIMITED = (
    "SELECT name, before, set_config(name, ms || 'ms', true) FROM (SELECT name, ms, current_setting(name) "
    "AS before FROM (VALUES {}) AS wanted(name, ms) OFFSET 0) AS found WHERE CAST(before AS interval) NOT "
    "BETWEEN interval '1 ms' AND ms * interval '1 ms'"
)
"""Sets times in the settings of a transaction of PostgreSQL that are longer; returns those before."""
LOCK_HOLDERS = """
    SELECT a.pid, a.application_name, a.state,
        round(extract(epoch FROM clock_timestamp() - a.xact_start)),
        round(extract(epoch FROM clock_timestamp() - a.query_start)),
        min(l.mode) FILTER (WHERE l.locktype = 'relation' AND l.mode = ANY(%(whole)s)),
        min(c.relname) FILTER (WHERE l.locktype = 'relation' AND l.mode = ANY(%(whole)s))
    FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid LEFT JOIN pg_class c ON c.oid = l.relation
    WHERE l.granted AND l.pid <> pg_backend_pid() AND l.mode <> 'AccessShareLock'
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND (l.locktype = 'advisory' OR c.relname LIKE 'djqueue\\_%%' AND c.relkind = 'r')
        AND COALESCE(a.xact_start, '-infinity') < clock_timestamp() - make_interval(secs => %(older)s)
    GROUP BY a.pid, a.application_name, a.state, a.xact_start, a.query_start
    ORDER BY 6 NULLS LAST, a.xact_start LIMIT 1
"""
"""The session that held up others: one with a lock of a whole table, or with the oldest transaction."""
NUMBERS = "SELECT nextval(pg_get_serial_sequence('djqueue_job', 'id'))"
"""Takes keys of new jobs of PostgreSQL."""
AT_ONCE = "; SET LOCAL lock_timeout = '250ms'"
"""Lets a transaction of PostgreSQL wait for others like itself, but for none that stays open."""
SAVEPOINT = "djqueue"
"""Name of the savepoint within a caller's transaction on PostgreSQL."""
SUFFIX = "-djqueue"
SHORTEST, LONGEST = 0.000_1, 0.000_5
"""Seconds between attempts to take the lock."""


Insertion = tuple[str, Sequence[Any]]
"""A statement in the driver's parameter style, and its parameters."""
Constants = tuple[tuple[str, str], ...]
"""Columns with the same value in all rows of an insert, each with its SQL: a number, or an empty text."""
RowReader = Callable[..., list[Row]]
"""Returns the rows of a statement."""


class NewRows(NamedTuple):
    """Rows to insert into a table."""

    table: str
    columns: tuple[str, ...]
    rows: Sequence[Row]
    constants: Constants
    """Further columns."""


class WriteMode(NamedTuple):
    """The durability, waiting and numbers of a transaction."""

    durable: bool = False
    """Whether the commit must be on disk, regardless of the connection's settings."""
    waits: bool = True
    """Wait for other transactions. Otherwise, the transaction is not opened, or fails at a lock that another
    one does not release at once: see `is_locked`.
    """
    numbers: int = 0
    """The number of `numbers` that the transaction needs, if they save an exchange with a server."""


PLAIN_WRITE = WriteMode()


class SqlDialect(ABC):
    """The statements and drivers of one database. Statements are written with `?` for each parameter."""

    snapshot: str
    """Begins a transaction that only reads, all of it at one moment."""
    skip_locked = ""
    """Ends a SELECT that locks its rows, and leaves out those that other transactions have locked."""
    for_update = ""
    """Ends a SELECT that locks its rows, and waits for other transactions."""
    for_share = ""
    """Ends a SELECT whose rows may not change until the transaction ends."""
    free_group = ""
    """Condition that a ready or active job has no group, or one that can be locked at once; then locks it."""
    unlocked_change = ""
    """Ends a SELECT of rows that are changed and not deleted, and leaves out those that are locked."""
    keep = ""
    """Ends a SELECT whose rows may be changed by others, but not deleted, until the transaction ends."""
    as_text = "?"
    """A text parameter where the database could not tell its type."""
    has_clock = False
    """True if the database is a server, whose clock counts."""
    has_gaps = False
    """True if a transaction may commit before one with lower keys."""
    connection_options: Mapping[str, Any] = {}
    """Options of own connections, unless the project has set them."""
    nests_writes = False
    """True if the WITH clause of a statement may change rows: one round trip for several changes."""

    @abstractmethod
    def cursor(self, wrapper: BaseDatabaseWrapper) -> Any:
        """Return a cursor of the driver."""

    @abstractmethod
    def tune(self, wrapper: BaseDatabaseWrapper) -> None:
        """Prepare a new connection that only djqueue uses."""

    def prepare(self, wrapper: BaseDatabaseWrapper) -> None:  # noqa: B027 - optional
        """Prepare the database for workers."""

    @abstractmethod
    def writing(
        self, wrapper: BaseDatabaseWrapper, cursor: Any, mode: WriteMode
    ) -> AbstractContextManager[Sequence[int] | None]:
        """Open a transaction that writes, and commit it at the end. The value is None if it was not opened,
        and otherwise the numbers that came with its beginning.

        Args:
            wrapper: A connection without a transaction; on SQLite, `tune_for_loop` has prepared one for which
                `waits` is False.
            cursor: Its cursor.
            mode: How it writes.
        """

    def is_locked(self, error: BaseException) -> bool:
        """Return whether a transaction failed with this error because of another one's lock."""
        return False

    @abstractmethod
    def is_limited(self, wrapper: BaseDatabaseWrapper) -> bool:
        """Return whether the settings of a connection end each wait for a lock in time for the call."""

    @abstractmethod
    def limited(self, wrapper: BaseDatabaseWrapper, cursor: Any) -> AbstractContextManager[None]:
        """Limit waits for locks meanwhile, in a transaction whose settings stay as they were."""

    @contextmanager
    def nested(
        self, wrapper: BaseDatabaseWrapper, cursor: Any, *, numbers: int = 0
    ) -> Iterator[Sequence[int]]:
        """Limit waits for locks meanwhile, at a savepoint of the caller's transaction: an error undoes only
        what was done since, and leaves its settings as they were. The value is as that of `writing`.
        """
        with transaction.atomic(using=wrapper.alias), self.limited(wrapper, cursor):
            yield ()

    def holder(self, wrapper: BaseDatabaseWrapper, older: float = 0.2) -> str:
        """Return a sentence that names the session whose lock holds up others; empty if there is none.

        Args:
            wrapper: The connection of a call that has waited, or another one.
            older: Minimum seconds since the session's transaction began.
        """
        return ""

    def check_file(self) -> None:  # noqa: B027 - optional
        """Raise StorageReplacedError if another file has taken the place of the one that is open."""

    def tune_for_loop(self, wrapper: BaseDatabaseWrapper) -> bool:
        """Let a connection wait for nothing, so that the thread of an event loop may use it; return whether
        it then does.
        """
        return False

    def make_durable(self, cursor: Any) -> None:  # noqa: B027 - optional
        """Let the caller's transaction wait for the disk when it commits, if the database can do that."""

    def writers(self, rows: RowReader, callers: Sequence[int]) -> set[str]:
        """Return the open transactions that have written to jobs, without those of these sessions.

        Args:
            rows: Returns the rows of a statement.
            callers: Numbers of sessions on the server.
        """
        return set()  # With one writer at a time, none is open after a write.

    def session(self, wrapper: BaseDatabaseWrapper) -> int | None:
        """Return the number of a connection's session on the server."""
        return None

    def close(self) -> None:  # noqa: B027 - optional
        """Release what is open besides connections."""

    @abstractmethod
    def once(self, select: str) -> str:
        """Return a condition that a column has one of the values of a SELECT, which is run exactly once."""

    @abstractmethod
    def text(self, statement: str) -> str:
        """Return a statement in the driver's parameter style."""

    @abstractmethod
    def among(self, column: str, values: Sequence[Any]) -> tuple[str, Any]:
        """Return a condition that a column has one of these values, and its one parameter."""

    @abstractmethod
    def listed(self, values: Sequence[str]) -> tuple[str, Any]:
        """Return a subquery of texts, whose column is `name`, and its one parameter."""

    @abstractmethod
    def insert(self, cursor: Any, new: NewRows) -> None:
        """Insert rows."""

    def insertion(self, new: NewRows) -> Insertion | None:
        """Return the statement that inserts rows, which may be nested in the next one; None if it may not."""
        return None

    @abstractmethod
    def numbers(self, cursor: Any, count: int) -> Sequence[int]:
        """Return ascending numbers that nothing else has."""

    @abstractmethod
    def lock(self, cursor: Any, keys: Sequence[str]) -> None:
        """Wait until no other transaction holds one of these names, and hold them until the end."""

    @abstractmethod
    def try_lock(self, cursor: Any, keys: Sequence[str]) -> set[str]:
        """Hold these names until the end, unless another transaction holds them; return those held."""

    @abstractmethod
    def may_repeat(self, error: BaseException) -> bool:
        """Return whether a transaction that failed with this error may succeed when it is repeated."""


class LockFile:
    """A lock that one thread of all processes holds at a time: on the file `<database>-djqueue`.

    SQLite's own busy handler sleeps for up to 100 ms, so that one busy process keeps all others from writing
    for seconds. With short sleeps at a lock that is held for one transaction at a time, all get their share.
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
        until = monotonic() + limit
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
                if monotonic() >= until:
                    return False
                sleep(pause)
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
                file = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
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


class DatabaseFile(NamedTuple):
    """A file that was opened, which the path may no longer lead to."""

    path: str
    device: int
    number: int
    """The file's number (inode) on its device."""

    @classmethod
    def at(cls, path: str) -> "DatabaseFile | None":
        """Return the file at a path; None if there is none, as for a database in memory."""
        try:
            found = os.stat(path)
        except OSError:
            return None
        return cls(path, found.st_dev, found.st_ino)

    def is_in_place(self) -> bool:
        """Return whether the path leads to this file, or cannot be followed at the moment."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return (found.st_dev, found.st_ino) == (self.device, self.number)


class SqliteSql(SqlDialect):
    """SQLite: one writer at a time, so that no row needs a lock."""

    snapshot = "BEGIN"

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._turns: LockFile | None = None
        self._file: DatabaseFile | None = None

    def cursor(self, wrapper: BaseDatabaseWrapper) -> Any:
        return wrapper.connection.cursor(sqlite3.Cursor)

    def tune(self, wrapper: BaseDatabaseWrapper) -> None:
        cursor = self.cursor(wrapper)
        for pragma in OnSqlite.PRAGMAS:
            cursor.execute(f"PRAGMA {pragma}")

    def prepare(self, wrapper: BaseDatabaseWrapper) -> None:
        """Let readers and the writer not wait for each other, unless the project has chosen otherwise."""
        cursor = self.cursor(wrapper)
        self._file = DatabaseFile.at(_file(cursor))
        if _value(cursor, "PRAGMA journal_mode") != "delete":
            return
        try:
            with wrapper.wrap_database_errors:
                cursor.execute("PRAGMA journal_mode=WAL")
        except OperationalError as error:
            logger.warning(
                "Could not change the journal mode of %s to WAL, so readers wait for the writer: %s",
                wrapper.settings_dict["NAME"],
                in_one_line(error),
            )

    @contextmanager
    def writing(
        self, wrapper: BaseDatabaseWrapper, cursor: Any, mode: WriteMode
    ) -> Iterator[Sequence[int] | None]:
        # djqueue's writers wait in the lock file, and there for those of other programs in SQLite.
        turns = self._turns or self._open_turns(cursor)
        usual = self._usual(wrapper)
        limit = (usual if self._timeout is None else min(usual, self._timeout)) if mode.waits else 0.0
        began = monotonic()
        if not turns.acquire(remaining(limit)):
            if mode.waits:
                raise OperationalError("database is locked")
            yield None
            return
        try:
            with _pragma(cursor, "synchronous", "FULL") if mode.durable else nullcontext():
                if mode.waits:
                    with self._waiting(wrapper, cursor, limit - (monotonic() - began)):
                        cursor.execute("BEGIN IMMEDIATE")
                is_open = mode.waits or _begins_at_once(cursor)
                with _committed(cursor) if is_open else nullcontext():
                    yield () if is_open else None
        finally:
            turns.release()

    def is_limited(self, wrapper: BaseDatabaseWrapper) -> bool:
        usual = self._usual(wrapper)
        return remaining(usual if self._timeout is None else self._timeout) >= usual - NEGLIGIBLE

    def limited(self, wrapper: BaseDatabaseWrapper, cursor: Any) -> AbstractContextManager[None]:
        return self._waiting(wrapper, cursor, math.inf if self._timeout is None else self._timeout)

    def _waiting(
        self, wrapper: BaseDatabaseWrapper, cursor: Any, limit: float
    ) -> AbstractContextManager[None]:
        """Let SQLite wait for locks for so many seconds at most, and for no longer than usual."""
        usual = self._usual(wrapper)
        limit = remaining(limit)
        if limit >= usual - NEGLIGIBLE:
            return nullcontext()
        return _pragma(cursor, "busy_timeout", max(1, int(limit * 1_000)))

    def _usual(self, wrapper: BaseDatabaseWrapper) -> float:
        return float(wrapper.settings_dict["OPTIONS"].get("timeout", 5.0))

    def tune_for_loop(self, wrapper: BaseDatabaseWrapper) -> bool:
        cursor = self.cursor(wrapper)
        cursor.execute("PRAGMA busy_timeout=0")
        # In other modes, a commit waits for readers.
        return bool(_value(cursor, "PRAGMA journal_mode") == "wal")

    def check_file(self) -> None:
        if self._file is not None and not self._file.is_in_place():
            raise StorageReplacedError(
                f"the file {self._file.path} was removed or replaced while this process had it open, so what "
                "the process reads and writes is no longer in the database. Stop the workers and the web "
                "server before you replace the file, such as by a backup."
            )

    def _open_turns(self, cursor: Any) -> LockFile:
        with self._lock:
            if self._turns is None:
                self._turns = LockFile(_file(cursor))
            return self._turns

    def close(self) -> None:
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.close()

    def once(self, select: str) -> str:
        return f"IN ({select})"

    def text(self, statement: str) -> str:
        return statement

    def among(self, column: str, values: Sequence[Any]) -> tuple[str, Any]:
        if len(values) == 1:
            return f"{column} = ?", values[0]
        return f"{column} IN (SELECT value FROM json_each(?))", json.dumps(list(values))

    def listed(self, values: Sequence[str]) -> tuple[str, Any]:
        return "(SELECT value AS name FROM json_each(?))", json.dumps(list(values))

    def insert(self, cursor: Any, new: NewRows) -> None:
        cursor.executemany(_insert(new.table, new.columns, "?", new.constants), new.rows)

    def numbers(self, cursor: Any, count: int) -> Sequence[int]:
        # SQLite keeps the last keys of tables here, and takes the key of a new job from it anyway.
        statement = "UPDATE sqlite_sequence SET seq = seq + ? WHERE name = 'djqueue_job' RETURNING seq"
        row = cursor.execute(statement, (count,)).fetchone()
        if row is None:
            cursor.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('djqueue_job', ?)", (count,))
            row = (count,)
        return range(row[0] - count + 1, row[0] + 1)

    def lock(self, cursor: Any, keys: Sequence[str]) -> None:
        pass

    def try_lock(self, cursor: Any, keys: Sequence[str]) -> set[str]:
        return set(keys)

    def may_repeat(self, error: BaseException) -> bool:
        return False


class PostgresSql(SqlDialect):
    """PostgreSQL through psycopg 3.

    Args:
        alias: The database.
        has_sessions: Settings of a session stay with the connection. False behind a pooler that gives each
            transaction another one: there, each transaction gets the settings.
        timeout: Seconds for which a call waits for a lock.
    """

    snapshot = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
    skip_locked = " FOR UPDATE SKIP LOCKED"
    for_update = " FOR UPDATE"
    for_share = " FOR SHARE"
    free_group = (
        " AND (concurrency_key IS NULL OR pg_try_advisory_xact_lock("
        "hashtextextended('group:' || queue || ':' || concurrency_key, 7310)))"
    )
    unlocked_change = " FOR NO KEY UPDATE SKIP LOCKED"
    keep = " FOR KEY SHARE"
    as_text = "CAST(? AS text)"
    has_clock = True
    has_gaps = True
    nests_writes = True

    def __init__(self, alias: str, *, has_sessions: bool = True, timeout: float | None = None) -> None:
        self._alias = alias
        self._timeout = LOCK_TIMEOUT if timeout is None else timeout
        self._tuned: WeakSet[BaseDatabaseWrapper] = WeakSet()
        settings = _settings({**LIMITS, "lock_timeout": _ms(self._timeout)}, of_session=has_sessions)
        self._of_session, self._of_transaction = (settings, "") if has_sessions else ("", f"; {settings}")
        self.connection_options = {**NETWORK, "prepare_threshold": PREPARED} if has_sessions else NETWORK

    def cursor(self, wrapper: BaseDatabaseWrapper) -> Any:
        import psycopg

        return psycopg.Cursor(wrapper.connection)

    def tune(self, wrapper: BaseDatabaseWrapper) -> None:
        if self._of_session:
            self.cursor(wrapper).execute(self._of_session)
            self._tuned.add(wrapper)

    @contextmanager
    def writing(
        self, wrapper: BaseDatabaseWrapper, cursor: Any, mode: WriteMode
    ) -> Iterator[Sequence[int] | None]:
        # After the wait for a lock, a statement must see what its last holder has committed.
        begin = "BEGIN ISOLATION LEVEL READ COMMITTED"
        limits = "" if self.is_limited(wrapper) else f"; {self._limits()}"
        wanted = limits if mode.waits else AT_ONCE
        opening = f"{begin}{self._of_transaction}{f'; {SYNCED}' if mode.durable else ''}{wanted}"
        with _committed(cursor):
            cursor.execute(opening + _and_numbers(mode.numbers), prepare=False)
            yield _first_values(cursor) if mode.numbers else ()

    def is_limited(self, wrapper: BaseDatabaseWrapper) -> bool:
        return wrapper in self._tuned and remaining(math.inf) == math.inf

    @contextmanager
    def limited(self, wrapper: BaseDatabaseWrapper, cursor: Any) -> Iterator[None]:
        before = cursor.execute(self._limits(), prepare=False).fetchall()
        try:
            yield
        finally:
            # After an error, the savepoint or the transaction is rolled back, with its settings.
            if before and cursor.connection.info.transaction_status.name == "INTRANS":
                cursor.execute(_put_back(before))

    @contextmanager
    def nested(
        self, wrapper: BaseDatabaseWrapper, cursor: Any, *, numbers: int = 0
    ) -> Iterator[Sequence[int]]:
        # Each statement of its own would be a round trip: this takes two instead of four.
        try:
            cursor.execute(f"SAVEPOINT {SAVEPOINT}; {self._limits()}{_and_numbers(numbers)}", prepare=False)
            cursor.nextset()
            before = cursor.fetchall()
            yield _first_values(cursor) if numbers else ()
        except BaseException:
            try:
                cursor.execute(f"ROLLBACK TO SAVEPOINT {SAVEPOINT}; RELEASE SAVEPOINT {SAVEPOINT}")
            except Exception:
                # The error that led here says more. The caller's transaction cannot be committed.
                wrapper.needs_rollback = True
            raise
        cursor.execute(f"{_put_back(before)}RELEASE SAVEPOINT {SAVEPOINT}")

    def _limits(self) -> str:
        """Return the statement that limits the waits of a transaction, and its statements at a deadline."""
        left = remaining(math.inf)
        limits = {"lock_timeout": min(left, self._timeout)}
        if left != math.inf:
            # A little later, so that the error says what it was.
            limits["statement_timeout"] = left + NEGLIGIBLE
        wanted = ", ".join(f"('{name}', {max(1, int(limit * 1_000))})" for name, limit in limits.items())
        return LIMITED.format(wanted)

    def holder(self, wrapper: BaseDatabaseWrapper, older: float = 0.2) -> str:
        given = {"whole": WHOLE_TABLE, "older": older}
        found = self.cursor(wrapper).execute(LOCK_HOLDERS, given).fetchone()
        if found is None:
            return ""
        pid, name, state, age, query_age, mode, table = found
        what = f"{mode} on {table}" if mode else "locks of rows"
        since = "" if age is None else f": its transaction began {age:.0f} s ago"
        last = "" if age is None or query_age is None else f", and its last query {query_age:.0f} s ago"
        return f"Session {pid} (application {name!r}, {state or 'state unknown'}) holds {what}{since}{last}."

    def make_durable(self, cursor: Any) -> None:
        cursor.execute(SYNCED)

    def writers(self, rows: RowReader, callers: Sequence[int]) -> set[str]:
        found = rows(
            "SELECT virtualtransaction FROM pg_locks "
            "WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
            "AND relation = to_regclass('djqueue_job') AND granted AND pid <> ALL(?)",
            list(callers),
        )
        return {name for (name,) in found}

    def session(self, wrapper: BaseDatabaseWrapper) -> int | None:
        number: int = wrapper.connection.info.backend_pid
        return number

    def once(self, select: str) -> str:
        # With IN, a plan may run the SELECT again for each row, and lock more rows than its LIMIT.
        return f"= ANY(ARRAY({select}))"

    def text(self, statement: str) -> str:
        return _percent(statement)

    def among(self, column: str, values: Sequence[Any]) -> tuple[str, Any]:
        if len(values) == 1:
            # The driver takes several times as long for a list.
            return f"{column} = ?", values[0]
        return f"{column} = ANY(?)", list(values)

    def listed(self, values: Sequence[str]) -> tuple[str, Any]:
        if len(values) == 1:
            return "(SELECT CAST(? AS text) AS name)", values[0]
        return "(SELECT unnest(CAST(? AS text[])) AS name)", list(values)

    def insertion(self, new: NewRows) -> Insertion | None:
        table, columns, rows, constants = new
        if len(rows) >= COPY_FROM:
            return None
        if len(rows) == 1:
            return _insert(table, columns, "%s", constants), rows[0]
        lists = [list(values) for values in zip(*rows, strict=True)]
        return _insert_lists(self._alias, table, columns, constants), lists

    def insert(self, cursor: Any, new: NewRows) -> None:
        if found := self.insertion(new):
            cursor.execute(*found)
            return
        same = [value.strip("'") for _, value in new.constants]
        with cursor.copy(f"COPY {new.table} ({_names(new.columns, new.constants)}) FROM STDIN") as copy:
            for row in new.rows:
                copy.write_row((*row, *same))

    def numbers(self, cursor: Any, count: int) -> Sequence[int]:
        return _first_values(cursor.execute(f"{NUMBERS} FROM generate_series(1, %s)", (count,)))

    def lock(self, cursor: Any, keys: Sequence[str]) -> None:
        cursor.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended(key, 7310)) FROM unnest(%s::text[]) AS "
            "wanted(key)",
            (sorted(set(keys)),),
        )

    def try_lock(self, cursor: Any, keys: Sequence[str]) -> set[str]:
        found = cursor.execute(
            "SELECT key FROM unnest(%s::text[]) AS wanted(key) "
            "WHERE pg_try_advisory_xact_lock(hashtextextended(key, 7310))",
            (sorted(set(keys)),),
        )
        return {key for (key,) in found.fetchall()}

    def is_locked(self, error: BaseException) -> bool:
        return getattr(error, "sqlstate", None) == "55P03"

    def may_repeat(self, error: BaseException) -> bool:
        # Serialization failure, deadlock, a key that another transaction has just inserted, and a plan that
        # was kept from before a migration.
        return getattr(error, "sqlstate", None) in ("40001", "40P01", "23505", "0A000")


def dialect_for(alias: str, *, has_sessions: bool = True, timeout: float | None = None) -> SqlDialect:
    """Return the dialect of a configured database. Raises ConfigurationError for one that cannot be used.

    Args:
        alias: The database.
        has_sessions: Settings of a session stay with the connection: not behind some poolers.
        timeout: Seconds for which a call waits for a lock; by default as the database's settings say.
    """
    connection = connections[alias]
    if connection.vendor == "sqlite":
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            oldest = ".".join(map(str, OLDEST_SQLITE))
            raise ConfigurationError(
                f"DATABASES[{alias!r}]: Python has SQLite {sqlite3.sqlite_version}, and djqueue needs "
                f"{oldest} or newer; install a newer one, or use PostgreSQL"
            )
        return SqliteSql(timeout)
    if connection.vendor == "postgresql":
        return PostgresSql(alias, has_sessions=has_sessions, timeout=timeout)
    raise ConfigurationError(
        f"DATABASES[{alias!r}] is {connection.display_name}: djqueue stores jobs in PostgreSQL or SQLite; "
        "use one of these, or the Redis storage"
    )


def _and_numbers(count: int) -> str:
    """Return the statement that takes so many numbers after others in the same exchange."""
    return f"; {NUMBERS} FROM generate_series(1, {count})" if count else ""


def _first_values(cursor: Any) -> list[int]:
    """Return the first values of the rows of the last statement."""
    while cursor.nextset():
        pass
    return [value for value, *_ in cursor.fetchall()]


@contextmanager
def _committed(cursor: Any) -> Iterator[None]:
    """Commit the open transaction at the end; roll it back if that, or the block, fails."""
    try:
        yield
        cursor.execute("COMMIT")
    except BaseException:
        roll_back(cursor)
        raise


def roll_back(cursor: Any) -> None:
    """Roll the open transaction back, if there still is one."""
    connection = cursor.connection
    if getattr(connection, "closed", False) or not getattr(connection, "in_transaction", True):
        return
    try:
        cursor.execute("ROLLBACK")
    except Exception:
        # The error that led here says more. A connection that cannot even do this is of no more use.
        connection.close()


def _begins_at_once(cursor: Any) -> bool:
    """Begin a transaction of SQLite on a connection that does not wait for a lock; False if it would have to.

    Any other error is left to a call that waits: it meets the error again.
    """
    try:
        cursor.execute("BEGIN IMMEDIATE")
    except sqlite3.Error:
        return False
    return True


@contextmanager
def _pragma(cursor: Any, name: str, value: object) -> Iterator[None]:
    """Change a setting of a connection to SQLite for a while."""
    usual = _value(cursor, f"PRAGMA {name}")
    cursor.execute(f"PRAGMA {name}={value}")
    try:
        yield
    finally:
        cursor.execute(f"PRAGMA {name}={usual}")


def _value(cursor: Any, statement: str) -> Any:
    return cursor.execute(statement).fetchone()[0]


def _file(cursor: Any) -> str:
    """Return the path of a SQLite database; empty for one in memory."""
    files = {name: path for _, name, path in cursor.execute("PRAGMA database_list")}
    return files["main"] or ""


def _ms(seconds: float) -> str:
    return f"{max(1, int(seconds * 1_000))}ms"


def _settings(given: Mapping[str, str], *, of_session: bool) -> str:
    """Return the statements that set limits and `PLANS`, for a session or for a transaction."""
    wanted = ", ".join(f"('{name}', '{value}')" for name, value in given.items())
    limits = (
        f"SELECT set_config(name, value, {'false' if of_session else 'true'}) FROM (VALUES {wanted}) "
        "AS wanted(name, value) WHERE current_setting(name) IN ('0', '')"
    )
    return "; ".join((limits, *(f"SET {'' if of_session else 'LOCAL '}{name} = off" for name in PLANS)))


def _put_back(before: Sequence[Row]) -> str:
    """Return the statements that set a transaction's settings to what they were."""
    # A third of the time of SELECT set_config(...), which is planned.
    return "".join(f"SET LOCAL {name} = '{value}'; " for name, value, _ in before)


def in_one(statements: Sequence[Insertion]) -> Insertion:
    """Return one statement of PostgreSQL that runs several, none of which sees the rows of another."""
    *nested, (last, _) = statements
    if nested:
        steps = (f"step{number} AS ({statement})" for number, (statement, _) in enumerate(nested))
        last = f"WITH {', '.join(steps)} {last}"
    return last, [value for _, values in statements for value in values]


def given_rows(types: Sequence[str], rows: Sequence[Row]) -> Insertion:
    """Return a table of PostgreSQL with these rows, and its parameters."""
    if len(rows) == 1:
        return f"(VALUES ({', '.join(f'CAST(? AS {of})' for of in types)}))", rows[0]
    lists = [list(values) for values in zip(*rows, strict=True)]
    return f"unnest({', '.join(f'CAST(? AS {of}[])' for of in types)})", lists


@lru_cache(maxsize=1024)
def _percent(statement: str) -> str:
    return statement.replace("%", "%%").replace("?", "%s")


@lru_cache(maxsize=256)
def _insert(table: str, columns: tuple[str, ...], mark: str, constants: Constants) -> str:
    values = [*[mark] * len(columns), *(value for _, value in constants)]
    return f"INSERT INTO {table} ({_names(columns, constants)}) VALUES ({', '.join(values)})"


def _names(columns: Sequence[str], constants: Constants) -> str:
    return ", ".join((*columns, *(name for name, _ in constants)))


@lru_cache(maxsize=256)
def _insert_lists(alias: str, table: str, columns: tuple[str, ...], constants: Constants) -> str:
    """Return PostgreSQL's INSERT of many rows, whose parameters are a list of values for each column."""
    [model] = [one for one in apps.get_app_config("djqueue").get_models() if one._meta.db_table == table]
    types = {field.column: field.db_type(connections[alias]) or "" for field in model._meta.fields}
    # Without their lengths: a cast would shorten the values.
    plain = (types[column.strip('"')].partition("(")[0] for column in columns)
    lists = ", ".join(f"CAST(%s AS {of}[])" for of in plain)
    values = ", ".join(("given.*", *(value for _, value in constants)))
    return f"INSERT INTO {table} ({_names(columns, constants)}) SELECT {values} FROM unnest({lists}) AS given"
