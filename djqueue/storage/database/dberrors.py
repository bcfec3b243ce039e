"""What a user reads when the database cannot be used."""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import NoReturn

from django.db import (
    Error,
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
    connections,
)
from django.db.transaction import TransactionManagementError

from djqueue.core.errors import StorageUnavailableError
from djqueue.core.shown import in_one_line

from .remedies import remedy

AWAY = (OperationalError, InterfaceError, InternalError, ProgrammingError)
"""The server cannot be reached, or the tables are not there."""


@contextmanager
def named(alias: str) -> Iterator[None]:
    """Make the database's errors ones that name it and the remedy."""
    try:
        yield
    except Error as error:
        raise_named(alias, error)


def raise_named(alias: str, error: Error) -> NoReturn:
    """Raise the error that a user gets for one of the database's."""
    # A broken transaction is the caller's own.
    if not isinstance(error, AWAY) or isinstance(error, TransactionManagementError):
        raise error
    drop_if_broken(alias)
    raise unavailable(alias, error) from error


def drop_if_broken(alias: str) -> None:
    """Have this thread's next use of the database begin with a new connection, if it needs one."""
    connection = connections[alias]
    if connection.in_atomic_block or connection.connection is None:
        return
    if connection.is_usable():
        connection.errors_occurred = False
    else:
        connection.close()


def unavailable(alias: str, error: Error, consequence: str = "") -> StorageUnavailableError:
    """The error for a user. consequence: what that means for what was asked."""
    reason = in_one_line(error)
    end = "" if reason.endswith((".", "?", "!")) else "."
    return StorageUnavailableError(
        f"the database {alias!r} cannot be used{consequence}: {reason}{end} {remedy(alias, error)}"
    )


def is_unreachable(alias: str, error: StorageUnavailableError) -> bool:
    """Return whether no connection to the server could be made, so that another attempt would wait as long.

    A connection that was open may have been ended by a restart of the server, which answers a new one. SQLite
    has no server: its error says that the file is locked, which may be over a moment later.
    """
    cause = error.__cause__
    if connections[alias].vendor == "sqlite" or not isinstance(cause, (OperationalError, InterfaceError)):
        return False
    return any(frame.f_code.co_name == "get_new_connection" for frame, _ in walk_tb(cause.__traceback__))
