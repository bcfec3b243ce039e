"""Which rows of a list a user may see: those of the queues that the dashboard shows to the user."""

from typing import Any

from django.db.models import Model, QuerySet
from django.http import HttpRequest

from djqueue.dashboard import rights
from djqueue.dashboard.tables import alias_of

MAX_QUEUES = 5_000
"""Queues of a table that `QUEUE_FILTER` is called for; the rows of any further queue are hidden."""


def used_queues(request: HttpRequest, model: type[Model]) -> list[str]:
    """Return the queues in a table that the user may see, in order; read once per request."""
    from djqueue.storage.tables import names

    known: dict[type[Model], list[str]] = request.__dict__.setdefault("_djqueue_used", {})
    if model not in known:
        found = names.used_queues(alias_of(model), model, MAX_QUEUES)
        known[model] = [name for name in found if rights.sees(request, name)]
    return known[model]


def by_queue(request: HttpRequest, rows: QuerySet[Any]) -> QuerySet[Any]:
    """Return the rows whose column `queue` names a queue that the user may see."""
    if not rights.hides_queues():
        return rows
    return rows.filter(queue__in=used_queues(request, rows.model))


def schedules(request: HttpRequest, rows: QuerySet[Any]) -> QuerySet[Any]:
    """Return the schedules that enqueue to queues that the user may see."""
    from djqueue.dashboard.views.schedules import sees_schedule

    if not rights.hides_queues():
        return rows
    found = rows.order_by("name")
    return rows.filter(pk__in=[row.pk for row in found if sees_schedule(request, row)])
