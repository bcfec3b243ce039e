"""Cron jobs: rows that enqueue, each slot of a schedule at most once."""

import logging

from django.db.models import F, Q

from djqueue import models
from djqueue.codecs import encode
from djqueue.core.errors import DjqueueError
from djqueue.core.job import Batch
from djqueue.core.options import DEFAULT_OPTIONS, MSGPACK, EnqueueOptions
from djqueue.schedule import next_run

from .rows import raw_values

logger = logging.getLogger("djqueue.cron")

FIELDS = ("id", "name", "queue", "job_name", "schedule", "timezone", "next_run_at")


def due_jobs(alias: str, now: int, defaults: EnqueueOptions) -> list[Batch]:
    """Jobs for the schedules whose time has come; their next times are set.

    A slot's job has the slot in its id, so that a slot is enqueued once, whoever fires it and whenever
    one dies in between. Slots that were missed while no scheduler ran are made up for by one.
    """
    enabled = models.CronJob.objects.using(alias).filter(enabled=True)
    batches = []
    for row in list(raw_values(enabled.filter(_due(now)), FIELDS)):
        number, name, queue, job_name, schedule, timezone, slot = row
        try:
            following = next_run(schedule, timezone, now)
        except DjqueueError:
            logger.exception("The cron job %s is switched off: its schedule cannot be read.", name)
            enabled.filter(id=number).update(enabled=False)
            continue
        if slot is not None:
            cron = models.CronJob.objects.using(alias).get(id=number)
            payload = encode({"args": cron.args, "kwargs": cron.kwargs}, MSGPACK)
            batches.append(
                Batch(
                    queue or defaults.queue or "default",
                    job_name,
                    defaults.job if defaults.job.content_type == MSGPACK else DEFAULT_OPTIONS,
                    [payload],
                    [f"cron:{name}:{slot}"],
                )
            )
        enabled.filter(id=number, next_run_at=slot).update(
            next_run_at=following,
            last_run_at=F("last_run_at") if slot is None else slot,
            executions=F("executions") + (slot is not None),
        )
    return batches


def _due(now: int) -> Q:
    return Q(next_run_at__isnull=True) | Q(next_run_at__lte=now)
