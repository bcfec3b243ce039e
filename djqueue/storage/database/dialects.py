"""The three statements of the journal (insert, update and delete of many rows) for each database.

SQLite and PostgreSQL take a whole batch in one statement, by forms that the ORM does not write; any
other database gets the ORM. Table and column names come from the models.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from django.db import IntegrityError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model, Q

from djqueue.core.deadline import remaining

Row = tuple[Any, ...]

SQLITE_UPDATES_FROM = (3, 33)
"""The first SQLite that knows UPDATE … FROM."""


class Dialect(ABC):
    """Statements over rows given as tuples in the order of `fields`."""

    jobs_per_second = 10_000
    """Jobs of one enqueue for which it gets another second."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    @property
    def connection(self) -> BaseDatabaseWrapper:
        """The calling thread's connection."""
        return connections[self.alias]

    def tune(self) -> None:  # noqa: B027 - for those that need it
        """Prepare a connection of this package's own for transactions of many writes."""

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[None]:
        """A transaction that will write, or a part of the one that is open.

        durable: on the disk when it is committed, whatever is usual for the connection.
        """
        with transaction.atomic(using=self.alias):
            yield

    def take_turns(self, queue: str, key: str) -> None:  # noqa: B027 - for those that need it
        """Wait until no other transaction that called this for a unique key is open."""

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
        """Add rows; where `key`, if one is given, is taken they overwrite what is there.

        constants: fields that are the same for all rows.
        """

    def insert_new(
        self,
        model: type[Model],
        fields: Sequence[str],
        rows: Sequence[Row],
        *,
        constants: Mapping[str, Any] | None = None,
        key: Sequence[str],
    ) -> list[Row]:
        """Add those rows, in `fields` of which `key` comes first, whose key is free; returns their keys."""
        written = []
        for row in rows:
            try:
                with transaction.atomic(using=self.alias):
                    self.insert(model, fields, [row], constants=constants)
            except IntegrityError:
                continue
            written.append(row[: len(key)])
        return written

    @abstractmethod
    def update(
        self, model: type[Model], key: Sequence[str], fields: Sequence[str], rows: Sequence[Row]
    ) -> None:
        """Change the rows with these keys; each row holds its key, then the values of `fields`."""

    @abstractmethod
    def delete(self, model: type[Model], key: Sequence[str], rows: Sequence[Row]) -> int:
        """Take away the rows with these keys; returns how many there were."""

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
    """What SQLite needs, whatever the statements."""

    PRAGMAS = ("synchronous=NORMAL", "temp_store=MEMORY", "cache_size=-64000", "mmap_size=268435456")
    """Of a connection, and lost with it. See docs/decisions.md for what was measured."""

    def tune(self) -> None:
        """See `Dialect.tune`."""
        if self.connection.connection is None:
            with self.connection.cursor() as cursor:
                for pragma in self.PRAGMAS:
                    cursor.execute(f"PRAGMA {pragma}")

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[None]:
        """See `Dialect.transaction`. One that reads first and writes then would fail, not wait, if another
        wrote in between: so it takes the lock when it begins.
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
        """Wait for another process's lock no longer than the current call may take, if it has a deadline."""
        left = remaining(math.inf)
        if left == math.inf:
            yield
            return
        # Not by Django's cursor: it refuses statements in a transaction that has failed.
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

    def insert_new(
        self,
        model: type[Model],
        fields: Sequence[str],
        rows: Sequence[Row],
        *,
        constants: Mapping[str, Any] | None = None,
        key: Sequence[str],
    ) -> list[Row]:
        """See `Dialect.insert_new`. Nobody else has written since the transaction's first look."""
        self.insert(model, fields, rows, constants=constants)
        return [row[: len(key)] for row in rows]

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
    """Rows as VALUES: one step of the statement for a batch, during which other threads run."""

    BATCH = 100
    """Rows of one statement, which the driver then has prepared: more were slower."""

    def insert(
        self,
        model: type[Model],
        fields: Sequence[str],
        rows: Sequence[Row],
        *,
        constants: Mapping[str, Any] | None = None,
        key: Sequence[str] = (),
    ) -> None:
        """See `Dialect.insert`."""
        constants = constants or {}
        every = [*fields, *constants]
        fixed = "".join(f",{_literal(value)}" for value in constants.values())
        one = f"({','.join('?' * len(fields))}{fixed})"
        head = f"INSERT INTO {self._table(model)} ({', '.join(self._columns(model, every))}) VALUES "
        self._run(head, one, self._overwriting(model, every, key), rows)

    def update(
        self, model: type[Model], key: Sequence[str], fields: Sequence[str], rows: Sequence[Row]
    ) -> None:
        """See `Dialect.update`."""
        columns = self._columns(model, fields)
        table = self._table(model)
        first = len(key) + 1
        changes = ", ".join(f"{name} = v.column{at}" for at, name in enumerate(columns, first))
        one = f"({','.join('?' * (len(key) + len(fields)))})"
        head = f"UPDATE {table} SET {changes} FROM (VALUES "
        tail = f") AS v WHERE {self._match(model, key)}"
        self._run(head, one, tail, rows)

    def delete(self, model: type[Model], key: Sequence[str], rows: Sequence[Row]) -> int:
        """See `Dialect.delete`."""
        table = self._table(model)
        one = f"({','.join('?' * len(key))})"
        columns = ", ".join(self._columns(model, key))
        return self._run(f"DELETE FROM {table} WHERE ({columns}) IN (VALUES ", one, ")", rows)

    def _match(self, model: type[Model], key: Sequence[str]) -> str:
        table = self._table(model)
        names = enumerate(self._columns(model, key), 1)
        return " AND ".join(f"{table}.{column} = v.column{at}" for at, column in names)

    def _run(self, head: str, one: str, tail: str, rows: Sequence[Row]) -> int:
        written = 0
        # The driver's own cursor: Django's would turn every ? of 10,000 into another form first.
        connection = self.connection
        connection.ensure_connection()
        cursor = connection.connection.cursor()
        try:
            for start in range(0, len(rows), self.BATCH):
                batch = rows[start : start + self.BATCH]
                values = [value for row in batch for value in row]
                with connection.wrap_database_errors:
                    cursor.execute(f"{head}{','.join([one] * len(batch))}{tail}", values)
                written += cursor.rowcount
        finally:
            cursor.close()
        return written


