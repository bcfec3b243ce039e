"""Cron jobs: rows that enqueue, each slot of a schedule at most once."""

import logging
from typing import NamedTuple

from django.db.models import F, Q, QuerySet

from djqueue import models
from djqueue.codecs import encode
from djqueue.core.errors import DjqueueError
from djqueue.core.job import Batch
from djqueue.core.options import DEFAULT_OPTIONS, MSGPACK, EnqueueOptions
from djqueue.schedule import next_run

from .rows import raw_values

logger = logging.getLogger("djqueue.cron")


class Slot(NamedTuple):
    """One time at which one schedule is due."""

    number: int
    """The row's."""
    name: str
    queue: str
    job_name: str
    schedule: str
    timezone: str
    at: int | None
    """UTC milliseconds; None: the schedule is new."""
    following: int | None = None
    """The slot after it; None: there is none."""


FIELDS = ("id", "name", "queue", "job_name", "schedule", "timezone", "next_run_at")


def due_slots(alias: str, now: int) -> list[Slot]:
    """The schedules whose time has come."""
    due = _enabled(alias).filter(Q(next_run_at__isnull=True) | Q(next_run_at__lte=now))
    slots = []
    for slot in [Slot(*row) for row in raw_values(due.order_by("id"), FIELDS)]:
        try:
            slots.append(slot._replace(following=next_run(slot.schedule, slot.timezone, now)))
        except DjqueueError as error:
            _switch_off(alias, slot, error)
    return slots


def batch(alias: str, slot: Slot, defaults: EnqueueOptions) -> Batch | None:
    """The job of a slot; None if there is none to enqueue.

    It has the slot in its id, so that a slot is enqueued once, whoever fires it and whenever one dies
    in between. Slots that were missed while no scheduler ran are made up for by one.
    """
    cron = models.CronJob.objects.using(alias).filter(id=slot.number).first()
    if cron is None or slot.at is None:
        return None
    try:
        payload = encode({"args": cron.args, "kwargs": cron.kwargs}, MSGPACK)
    except DjqueueError as error:
        _switch_off(alias, slot, error)
        return None
    return Batch(
        slot.queue or defaults.queue or "default",
        slot.job_name,
        defaults.job if defaults.job.content_type == MSGPACK else DEFAULT_OPTIONS,
        [payload],
        [f"cron:{slot.name}:{slot.at}"],
    )


def advance(alias: str, slot: Slot) -> None:
    """Set a schedule's next time, once the job of its present one is safe."""
    fired = slot.at is not None
    # Whoever has changed the schedule since it was read has set its next time as well.
    _enabled(alias).filter(id=slot.number, next_run_at=slot.at).update(  # type: ignore[misc]
        next_run_at=slot.following,
        enabled=slot.following is not None,
        last_run_at=slot.at if fired else F("last_run_at"),
        executions=F("executions") + int(fired),
    )


def _switch_off(alias: str, slot: Slot, why: DjqueueError) -> None:
    logger.error("The cron job %s is switched off: %s", slot.name, why)
    _enabled(alias).filter(id=slot.number).update(enabled=False)


def _enabled(alias: str) -> "QuerySet[models.CronJob]":
    return models.CronJob.objects.using(alias).filter(enabled=True)
