"""Rows of djqueue's tables: the database that has them, and keyset pages, newest first.

The last page of a list is as fast as the first.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from django.db import connections
from django.db.models import Model, QuerySet

from djqueue.client import get_storage
from djqueue.operations import sweeps

M = TypeVar("M", bound=Model)
PAGE_LENGTH = 50
VISIBLE_PART = 500
"""Rows per query if some of them may be hidden from the user."""
MAX_VISIBLE_READ = 20_000
"""Maximum rows searched for rows that the user can see."""
Sees = Callable[[Any], bool]
"""Returns whether the user can see a row."""


class KeysetPage(NamedTuple):
    """A page of rows."""

    rows: list[Any]
    older: str
    """Position of the next page; empty on the last page."""
    newer: str
    is_first: bool


def alias_of(model: type[Model]) -> str:
    """Return the alias, in DATABASES, of the database with a table."""
    return sweeps.alias_of(get_storage(), model)


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


def page(rows: "QuerySet[Any]", at: str, length: int = PAGE_LENGTH, sees: Sees | None = None) -> KeysetPage:
    """Return the page at a position: `<pk` for rows before a row, `>pk` for rows after one, empty for the
    newest.

    Hidden rows count neither for the length of a page nor for whether there is another page, and pages start
    at visible rows.

    Args:
        sees: Which rows are visible; None for all.
    """
    sign, key = position(at)
    if sign == ">" and key is not None:
        page_rows = _first(rows.filter(pk__gt=key), "pk", length + 1, sees)
        more, shown = len(page_rows) > length, page_rows[:length][::-1]
        older = f"<{shown[-1].pk}" if shown else ""
        return KeysetPage(shown, older, f">{shown[0].pk}" if more else "", not more)
    before = rows.filter(pk__lt=key) if sign == "<" and key is not None else rows
    page_rows = _first(before, "-pk", length + 1, sees)
    shown = page_rows[:length]
    is_first = key is None
    newer = f">{shown[0].pk}" if shown and not is_first else ""
    return KeysetPage(shown, f"<{shown[-1].pk}" if len(page_rows) > length else "", newer, is_first)


def position(at: str) -> tuple[str, int | None]:
    """Return the sign and the key of a position, such as `<17`; None for a key that is not valid."""
    number = at[1:]
    return at[:1], int(number) if number.isdecimal() and len(number) < 19 else None


def _first(rows: "QuerySet[Any]", order: str, count: int, sees: Sees | None) -> list[Any]:
    """Return the first visible rows, read in parts."""
    rows = rows.order_by(order)
    if sees is None:
        return list(rows[:count])
    visible: list[Any] = []
    part, read = list(rows[:VISIBLE_PART]), 0
    while part:
        for row in part:
            if sees(row):
                visible.append(row)
                if len(visible) == count:
                    return visible
        read += len(part)
        if len(part) < VISIBLE_PART or read >= MAX_VISIBLE_READ:
            break
        last = part[-1].pk
        part = list((rows.filter(pk__lt=last) if order == "-pk" else rows.filter(pk__gt=last))[:VISIBLE_PART])
    return visible
