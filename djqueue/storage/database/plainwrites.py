"""Write claims and ends on SQLite through the driver: Django's transaction and cursors take longer than the
statements of a small buffer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
        """Use the calling thread's connection; return False in a transaction of its caller."""
        wrapper: Any = super().connection
        if wrapper.in_atomic_block:
            return False
        wrapper.ensure_connection()
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
        driver = self._wrapper.connection
        with self._wrapper.wrap_database_errors:
            driver.execute("BEGIN IMMEDIATE")
        try:
            self._fence(self._execute)
            yield
            self._wrapper._commit()
        except BaseException:
            if driver.in_transaction:
                driver.execute("ROLLBACK")
            raise

    def _execute(self, statement: str, values: Sequence[Any]) -> int:
        text = self._texts.get(statement)
        if text is None:
            text = self._texts[statement] = statement.replace("%s", "?")
        with self._wrapper.wrap_database_errors:
            changed: int = self._wrapper.connection.execute(text, values).rowcount
        return changed
