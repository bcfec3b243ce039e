"""Which rows a user may see in the lists of the admin: those of the queues that the dashboard shows them."""

from typing import Any

from django.db.models import Model, QuerySet
from django.http import HttpRequest

from djqueue.dashboard import limits, queries, rights
from djqueue.dashboard import schedules as dashboard_schedules
from djqueue.dashboard.tables import alias_of, rows_of
from djqueue.models import CronJob, LimiterState, WorkerState
from djqueue.storage.database import names

QUEUES = 5_000
"""Queues of a table that `QUEUE_FILTER` is asked about; the rows of any further queue are hidden."""


def used_queues(request: HttpRequest, model: type[Model]) -> list[str]:
    """Return the queues that a table names and the user may see, in order; read once for a request."""
    known: dict[type[Model], list[str]] = request.__dict__.setdefault("_djqueue_used", {})
    if model not in known:
        found = names.used_queues(alias_of(model), model, QUEUES)
        known[model] = [name for name in found if rights.sees(request, name)]
    return known[model]


def by_queue(request: HttpRequest, rows: QuerySet[Any]) -> QuerySet[Any]:
    """Return the rows whose column `queue` names a queue that the user may see."""
    if not rights.hides_queues():
        return rows
    return rows.filter(queue__in=used_queues(request, rows.model))


def by_distinct_queue(request: HttpRequest, rows: QuerySet[Any]) -> QuerySet[Any]:
    """Do the same for a short table that has no index of its queues."""
    if not rights.hides_queues():
        return rows
    found = rows_of(rows.model).order_by().values_list("queue", flat=True).distinct()[:QUEUES]
    return rows.filter(queue__in=[name for name in found if rights.sees(request, name)])


def queue_states(request: HttpRequest, rows: QuerySet[Any]) -> QuerySet[Any]:
    """Return the queues that the user may see."""
    if not rights.hides_queues():
        return rows
    found = rows_of(rows.model).values_list("name", flat=True)[:QUEUES]
    return rows.filter(name__in=[name for name in found if rights.sees(request, name)])


def limiters(request: HttpRequest, rows: QuerySet[Any]) -> QuerySet[Any]:
    """Return the limiters all of whose queues the user may see; one that no queue shares is hidden."""
    if not rights.hides_queues():
        return rows
    found = rows_of(LimiterState).values_list("name", flat=True)
    shown = [name for name in found if limits.queues_of(name) and limits.may_set(request, name)]
    return rows.filter(name__in=shown)


def workers(request: HttpRequest, rows: QuerySet[Any]) -> QuerySet[Any]:
    """Return the workers all of whose queues the user may see; the dashboard shows others in part."""
    if not rights.hides_queues():
        return rows
    sees_all = queries.sees_all(request)
    found = rows_of(WorkerState).only("queues")
    shown = [
        row.pk for row in found if (sees_all if row.queues is None else rights.sees_each(request, row.queues))
    ]
    return rows.filter(pk__in=shown)


def schedules(request: HttpRequest, rows: QuerySet[Any]) -> QuerySet[Any]:
    """Return the schedules whose jobs go to queues that the user may see."""
    if not rights.hides_queues():
        return rows
    found = rows_of(CronJob).order_by("name")
    return rows.filter(pk__in=[row.pk for row in found if dashboard_schedules.sees(request, row)])


def everything(_request: HttpRequest, rows: QuerySet[Any]) -> QuerySet[Any]:
    """Return all rows, for a table that is not about queues."""
    return rows
