"""The three statements of the journal (insert, update and delete of many rows) for each database.

SQLite and PostgreSQL take a whole batch in one statement, by forms that the ORM does not write; any
other database gets the ORM. Table and column names come from the models.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model, Q

Row = tuple[Any, ...]


class Dialect(ABC):
    """Statements over rows given as tuples in the order of `fields`."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    @property
    def connection(self) -> BaseDatabaseWrapper:
        """The calling thread's connection."""
        return connections[self.alias]

    def tune(self, *, durable: bool) -> None:  # noqa: B027 - for those that need it
        """Prepare the connection for a transaction of many writes; a durable one is synced."""

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction that will write, or a part of the one that is open."""
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
        overwrite: bool = False,
    ) -> int:
        """Add rows; where `key` is taken they overwrite what is there, or are left out.

        constants: fields that are the same for all rows. Returns how many rows were written, where the
        database tells.
        """

    @abstractmethod
    def update(
        self, model: type[Model], key: Sequence[str], fields: Sequence[str], rows: Sequence[Row]
    ) -> None:
        """Change the rows with these keys; each row holds its key, then the values of `fields`."""

    @abstractmethod
    def delete(self, model: type[Model], key: Sequence[str], rows: Sequence[Row]) -> None:
        """Take away the rows with these keys."""

    def _table(self, model: type[Model]) -> str:
        return self.connection.ops.quote_name(model._meta.db_table)

    def _columns(self, model: type[Model], fields: Sequence[str]) -> list[str]:
        quote = self.connection.ops.quote_name
        return [quote(model._meta.get_field(name).column) for name in fields]  # type: ignore[union-attr, arg-type]

    def _conflict(
        self, model: type[Model], fields: Sequence[str], key: Sequence[str], overwrite: bool
    ) -> str:
        if not key:
            return ""
        target = ", ".join(self._columns(model, key))
        if not overwrite:
            return f" ON CONFLICT ({target}) DO NOTHING"
        columns = self._columns(model, [name for name in fields if name not in key])
        changes = ", ".join(f"{column} = excluded.{column}" for column in columns)
        return f" ON CONFLICT ({target}) DO UPDATE SET {changes}"


class SqliteDialect(Dialect):
    """Rows as VALUES: one step of the statement for a batch, during which other threads run."""

    PRAGMAS = ("temp_store=MEMORY", "cache_size=-64000", "mmap_size=268435456")
    """Of a connection, and lost with it. See docs/decisions.md for what was measured."""
    BATCH = 100
    """Rows of one statement, which the driver then has prepared: more were slower."""

    def tune(self, *, durable: bool) -> None:
        """See `Dialect.tune`. SQLite takes these only outside a transaction."""
        fresh = self.connection.connection is None
        with self.connection.cursor() as cursor:
            for pragma in self.PRAGMAS if fresh else ():
                cursor.execute(f"PRAGMA {pragma}")
            cursor.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """See `Dialect.transaction`. One that reads first and writes then would fail, not wait, if another
        wrote in between: so it takes the lock when it begins.
        """
        connection: Any = self.connection
        usual = connection.transaction_mode
        connection.transaction_mode = "IMMEDIATE"
        try:
            with super().transaction():
                yield
        finally:
            connection.transaction_mode = usual

    def insert(
        self,
        model: type[Model],
        fields: Sequence[str],
        rows: Sequence[Row],
        *,
        constants: Mapping[str, Any] | None = None,
        key: Sequence[str] = (),
        overwrite: bool = False,
    ) -> int:
        """See `Dialect.insert`."""
        constants = constants or {}
        every = [*fields, *constants]
        fixed = "".join(f",{_literal(value)}" for value in constants.values())
        one = f"({','.join('?' * len(fields))}{fixed})"
        head = f"INSERT INTO {self._table(model)} ({', '.join(self._columns(model, every))}) VALUES "
        tail = self._conflict(model, every, key, overwrite)
        return self._run(head, one, tail, rows)

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

    def delete(self, model: type[Model], key: Sequence[str], rows: Sequence[Row]) -> None:
        """See `Dialect.delete`."""
        table = self._table(model)
        one = f"({','.join('?' * len(key))})"
        columns = ", ".join(self._columns(model, key))
        self._run(f"DELETE FROM {table} WHERE ({columns}) IN (VALUES ", one, ")", rows)

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

    def insert(
        self,
        model: type[Model],
        fields: Sequence[str],
        rows: Sequence[Row],
        *,
        constants: Mapping[str, Any] | None = None,
        key: Sequence[str] = (),
        overwrite: bool = False,
    ) -> int:
        """See `Dialect.insert`."""
        constants = constants or {}
        every = [*fields, *constants]
        picked = ["*", *(_literal(value) for value in constants.values())]
        statement = (
            f"INSERT INTO {self._table(model)} ({', '.join(self._columns(model, every))}) "
            f"SELECT {', '.join(picked)} FROM unnest({self._arrays(model, fields)})"
            f"{self._conflict(model, every, key, overwrite)}"
        )
        return self._run(statement, rows)

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

    def delete(self, model: type[Model], key: Sequence[str], rows: Sequence[Row]) -> None:
        """See `Dialect.delete`."""
        columns = ", ".join(self._columns(model, key))
        arrays = self._arrays(model, key)
        statement = f"DELETE FROM {self._table(model)} WHERE ({columns}) IN (SELECT * FROM unnest({arrays}))"
        self._run(statement, rows)

    def _arrays(self, model: type[Model], fields: Sequence[str]) -> str:
        types = []
        for name in fields:
            kind = model._meta.get_field(name).db_type(self.connection)
            types.append(f"%s::{kind}[]")
        return ", ".join(types)

    def _run(self, statement: str, rows: Sequence[Row]) -> int:
        written = 0
        with self.connection.cursor() as cursor:
            for start in range(0, len(rows), self.BATCH):
                columns = zip(*rows[start : start + self.BATCH], strict=True)
                cursor.execute(statement, [list(column) for column in columns])
                written += cursor.rowcount
        return written


class OrmDialect(Dialect):
    """Any database that Django supports, a little slower."""

    def insert(
        self,
        model: type[Model],
        fields: Sequence[str],
        rows: Sequence[Row],
        *,
        constants: Mapping[str, Any] | None = None,
        key: Sequence[str] = (),
        overwrite: bool = False,
    ) -> int:
        """See `Dialect.insert`."""
        constants = constants or {}
        objects = [model(**dict(zip(fields, row, strict=True)), **constants) for row in rows]
        manager = model._default_manager.using(self.alias)
        if not key:
            manager.bulk_create(objects)
        elif not overwrite:
            manager.bulk_create(objects, ignore_conflicts=True)
        else:
            changed = [name for name in (*fields, *constants) if name not in key]
            named = self.connection.features.supports_update_conflicts_with_target
            manager.bulk_create(
                objects,
                update_conflicts=True,
                update_fields=changed,
                unique_fields=list(key) if named else None,
            )
        return len(objects)

    def update(
        self, model: type[Model], key: Sequence[str], fields: Sequence[str], rows: Sequence[Row]
    ) -> None:
        """See `Dialect.update`."""
        manager = model._default_manager.using(self.alias)
        split = len(key)
        for row in rows:
            mine = dict(zip(key, row[:split], strict=True))
            manager.filter(**mine).update(**dict(zip(fields, row[split:], strict=True)))

    def delete(self, model: type[Model], key: Sequence[str], rows: Sequence[Row]) -> None:
        """See `Dialect.delete`."""
        manager = model._default_manager.using(self.alias)
        for start in range(0, len(rows), 100):
            query = Q()
            for row in rows[start : start + 100]:
                query |= Q(**dict(zip(key, row, strict=True)))
            manager.filter(query).delete()


def dialect_for(alias: str) -> Dialect:
    """The dialect of a configured database."""
    vendor = connections[alias].vendor
    return {"sqlite": SqliteDialect, "postgresql": PostgresDialect}.get(vendor, OrmDialect)(alias)


def _literal(value: Any) -> str:
    """A constant of this package's own, in SQL."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int):
        return str(value)
    if value == "":
        return "''"
    raise ValueError(f"no literal for {value!r}")
