"""Django's management commands."""

from django.core.management.base import CommandError
from django.db import Error

from djqueue.core.messages import in_one_line


def unusable_database(error: Error) -> CommandError:
    """Return the error of a command for a database that cannot be used."""
    return CommandError(
        f"the database cannot be used: {in_one_line(error)}. Check that it is running, the setting "
        "DATABASES, and that `manage.py migrate` has been run."
    )
