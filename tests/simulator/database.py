"""The simulated machine's database: SQLite in memory, whose transactions may fail or be cut off."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from django.core.management import call_command
from django.db import OperationalError, connection, connections
from django.db.backends.utils import CursorWrapper

from djqueue.storage.database.plainwrites import PlainWriter

from .loop import PROCESS, Crashed


def prepare() -> None:
    """Make the tables, once."""
    if connection.connection is None:
        # Else each task on a loop would have a connection, and so a database, of its own.
        connections._connections = SimpleNamespace()  # type: ignore[attr-defined]
        call_command("migrate", verbosity=0)


class FaultyDatabase:
    """Decides the fate of each transaction.

    fate: asked at each commit: `done`, `refused` (rolled back, with an error), `unanswered` (done, but
        with an error), `crash_before` or `crash_after` (the process dies on either side of it).
    busy: asked at each statement: whether it fails.
    crash: kills the process at work.
    """

    def __init__(self, fate: Callable[[], str], busy: Callable[[], bool], crash: Callable[[], None]) -> None:
        self._fate = fate
        self._busy = busy
        self._crash = crash
        self.committed: Callable[[], None] = lambda: None
        """Called after each commit that was done."""
        self._commit = connection._commit
        self._plain_execute = PlainWriter._execute

    def install(self) -> None:
        """Stand between SQLite and Django, and between SQLite and the journal."""
        before = self._may_fail

        class Cursor(CursorWrapper):
            def _execute_with_wrappers(self, *arguments: Any, **options: Any) -> Any:
                before()
                return super()._execute_with_wrappers(*arguments, **options)

        def plain_execute(writer: PlainWriter, statement: str, values: Any) -> int:
            before()
            return self._plain_execute(writer, statement, values)

        connection._commit = self._commit_or_fail  # type: ignore[method-assign]
        # Not an execute wrapper, with which the journal would write nothing through the driver.
        connection.make_cursor = lambda cursor: Cursor(cursor, connection)  # type: ignore[method-assign]
        PlainWriter._execute = plain_execute  # type: ignore[method-assign]

    def _may_fail(self) -> None:
        _check_alive()
        if self._busy():
            raise OperationalError("database is locked")

    def _commit_or_fail(self) -> None:
        _check_alive()
        fate = self._fate()
        if fate in ("refused", "crash_before"):
            connection.connection.rollback()
            if fate == "refused":
                raise OperationalError("disk I/O error")
            self._crash()
        self._commit()
        self.committed()
        if fate == "unanswered":
            raise OperationalError("connection lost after the commit")
        if fate == "crash_after":
            self._crash()


def _check_alive() -> None:
    process = PROCESS.get()
    if process is not None and not process.alive:
        if connection.connection is not None and connection.connection.in_transaction:
            connection.connection.rollback()
        raise Crashed
