"""The tables of djqueue and of djqueue.contrib.spark, for tests that empty them themselves."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, connection, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

APPS = ("djqueue", "djqueue_spark")


def empty_tables(alias: str = DEFAULT_DB_ALIAS) -> None:
    """Delete all rows. TRUNCATE, which a flush uses, and a query for each model are slow."""
    connection = connections[alias]
    models = [model for label in APPS for model in apps.get_app_config(label).get_models()]
    tables = [connection.ops.quote_name(model._meta.db_table) for model in models if model._meta.managed]
    statements = [f"DELETE FROM {table}" for table in tables]
    if connection.vendor == "postgresql":
        statements = ["; ".join(statements)]
    with transaction.atomic(using=alias), connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


@contextmanager
def closing_connections_of_test_threads() -> Iterator[None]:
    """Close the connections that a test's own threads have left open; djqueue's threads close theirs."""
    opened: list[BaseDatabaseWrapper] = []

    def note(connection: BaseDatabaseWrapper, **_: Any) -> None:
        thread = threading.current_thread()
        if thread is not threading.main_thread() and not thread.name.startswith("djqueue-"):
            opened.append(connection)

    connection_created.connect(note)
    yield
    connection_created.disconnect(note)
    for found in opened:
        found.inc_thread_sharing()
        found.close()


@contextmanager
def refusing(condition: str) -> Iterator[None]:
    """Let a rule of the project refuse rows of jobs."""
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            for event in ("INSERT", "UPDATE"):
                cursor.execute(
                    f"CREATE TRIGGER refuse_{event} BEFORE {event} ON djqueue_job WHEN {condition} "
                    "BEGIN SELECT RAISE(ABORT, 'the project refused it'); END"
                )
        else:
            rule = condition.replace("NEW.", "")
            cursor.execute(f"ALTER TABLE djqueue_job ADD CONSTRAINT refused CHECK (NOT ({rule})) NOT VALID")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            if connection.vendor == "sqlite":
                cursor.execute("DROP TRIGGER refuse_INSERT")
                cursor.execute("DROP TRIGGER refuse_UPDATE")
            else:
                cursor.execute("ALTER TABLE djqueue_job DROP CONSTRAINT refused")
