"""The tables of djqueue and of djqueue.contrib.spark, for tests that empty them themselves."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created


@contextmanager
def every_app() -> Iterator[None]:
    """Undo `available_apps=[]`, which saves a flush of all tables, but leaves no app installed."""
    apps.unset_available_apps()
    try:
        yield
    finally:
        apps.set_available_apps([])


def empty_tables(alias: str = DEFAULT_DB_ALIAS) -> None:
    """Delete all rows: TRUNCATE, which a flush uses, is slow."""
    with transaction.atomic(using=alias):
        for label in ("djqueue", "djqueue_spark"):
            for model in apps.get_app_config(label).get_models():
                if model._meta.managed:
                    model._default_manager.using(alias).all().delete()


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