class PostgresDialect(Dialect):
    """A batch as arrays, one for each column, which `unnest` makes rows of again."""

    BATCH = 5_000

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[None]:
        """See `Dialect.transaction`."""
        with super().transaction():
            if durable:
                with self.connection.cursor() as cursor:
                    cursor.execute("SET LOCAL synchronous_commit TO on")
            yield

    def take_turns(self, queue: str, key: str) -> None:
        """See `Dialect.take_turns`."""
        with self.connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, hashtext(%s)))", [key, queue])

    def insert(
        self,
        model: type[Model],
        fields: Sequence[str],
        rows: Sequence[Row],
        *,
        constants: Mapping[str, Any] | None = None,
        key: Sequence[str] = (),
    ) -> None:
        """See `Dialect.insert`."""
        every = [*fields, *(constants or ())]
        self._run(self._insert(model, fields, constants) + self._overwriting(model, every, key), rows)

    def insert_new(
        self,
        model: type[Model],
        fields: Sequence[str],
        rows: Sequence[Row],
        *,
        constants: Mapping[str, Any] | None = None,
        key: Sequence[str],
    ) -> list[Row]:
        """See `Dialect.insert_new`."""
        named = ", ".join(self._columns(model, key))
        statement = (
            f"{self._insert(model, fields, constants)} ON CONFLICT ({named}) DO NOTHING RETURNING {named}"
        )
        written: list[Row] = []
        self._run(statement, rows, written)
        return written

    def update(
        self, model: type[Model], key: Sequence[str], fields: Sequence[str], rows: Sequence[Row]
    ) -> None:
        """See `Dialect.update`."""
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
        """See `Dialect.delete`."""
        columns = ", ".join(self._columns(model, key))
        arrays = self._arrays(model, key)
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

    def _run(self, statement: str, rows: Sequence[Row], returned: list[Row] | None = None) -> int:
        changed = 0
        with self.connection.cursor() as cursor:
            for start in range(0, len(rows), self.BATCH):
                columns = zip(*rows[start : start + self.BATCH], strict=True)
                cursor.execute(statement, [list(column) for column in columns])
                changed += cursor.rowcount
                if returned is not None:
                    returned += cursor.fetchall()
        return changed


class OrmDialect(Dialect):
    """Any database that Django supports, several times slower."""

    jobs_per_second = 1_000

    def insert(
        self,
        model: type[Model],
        fields: Sequence[str],
        rows: Sequence[Row],
        *,
        constants: Mapping[str, Any] | None = None,
        key: Sequence[str] = (),
    ) -> None:
        """See `Dialect.insert`."""
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
        """See `Dialect.update`."""
        manager = model._default_manager.using(self.alias)
        split = len(key)
        for row in rows:
            mine = dict(zip(key, row[:split], strict=True))
            manager.filter(**mine).update(**dict(zip(fields, row[split:], strict=True)))

    def delete(self, model: type[Model], key: Sequence[str], rows: Sequence[Row]) -> int:
        """See `Dialect.delete`."""
        manager = model._default_manager.using(self.alias)
        deleted = 0
        for start in range(0, len(rows), 100):
            query = Q()
            for row in rows[start : start + 100]:
                query |= Q(**dict(zip(key, row, strict=True)))
            deleted += manager.filter(query).delete()[0]
        return deleted


class SqliteOrmDialect(OnSqlite, OrmDialect):
    """SQLite, by the ORM alone."""


def dialect_for(alias: str, *, orm: bool = False) -> Dialect:
    """The dialect of a configured database; `orm`: without statements of its own."""
    connection: Any = connections[alias]
    if connection.vendor == "sqlite":
        too_old = connection.Database.sqlite_version_info < SQLITE_UPDATES_FROM
        return SqliteOrmDialect(alias) if orm or too_old else SqliteDialect(alias)
    if connection.vendor == "postgresql" and not orm:
        return PostgresDialect(alias)
    return OrmDialect(alias)


def _literal(value: Any) -> str:
    """A constant of this package's own, in SQL."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str) and (value == "" or (value.isascii() and value.isidentifier())):
        return f"'{value}'"
    raise ValueError(f"no literal for {value!r}")
