"""Insert, update and delete many rows, for the journal, in the fastest way of each database.

On SQLite and PostgreSQL, a batch is one statement in a form that the ORM cannot generate. Other databases use
the ORM. Table and column names come from the models.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model, Q

from djqueue.core.deadlines import remaining

Row = tuple[Any, ...]

SQLITE_UPDATES_FROM = (3, 33)
"""The first version of SQLite with UPDATE … FROM."""


class Dialect(ABC):
    """Statements over rows given as tuples in the order of `fields`."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    @property
    def connection(self) -> BaseDatabaseWrapper:
        """Return the calling thread's connection."""
        return connections[self.alias]

    def tune(self) -> None:  # noqa: B027 - optional
        """Prepare a connection that only djqueue uses for transactions of many writes."""

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[None]:
        """Open a transaction that will write, or a savepoint in the open one.

        Args:
            durable: Whether the commit must be on disk, regardless of the connection's settings.
        """
        with transaction.atomic(using=self.alias):
            yield

    @abstractmethod
    def insert(
        self,
        model: type[Model],
        fields: Sequence[str],
        rows: Sequence[Row],
        *,
        constants: Mapping[str, Any] | None = None,
        key: Sequence[str] = (),
    ) -> None:
        """Insert rows, and overwrite existing rows with the same `key`, if given.

        Args:
            model: The table.
            fields: The names of a row's values.
            rows: The rows.
            key: Fields that identify a row.
            constants: Values of further fields, the same for all rows.
        """

    @abstractmethod
    def update(
        self, model: type[Model], key: Sequence[str], fields: Sequence[str], rows: Sequence[Row]
    ) -> None:
        """Update rows by key. Each row has its key, then the values of `fields`."""

    @abstractmethod
    def delete(self, model: type[Model], key: Sequence[str], rows: Sequence[Row]) -> int:
        """Delete rows by key, and return their number."""

    def _table(self, model: type[Model]) -> str:
        return self.connection.ops.quote_name(model._meta.db_table)

    def _columns(self, model: type[Model], fields: Sequence[str]) -> list[str]:
        quote = self.connection.ops.quote_name
        return [quote(model._meta.get_field(name).column) for name in fields]  # type: ignore[union-attr, arg-type]

    def _overwriting(self, model: type[Model], fields: Sequence[str], key: Sequence[str]) -> str:
        if not key:
            return ""
        target = ", ".join(self._columns(model, key))
        columns = self._columns(model, [name for name in fields if name not in key])
        changes = ", ".join(f"{column} = excluded.{column}" for column in columns)
        return f" ON CONFLICT ({target}) DO UPDATE SET {changes}"


class OnSqlite(Dialect):
    """Transactions and settings of SQLite, for any kind of statements."""

    PRAGMAS = ("synchronous=NORMAL", "temp_store=MEMORY", "cache_size=-64000", "mmap_size=268435456")
    """Settings of each connection. docs/decisions.md has the measurements."""

    def tune(self) -> None:
        """Prepare the connection for transactions of many writes."""
        if self.connection.connection is None:
            with self.connection.cursor() as cursor:
                for pragma in self.PRAGMAS:
                    cursor.execute(f"PRAGMA {pragma}")

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[None]:
        """Open a transaction that takes the write lock at once.

        A transaction that reads and then writes would fail instead of waiting if another wrote in between.
        """
        connection: Any = self.connection
        if connection.in_atomic_block:
            with self._patient_until_deadline(), super().transaction():
                yield
            return
        connection.ensure_connection()
        usual = connection.transaction_mode
        connection.transaction_mode = "IMMEDIATE"
        try:
            with (
                self._patient_until_deadline(),
                self._synced() if durable else nullcontext(),
                super().transaction(),
            ):
                yield
        finally:
            connection.transaction_mode = usual

    @contextmanager
    def _patient_until_deadline(self) -> Iterator[None]:
        """Limit the wait for another process's lock to the current call's deadline, if it has one."""
        left = remaining(math.inf)
        if left == math.inf:
            yield
            return
        # Bypass Django's cursor, which rejects statements in a failed transaction.
        driver = self.connection.connection
        (usual,) = driver.execute("PRAGMA busy_timeout").fetchone()
        limit = max(1, int(left * 1_000))
        if usual <= limit:
            yield
            return
        driver.execute(f"PRAGMA busy_timeout={limit}")
        try:
            yield
        finally:
            if self.connection.connection is driver and not self.connection.closed_in_transaction:
                driver.execute(f"PRAGMA busy_timeout={usual}")

    @contextmanager
    def _synced(self) -> Iterator[None]:
        with self.connection.cursor() as cursor:
            cursor.execute("PRAGMA synchronous")
            usual = cursor.fetchone()[0]
            cursor.execute("PRAGMA synchronous=FULL")
        try:
            yield
        finally:
            with self.connection.cursor() as cursor:
                cursor.execute(f"PRAGMA synchronous={usual}")


