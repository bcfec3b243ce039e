"""The database of djqueue's tables: the storage's option, otherwise the routers' choice."""

from collections.abc import Sequence
from typing import Any, TypeVar

from django.db import DEFAULT_DB_ALIAS, connections, router
from django.db.models import Model, QuerySet

from djqueue.conf import get_settings

M = TypeVar("M", bound=Model)


def alias_of(model: type[Model]) -> str:
    """Return the alias, in DATABASES, of the database with a table."""
    chosen = get_settings().storage_options.get("database")
    if isinstance(chosen, str) and chosen in connections:
        return chosen
    return router.db_for_read(model) or DEFAULT_DB_ALIAS


def select(model: type[Model], sql: str, params: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """Return the rows of a statement, in the database of a table.

    For reads that check whether a page has changed: building a statement with the ORM takes several times as
    long as running it.
    """
    with connections[alias_of(model)].cursor() as cursor:
        cursor.execute(sql, params)
        return tuple(map(tuple, cursor.fetchall()))


def rows_of(model: type[M]) -> "QuerySet[M]":
    """Return all rows of a table."""
    return model._default_manager.using(alias_of(model))
