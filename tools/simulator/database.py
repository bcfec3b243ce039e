"""The simulated machine's database: SQLite in memory, whose transactions may fail or be cut off."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from django.core.management import call_command
from django.db import OperationalError, connection, connections

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

    def install(self) -> None:
        """Stand between Django and SQLite."""
        connection._commit = self._commit_or_fail  # type: ignore[method-assign]
        connection.execute_wrappers.append(self._execute)

    def _execute(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        _check_alive()
        if self._busy():
            raise OperationalError("database is locked")
        return execute(sql, params, many, context)

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