class SqliteDialect(OnSqlite):
    """SQLite with batches as VALUES: one call per batch, during which other threads run."""

    BATCHES = (100, 50, 20, 10, 5, 2, 1)
    """Numbers of rows in one statement; more were slower. Preparing a statement costs as much as running it,
    and the driver keeps 128, so that few different ones are used.
    """

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._statements: dict[tuple[Any, ...], _Statement] = {}

    def insert(
        self,
        model: type[Model],
        fields: Sequence[str],
        rows: Sequence[Row],
        *,
        constants: Mapping[str, Any] | None = None,
        key: Sequence[str] = (),
    ) -> None:
        """Insert or overwrite rows."""
        fixed = () if constants is None else tuple(constants.items())
        named = ("insert", model, tuple(fields), fixed, tuple(key))
        statement = self._statements.get(named)
        if statement is None:
            statement = self._statements[named] = self._insert(model, fields, dict(fixed), key)
        self._run(statement, rows)

    def _insert(
        self, model: type[Model], fields: Sequence[str], constants: Mapping[str, Any], key: Sequence[str]
    ) -> "_Statement":
        every = [*fields, *constants]
        one = f"({','.join(['?'] * len(fields) + [_literal(value) for value in constants.values()])})"
        head = f"INSERT INTO {self._table(model)} ({', '.join(self._columns(model, every))}) VALUES "
        return _Statement(head, one, self._overwriting(model, every, key))

    def update(
        self, model: type[Model], key: Sequence[str], fields: Sequence[str], rows: Sequence[Row]
    ) -> None:
        """Update rows by key."""
        named = ("update", model, tuple(key), tuple(fields))
        statement = self._statements.get(named)
        if statement is None:
            statement = self._statements[named] = self._update(model, key, fields)
        self._run(statement, rows)

    def _update(self, model: type[Model], key: Sequence[str], fields: Sequence[str]) -> "_Statement":
        columns = self._columns(model, fields)
        table = self._table(model)
        first = len(key) + 1
        changes = ", ".join(f"{name} = v.column{at}" for at, name in enumerate(columns, first))
        one = f"({','.join('?' * (len(key) + len(fields)))})"
        head = f"UPDATE {table} SET {changes} FROM (VALUES "
        return _Statement(head, one, f") AS v WHERE {self._match(model, key)}")

    def delete(self, model: type[Model], key: Sequence[str], rows: Sequence[Row]) -> int:
        """Delete rows by key, and return their number."""
        table = self._table(model)
        one = f"({','.join('?' * len(key))})"
        columns = ", ".join(self._columns(model, key))
        return self._run(_Statement(f"DELETE FROM {table} WHERE ({columns}) IN (VALUES ", one, ")"), rows)

    def _match(self, model: type[Model], key: Sequence[str]) -> str:
        table = self._table(model)
        names = enumerate(self._columns(model, key), 1)
        return " AND ".join(f"{table}.{column} = v.column{at}" for at, column in names)

    def _run(self, statement: "_Statement", rows: Sequence[Row]) -> int:
        written = start = 0
        # Use the driver's cursor: Django's would first convert each of 10,000 placeholders.
        connection = self.connection
        connection.ensure_connection()
        cursor = connection.connection.cursor()
        try:
            for size in self.BATCHES:
                while len(rows) - start >= size:
                    values = list(chain.from_iterable(rows[start : start + size]))
                    with connection.wrap_database_errors:
                        cursor.execute(statement.text(size), values)
                    written += cursor.rowcount
                    start += size
        finally:
            cursor.close()
        return written


class _Statement:
    """A statement of SQLite over any number of rows."""

    __slots__ = ("_head", "_one", "_tail", "_texts")

    def __init__(self, head: str, one: str, tail: str) -> None:
        self._head, self._one, self._tail = head, one, tail
        self._texts: dict[int, str] = {}

    def text(self, size: int) -> str:
        """Return the statement for a number of rows, each time the same string, whose hash Python keeps."""
        text = self._texts.get(size)
        if text is None:
            text = self._texts[size] = f"{self._head}{','.join([self._one] * size)}{self._tail}"
        return text


