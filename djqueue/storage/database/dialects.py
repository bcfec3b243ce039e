"""The differences between SQLite and PostgreSQL: transactions, row locks, lists of values, bulk inserts."""

import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.db import OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper

from djqueue.core.deadline import remaining
from djqueue.core.shown import in_one_line
from djqueue.storage.tables.dialects import OnSqlite

from .lockfile import LockFile

if TYPE_CHECKING:
    from .transaction import Tx

logger = logging.getLogger("djqueue.storage")
Row = tuple[Any, ...]
COPY_FROM = 200
"""Rows of one insert from which PostgreSQL takes them by COPY."""
LIMITS = {
    "statement_timeout": "30s",
    "lock_timeout": "5s",
    "idle_in_transaction_session_timeout": "60s",
    "application_name": "djqueue",
}
"""Settings of own connections to PostgreSQL, unless the project has set them."""
NEGLIGIBLE = 0.1
"""Seconds by which a wait may be longer than asked for."""
SYNCED = (
    "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"
)
"""Lets the commit of a transaction wait for the disk of PostgreSQL."""


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
    as_text = "?"
    """A text parameter where the database could not tell its type."""
    has_clock = False
    """True if the database is a server, whose clock counts."""
    has_gaps = False
    """True if a transaction may commit before one with lower keys."""

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
        self, wrapper: BaseDatabaseWrapper, cursor: Any, *, durable: bool = False, waits: bool = True
    ) -> AbstractContextManager[bool]:
        """Open a transaction that writes, and commit it at the end. The value is whether it was opened.

        Args:
            wrapper: A connection without a transaction.
            cursor: Its cursor.
            durable: Whether the commit must be on disk, regardless of the connection's settings.
            waits: Wait for other transactions. False is for connections that `tune_for_loop` has prepared.
        """

    def tune_for_loop(self, wrapper: BaseDatabaseWrapper) -> bool:
        """Let a connection wait for nothing, so that the thread of an event loop may use it; return whether
        it then does.
        """
        return False

    def make_durable(self, cursor: Any) -> None:  # noqa: B027 - optional
        """Let the caller's transaction wait for the disk when it commits, if the database can do that."""

    def writers(self, tx: "Tx", callers: Sequence[int]) -> set[str]:
        """Return the open transactions that have written to jobs, without those of these sessions."""
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
    def insert(self, cursor: Any, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Insert rows."""

    @abstractmethod
    def numbers(self, cursor: Any, count: int) -> Sequence[int]:
        """Return ascending numbers that nothing else has."""

    @abstractmethod
    def lock(self, cursor: Any, keys: Sequence[str]) -> None:
        """Wait until no other transaction holds one of these names, and hold them until the end."""

    @abstractmethod
    def try_lock(self, cursor: Any, keys: Sequence[str]) -> bool:
        """Hold these names until the end, unless another transaction holds one of them; return whether."""

    @abstractmethod
    def may_repeat(self, error: BaseException) -> bool:
        """Return whether a transaction that failed with this error may succeed when it is repeated."""


class SqliteSql(SqlDialect):
    """SQLite: one writer at a time, so that no row needs a lock."""

    snapshot = "BEGIN"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: LockFile | None = None

    def cursor(self, wrapper: BaseDatabaseWrapper) -> Any:
        import sqlite3

        return wrapper.connection.cursor(sqlite3.Cursor)

    def tune(self, wrapper: BaseDatabaseWrapper) -> None:
        cursor = self.cursor(wrapper)
        for pragma in OnSqlite.PRAGMAS:
            cursor.execute(f"PRAGMA {pragma}")

    def prepare(self, wrapper: BaseDatabaseWrapper) -> None:
        """Let readers and the writer not wait for each other, unless the project has chosen otherwise."""
        if _value(self.cursor(wrapper), "PRAGMA journal_mode") != "delete":
            return
        try:
            with wrapper.wrap_database_errors:
                self.cursor(wrapper).execute("PRAGMA journal_mode=WAL")
        except OperationalError as error:
            logger.warning(
                "Could not change the journal mode of %s to WAL, so readers wait for the writer: %s",
                wrapper.settings_dict["NAME"],
                in_one_line(error),
            )

    @contextmanager
    def writing(
        self, wrapper: BaseDatabaseWrapper, cursor: Any, *, durable: bool = False, waits: bool = True
    ) -> Iterator[bool]:
        # djqueue's writers wait in the lock file, and there for those of other programs in SQLite.
        turns = self._turns or self._open_turns(cursor)
        usual = float(wrapper.settings_dict["OPTIONS"].get("timeout", 5.0)) if waits else 0.0
        began = time.monotonic()
        if not turns.acquire(remaining(usual)):
            if waits:
                raise OperationalError("database is locked")
            yield False
            return
        try:
            with _synced(cursor) if durable else nullcontext():
                if waits:
                    with _patient(cursor, usual, remaining(usual - (time.monotonic() - began))):
                        cursor.execute("BEGIN IMMEDIATE")
                is_open = waits or _begins_at_once(cursor)
                with _committed(cursor) if is_open else nullcontext():
                    yield is_open
        finally:
            turns.release()

    def tune_for_loop(self, wrapper: BaseDatabaseWrapper) -> bool:
        cursor = self.cursor(wrapper)
        cursor.execute("PRAGMA busy_timeout=0")
        # In other modes, a commit waits for readers.
        return bool(_value(cursor, "PRAGMA journal_mode") == "wal")

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

    def insert(self, cursor: Any, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        cursor.executemany(_insert(table, tuple(columns), "?"), rows)

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

    def try_lock(self, cursor: Any, keys: Sequence[str]) -> bool:
        return True

    def may_repeat(self, error: BaseException) -> bool:
        return False


class PostgresSql(SqlDialect):
    """PostgreSQL through psycopg 3.

    Args:
        has_sessions: Settings of a session stay with the connection. False behind a pooler that gives each
            transaction another one: there, each transaction gets the settings.
    """

    snapshot = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
    skip_locked = " FOR UPDATE SKIP LOCKED"
    for_update = " FOR UPDATE"
    for_share = " FOR SHARE"
    as_text = "CAST(? AS text)"
    has_clock = True
    has_gaps = True

    def __init__(self, *, has_sessions: bool = True) -> None:
        self._limits_of_transactions = "" if has_sessions else f"; {_limits(of_session=False)}"
        self._limits_of_session = _limits(of_session=True) if has_sessions else ""

    def cursor(self, wrapper: BaseDatabaseWrapper) -> Any:
        import psycopg

        return psycopg.Cursor(wrapper.connection)

    def tune(self, wrapper: BaseDatabaseWrapper) -> None:
        if self._limits_of_session:
            self.cursor(wrapper).execute(self._limits_of_session)

    @contextmanager
    def writing(
        self, wrapper: BaseDatabaseWrapper, cursor: Any, *, durable: bool = False, waits: bool = True
    ) -> Iterator[bool]:
        cursor.execute(f"BEGIN{self._limits_of_transactions}{f'; {SYNCED}' if durable else ''}")
        with _committed(cursor):
            yield True

    def make_durable(self, cursor: Any) -> None:
        cursor.execute(SYNCED)

    def writers(self, tx: "Tx", callers: Sequence[int]) -> set[str]:
        found = tx.rows(
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
        return f"{column} = ANY(?)", list(values)

    def listed(self, values: Sequence[str]) -> tuple[str, Any]:
        return "(SELECT unnest(CAST(? AS text[])) AS name)", list(values)

    def insert(self, cursor: Any, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        if len(rows) < COPY_FROM:
            statement = _insert(table, tuple(columns), "%s")
            if len(rows) == 1:
                cursor.execute(statement, rows[0])
            else:
                cursor.executemany(statement, rows)
            return
        with cursor.copy(f"COPY {table} ({', '.join(columns)}) FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)

    def numbers(self, cursor: Any, count: int) -> Sequence[int]:
        statement = "SELECT nextval(pg_get_serial_sequence('djqueue_job', 'id')) FROM generate_series(1, %s)"
        return [number for (number,) in cursor.execute(statement, (count,)).fetchall()]

    def lock(self, cursor: Any, keys: Sequence[str]) -> None:
        cursor.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended(key, 7310)) FROM unnest(%s::text[]) AS "
            "wanted(key)",
            (sorted(set(keys)),),
        )

    def try_lock(self, cursor: Any, keys: Sequence[str]) -> bool:
        found = cursor.execute(
            "SELECT bool_and(pg_try_advisory_xact_lock(hashtextextended(key, 7310))) FROM "
            "unnest(%s::text[]) AS wanted(key)",
            (sorted(set(keys)),),
        )
        return bool(found.fetchone()[0])

    def may_repeat(self, error: BaseException) -> bool:
        # Serialization failure, deadlock, and a key that another transaction has just inserted.
        return getattr(error, "sqlstate", None) in ("40001", "40P01", "23505")


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
    import sqlite3

    try:
        cursor.execute("BEGIN IMMEDIATE")
    except sqlite3.Error:
        return False
    return True


@contextmanager
def _synced(cursor: Any) -> Iterator[None]:
    """Let a commit of SQLite wait for the disk."""
    usual = _value(cursor, "PRAGMA synchronous")
    cursor.execute("PRAGMA synchronous=FULL")
    try:
        yield
    finally:
        cursor.execute(f"PRAGMA synchronous={usual}")


@contextmanager
def _patient(cursor: Any, usual: float, limit: float) -> Iterator[None]:
    """Wait at most `limit` seconds for the lock of another connection to SQLite, instead of `usual`."""
    if limit >= usual - NEGLIGIBLE:
        yield
        return
    before = _value(cursor, "PRAGMA busy_timeout")
    cursor.execute(f"PRAGMA busy_timeout={max(1, int(limit * 1_000))}")
    try:
        yield
    finally:
        cursor.execute(f"PRAGMA busy_timeout={before}")


def _value(cursor: Any, statement: str) -> Any:
    return cursor.execute(statement).fetchone()[0]


def _file(cursor: Any) -> str:
    """Return the path of a SQLite database; empty for one in memory."""
    files = {name: path for _, name, path in cursor.execute("PRAGMA database_list")}
    return files["main"] or ""


def _limits(*, of_session: bool) -> str:
    """Return the statement that sets `LIMITS`, for a session or for a transaction."""
    wanted = ", ".join(f"('{name}', '{value}')" for name, value in LIMITS.items())
    return (
        f"SELECT set_config(name, value, {'false' if of_session else 'true'}) FROM (VALUES {wanted}) "
        "AS wanted(name, value) WHERE current_setting(name) IN ('0', '')"
    )


@lru_cache(maxsize=1024)
def _percent(statement: str) -> str:
    return statement.replace("%", "%%").replace("?", "%s")


@lru_cache(maxsize=256)
def _insert(table: str, columns: tuple[str, ...], mark: str) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join([mark] * len(columns))})"
