"""Write claims and ends on SQLite through the driver: Django's transaction and cursors take longer than the
statements of a small buffer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import Error

from ..tables.dialects import SqliteDialect

Execute = Callable[[str, Sequence[Any]], int]
"""Runs a statement with `%s` placeholders and returns the number of changed rows."""


class PlainWriter(SqliteDialect):
    """The journal's statements, on the connection of its thread.

    Args:
        alias: The database.
        fence: Runs first in each transaction; raises LeaseLost if this process is no longer the scheduler.
    """

    def __init__(self, alias: str, fence: Callable[[Execute], None]) -> None:
        super().__init__(alias)
        self._fence = fence
        self._wrapper: Any = None
        self._texts: dict[str, str] = {}

    def attach(self) -> bool:
        """Use the calling thread's connection; return False if Django must run the statements.

        This is the case in a transaction of the caller, if the connection does not commit by itself, and if
        a project has installed `execute_wrapper` functions on it.
        """
        wrapper: Any = super().connection
        wrapper.ensure_connection()
        if wrapper.in_atomic_block or wrapper.execute_wrappers or not wrapper.autocommit:
            return False
        self._wrapper = wrapper
        return True

    @property
    def connection(self) -> Any:
        """Return the connection, without looking it up again."""
        return self._wrapper

    def connected(self) -> Any:
        """Return the connection, which `attach` has opened."""
        return self._wrapper

    @contextmanager
    def fenced(self) -> Iterator[None]:
        """Open a transaction that holds the write lock and the scheduler's lease."""
        with self._patient_until_deadline():
            self._execute("BEGIN IMMEDIATE", ())
            try:
                self._fence(self._execute)
                yield
                self._wrapper._commit()
            except BaseException:
                self._roll_back()
                raise

    def _roll_back(self) -> None:
        """End a failed transaction. SQLite may have done so; a connection that cannot is closed."""
        wrapper = self._wrapper
        driver = wrapper.connection
        try:
            with wrapper.wrap_database_errors:
                if driver is not None and driver.in_transaction:
                    driver.execute("ROLLBACK")
        except Error:
            wrapper.close()

    def _execute(self, statement: str, values: Sequence[Any]) -> int:
        text = self._texts.get(statement)
        if text is None:
            text = self._texts[statement] = statement.replace("%s", "?")
        with self._wrapper.wrap_database_errors:
            changed: int = self._wrapper.connection.execute(text, values).rowcount
        return changed
