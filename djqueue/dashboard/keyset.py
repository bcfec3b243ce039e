"""Pages of a table, newest first, by where the last one ended: as quick at the end as at the beginning."""

from typing import Any, NamedTuple

from django.db.models import QuerySet

from .desk import Desk

LENGTH = 50


class Found(NamedTuple):
    """A page."""

    rows: list[Any]
    older: str
    """Where the next page begins; empty: this is the last."""
    newer: str
    is_first: bool


def page(rows: "QuerySet[Any]", at: str, length: int = LENGTH) -> Found:
    """The rows of a place: `<pk` those before a row, `>pk` those after it, empty the newest."""
    sign, number = at[:1], at[1:]
    key = int(number) if number.isdecimal() and len(number) < 19 else None
    if sign == ">" and key is not None:
        found = list(rows.filter(pk__gt=key).order_by("pk")[: length + 1])
        more, shown = len(found) > length, found[:length][::-1]
        older = f"<{shown[-1].pk}" if shown else ""
        return Found(shown, older, f">{shown[0].pk}" if more else "", not more)
    before = rows.filter(pk__lt=key) if sign == "<" and key is not None else rows
    found = list(before.order_by("-pk")[: length + 1])
    shown = found[:length]
    is_first = key is None
    newer = f">{shown[0].pk}" if shown and not is_first else ""
    return Found(shown, f"<{shown[-1].pk}" if len(found) > length else "", newer, is_first)


def links(desk: Desk, name: str, found: Found, **query: Any) -> dict[str, str]:
    """Addresses of the pages around one."""
    return {
        "newest": desk.url(name, **query),
        "newer": found.newer and desk.url(name, **query, at=found.newer),
        "older": found.older and desk.url(name, **query, at=found.older),
    }
