"""What a user reads when the database cannot be used."""

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import Error, InterfaceError, InternalError, OperationalError, ProgrammingError
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
        raise unavailable(alias, error) from error


def unavailable(alias: str, error: Error, consequence: str = "") -> StorageUnavailableError:
    """The error for a user. consequence: what that means for what was asked."""
    return StorageUnavailableError(
        f"the database {alias!r} cannot be used{consequence}: {error}. Is it running, and are its tables "
        "there (manage.py migrate)?"
    )