class PostgresDialect(Dialect):
    """PostgreSQL with batches as one array per column, which `unnest` turns into rows."""

    BATCH = 5_000

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[None]:
        """Open a transaction that will write, or a savepoint."""
        with super().transaction():
            if durable:
                with self.connection.cursor() as cursor:
                    cursor.execute("SET LOCAL synchronous_commit TO on")
            yield

    def insert(
        self,
        model: type[Model],
        fields: Sequence[str],
        rows: Sequence[Row],
        *,
        constants: Mapping[str, Any] | None = None,
        key: Sequence[str] = (),
    ) -> None:
        """Insert or overwrite rows."""
        every = [*fields, *(constants or ())]
        self._run(self._insert(model, fields, constants) + self._overwriting(model, every, key), rows)

    def update(
        self, model: type[Model], key: Sequence[str], fields: Sequence[str], rows: Sequence[Row]
    ) -> None:
        """Update rows by key."""
        every = [*key, *fields]
        names = [f"c{at}" for at in range(len(every))]
        columns = self._columns(model, every)
        table = self._table(model)
        split = len(key)
        changes = ", ".join(
            f"{column} = v.{name}" for column, name in zip(columns[split:], names[split:], strict=True)
        )
        match = " AND ".join(
            f"{table}.{column} = v.{name}"
            for column, name in zip(columns[:split], names[:split], strict=True)
        )
        self._run(
            f"UPDATE {table} SET {changes} "
            f"FROM unnest({self._arrays(model, every)}) AS v({', '.join(names)}) WHERE {match}",
            rows,
        )

    def delete(self, model: type[Model], key: Sequence[str], rows: Sequence[Row]) -> int:
        """Delete rows by key, and return their number."""
        columns, arrays = ", ".join(self._columns(model, key)), self._arrays(model, key)
        statement = f"DELETE FROM {self._table(model)} WHERE ({columns}) IN (SELECT * FROM unnest({arrays}))"
        return self._run(statement, rows)

    def _insert(self, model: type[Model], fields: Sequence[str], constants: Mapping[str, Any] | None) -> str:
        constants = constants or {}
        picked = ["*", *(_literal(value) for value in constants.values())]
        return (
            f"INSERT INTO {self._table(model)} ({', '.join(self._columns(model, [*fields, *constants]))}) "
            f"SELECT {', '.join(picked)} FROM unnest({self._arrays(model, fields)})"
        )

    def _arrays(self, model: type[Model], fields: Sequence[str]) -> str:
        types = []
        for name in fields:
            kind = model._meta.get_field(name).db_type(self.connection)
            types.append(f"%s::{kind}[]")
        return ", ".join(types)

    def _run(self, statement: str, rows: Sequence[Row]) -> int:
        changed = 0
        with self.connection.cursor() as cursor:
            for start in range(0, len(rows), self.BATCH):
                columns = zip(*rows[start : start + self.BATCH], strict=True)
                cursor.execute(statement, [list(column) for column in columns])
                changed += cursor.rowcount
        return changed


class OrmDialect(Dialect):
    """Any database that Django supports; several times slower."""

    def insert(
        self,
        model: type[Model],
        fields: Sequence[str],
        rows: Sequence[Row],
        *,
        constants: Mapping[str, Any] | None = None,
        key: Sequence[str] = (),
    ) -> None:
        """Insert or overwrite rows."""
        constants = constants or {}
        objects = [model(**dict(zip(fields, row, strict=True)), **constants) for row in rows]
        manager = model._default_manager.using(self.alias)
        if not key:
            manager.bulk_create(objects)
        else:
            changed = [name for name in (*fields, *constants) if name not in key]
            named = self.connection.features.supports_update_conflicts_with_target
            manager.bulk_create(
                objects,
                update_conflicts=True,
                update_fields=changed,
                unique_fields=list(key) if named else None,
            )

    def update(
        self, model: type[Model], key: Sequence[str], fields: Sequence[str], rows: Sequence[Row]
    ) -> None:
        """Update rows by key."""
        manager = model._default_manager.using(self.alias)
        split = len(key)
        for row in rows:
            mine = dict(zip(key, row[:split], strict=True))
            manager.filter(**mine).update(**dict(zip(fields, row[split:], strict=True)))

    def delete(self, model: type[Model], key: Sequence[str], rows: Sequence[Row]) -> int:
        """Delete rows by key, and return their number."""
        manager = model._default_manager.using(self.alias)
        deleted = 0
        for start in range(0, len(rows), 100):
            query = Q()
            for row in rows[start : start + 100]:
                query |= Q(**dict(zip(key, row, strict=True)))
            deleted += manager.filter(query).delete()[0]
        return deleted


class SqliteOrmDialect(OnSqlite, OrmDialect):
    """SQLite with the ORM only."""


def dialect_for(alias: str) -> Dialect:
    """Return the dialect of a configured database."""
    connection: Any = connections[alias]
    if connection.vendor == "sqlite":
        too_old = connection.Database.sqlite_version_info < SQLITE_UPDATES_FROM
        return SqliteOrmDialect(alias) if too_old else SqliteDialect(alias)
    if connection.vendor == "postgresql":
        return PostgresDialect(alias)
    return OrmDialect(alias)


def _literal(value: Any) -> str:
    """Convert a trusted constant to an SQL literal."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str) and (value == "" or (value.isascii() and value.isidentifier())):
        return f"'{value}'"
    raise ValueError(f"no literal for {value!r}")
