"""The tables of djqueue and of djqueue.contrib.spark, for tests that empty them themselves."""

from collections.abc import Iterator
from contextlib import contextmanager

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, transaction


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
