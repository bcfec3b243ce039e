"""Rows of ended jobs that are kept for others: their expiry is postponed, and restored later.

A postponed expiry is stored in the table itself, later than all others, so that no sweep reads the row
again, and a new scheduler knows that it is pinned.
"""

from collections.abc import Iterable
from typing import Any

from django.db.models import BigIntegerField, F, Q, Value
from django.db.models.functions import Cast, Coalesce, NullIf

from djqueue import models
from djqueue.core.options import JobKey
from djqueue.core.states import State
from djqueue.storage.tables import rows

PUT_OFF = 126_230_400_000_000
"""Milliseconds by which an expiry is postponed: four thousand years."""
ENDS = Q(expires_at__lt=PUT_OFF) | Q(expires_at=None)
"""Condition for rows whose expiry is not postponed."""


def put_off(alias: str, keys: Iterable[JobKey]) -> None:
    """Keep jobs and their results after their retention has ended."""
    later = Coalesce(_milliseconds(), Value(0)) + Value(PUT_OFF)
    for found in _rows(alias, keys):
        found.filter(ENDS).update(expires_at=later)


def put_back(alias: str, keys: Iterable[JobKey]) -> None:
    """Apply the retention of jobs again."""
    own = NullIf(_milliseconds() - Value(PUT_OFF), Value(0, output_field=BigIntegerField()))
    for found in _rows(alias, keys):
        found.exclude(ENDS).update(expires_at=own)


def all_put_off(alias: str) -> list[JobKey]:
    """Return the jobs whose record or result has a postponed expiry."""
    late = [
        model._default_manager.using(alias).exclude(ENDS).values_list(*rows.KEY)
        for model in (models.Job, models.JobResult)
    ]
    return list(dict.fromkeys(key for found in late for key in found))


def ended(alias: str, keys: Iterable[JobKey]) -> set[JobKey]:
    """Return the jobs that have completed or were cancelled."""
    states = (State.COMPLETED.value, State.CANCELLED.value)
    found: set[JobKey] = set()
    for queue, ids in _by_queue(keys).items():
        for chunk in rows.chunked(ids):
            mine = models.Job.objects.using(alias).filter(queue=queue, job_id__in=chunk, state__in=states)
            found.update(mine.values_list("queue", "job_id"))
    return found


def own_end(expires_at: int | None) -> int | None:
    """Return the expiry that a row has without the postponement."""
    if expires_at is None or expires_at < PUT_OFF:
        return expires_at
    return expires_at - PUT_OFF or None


def _milliseconds() -> Any:
    return Cast(F("expires_at"), BigIntegerField())


def _rows(alias: str, keys: Iterable[JobKey]) -> Iterable[Any]:
    for queue, ids in _by_queue(keys).items():
        for chunk in rows.chunked(ids):
            mine = {"queue": queue, "job_id__in": chunk}
            yield models.Job.objects.using(alias).filter(finished_at__isnull=False, **mine)
            yield models.JobResult.objects.using(alias).filter(**mine)


def _by_queue(keys: Iterable[JobKey]) -> dict[str, list[str]]:
    ids: dict[str, list[str]] = {}
    for queue, job_id in keys:
        ids.setdefault(queue, []).append(job_id)
    return ids
