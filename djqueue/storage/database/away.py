"""What a user reads when the database cannot be used."""

from collections.abc import Iterator
from contextlib import contextmanager

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

AWAY = (OperationalError, InterfaceError, InternalError, ProgrammingError)
"""The server cannot be reached, or the tables are not there."""


@contextmanager
def named(alias: str) -> Iterator[None]:
    """Make the database's errors ones that name it and the remedy."""
    try:
        yield
    except TransactionManagementError:
        # The caller's own: his transaction is broken.
        raise
    except AWAY as error:
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
    return StorageUnavailableError(
        f"the database {alias!r} cannot be used{consequence}: {error}. Is it running, and are its tables "
        "there (manage.py migrate)?"
    )
