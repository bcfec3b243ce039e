"""Records the statements of tests, also those that the database storage runs beside Django's cursors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from django.db import connection
from django.test.utils import CaptureQueriesContext

from djqueue.storage.database.dialects import PostgresSql, SqliteSql

AROUND = ("BEGIN", "COMMIT", "ROLLBACK", "SELECT name, before, set_config", "SET LOCAL")
"""Statements around those of a transaction."""


class RecordingCursor:
    """A driver's cursor that records its statements."""

    def __init__(self, cursor: Any, found: list[str]) -> None:
        self._cursor = cursor
        self._found = found

    def execute(self, statement: str, *parameters: Any, **options: Any) -> Any:
        if not statement.startswith(AROUND):
            self._found.append(statement)
        return self._cursor.execute(statement, *parameters, **options)

    def executemany(self, statement: str, *parameters: Any) -> Any:
        self._found.append(statement)
        return self._cursor.executemany(statement, *parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Return a list to which the end of the block adds its statements on the default connection.

    Those of the database storage are added at once, with placeholders for their parameters, and without
    what begins and ends its transactions.
    """
    found: list[str] = []
    dialect = {"sqlite": SqliteSql, "postgresql": PostgresSql}[connection.vendor]
    cursor = dialect.cursor

    def recording(self: Any, wrapper: Any) -> Any:
        return RecordingCursor(cursor(self, wrapper), found)

    with mock.patch.object(dialect, "cursor", recording), CaptureQueriesContext(connection) as captured:
        yield found
    found += [entry["sql"] for entry in captured.captured_queries]
