"""Convert database errors to errors that name the database and the remedy."""

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
"""Errors of an unreachable server or missing tables."""


@contextmanager
def named(alias: str) -> Iterator[None]:
    """Convert database errors in the block to errors that name the database and the remedy."""
    try:
        yield
    except Error as error:
        raise_named(alias, error)


def raise_named(alias: str, error: Error) -> NoReturn:
    """Raise the user's error for a database error."""
    # A broken transaction is the caller's responsibility.
    if not isinstance(error, AWAY) or isinstance(error, TransactionManagementError):
        raise error
    drop_if_broken(alias)
    raise unavailable(alias, error) from error


def drop_if_broken(alias: str) -> None:
    """Close this thread's connection if it is broken, so that the next use opens a new one."""
    connection = connections[alias]
    if connection.in_atomic_block or connection.connection is None:
        return
    if connection.is_usable():
        connection.errors_occurred = False
    else:
        connection.close()


def unavailable(alias: str, error: Error, consequence: str = "") -> StorageUnavailableError:
    """Return the error for a user.

    Args:
        alias: The database.
        error: The database error.
        consequence: Text on what it means for the operation.
    """
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
