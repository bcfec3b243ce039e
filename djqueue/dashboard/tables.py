"""Where the tables are: in the database that the storage was given, else where the routers say."""

from collections.abc import Sequence
from typing import Any, TypeVar

from django.db import DEFAULT_DB_ALIAS, connections, router
from django.db.models import Model, QuerySet

from djqueue.conf import get_settings

M = TypeVar("M", bound=Model)


def alias_of(model: type[Model]) -> str:
    """The alias, in DATABASES, of the database with a table."""
    chosen = get_settings().storage_options.get("database")
    if isinstance(chosen, str) and chosen in connections:
        return chosen
    return router.db_for_read(model) or DEFAULT_DB_ALIAS


def select(model: type[Model], sql: str, params: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """Return what a statement selects in the database with a table.

    For the reads of pages that have not changed: building a statement takes Django several times as long as
    the statement itself.
    """
    with connections[alias_of(model)].cursor() as cursor:
        cursor.execute(sql, params)
        return tuple(map(tuple, cursor.fetchall()))


def rows_of(model: type[M]) -> "QuerySet[M]":
    """Return all rows of a table."""
    return model._default_manager.using(alias_of(model))
