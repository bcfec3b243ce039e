"""Suggest a remedy for a database error, based on the driver's message."""

import pkgutil
import re
import sys

from django.db import Error

from djqueue import migrations

REFUSED = re.compile(
    r"password authentication failed|no password supplied|role \S+ does not exist|no pg_hba\.conf entry"
    r"|authentication failed|access denied|permission denied",
    re.IGNORECASE,
)
NO_DATABASE = re.compile(r"database \S+ does not exist|unknown database", re.IGNORECASE)
NO_TABLE = re.compile(
    r"no such (table|column)|has no column named|(relation|column) \S+ (of relation \S+ )?does not exist"
    r"|table \S+ doesn't exist|unknown column",
    re.IGNORECASE,
)
LOCKED = re.compile(r"database (table )?is locked", re.IGNORECASE)
MIGRATING = "django.db.migrations.executor"


def remedy(alias: str, error: Error) -> str:
    """Return a sentence that says what to do."""
    text = str(error)
    if NO_TABLE.search(text):
        return _migrate(alias)
    if REFUSED.search(text):
        return f"Check USER and PASSWORD of DATABASES[{alias!r}], and what that user may do."
    if NO_DATABASE.search(text):
        return f"Check NAME of DATABASES[{alias!r}], or create the database."
    if LOCKED.search(text):
        return (
            "Another connection holds SQLite's write lock: keep transactions short, or raise 'timeout' in "
            f"OPTIONS of DATABASES[{alias!r}]."
        )
    return "Is it running?"


def _migrate(alias: str) -> str:
    command = f"manage.py migrate --database {alias}"
    if not _is_migrating():
        return f"Tables of djqueue are missing or out of date: run {command}."
    return (
        "A migration uses djqueue before its tables are there: add "
        f"('djqueue', {latest_migration()!r}) to the dependencies of that migration, then run {command}."
    )


def _is_migrating() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == MIGRATING:
            return True
    return False


def latest_migration() -> str:
    """Return the name of djqueue's last migration, after which all tables exist."""
    return max(found.name for found in pkgutil.iter_modules(migrations.__path__))
