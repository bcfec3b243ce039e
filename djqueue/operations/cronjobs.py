"""The rows of schedules: their jobs, their next runs, and their declarations in code."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q

from djqueue.client import envelope, registry
from djqueue.client.declarations import Declared, declared
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import DjqueueError, OptionError, UnknownJobError
from djqueue.core.job import Batch
from djqueue.core.logs import Log
from djqueue.core.options import EnqueueOptions, JobOptions
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.models import CronJob, ScheduleSource
from djqueue.schedules.zones import parse_timezone

logger = Log("djqueue.cron")

MAX_OVERDUE = 500
"""Maximum overdue schedules that are read."""
OVERDUE_AFTER = 90_000
"""Milliseconds after which a missing run is overdue."""
MIN_RETENTION = 60 * 60_000
"""Milliseconds for which the records of such jobs are kept at least."""


def job_id(row: CronJob, slot: int) -> str:
    """Return the id of the job of a slot."""
    return f"cron:{row.name}:{slot}"


def batch_of(row: CronJob, ids: list[str] | None) -> Batch:
    """Jobs of a row, one for each id (None: one job, with an id of its own).

    With the options of `@job` if that is known here, else the settings'. Raises DjqueueError.
    """
    options = options_of(row)
    values = [{"args": row.args, "kwargs": row.kwargs}] * (1 if ids is None else len(ids))
    return envelope.batch(options, row.job_name, values, ids)


def options_of(row: CronJob) -> EnqueueOptions:
    """Return the options of a row's jobs."""
    try:
        options = registry.get(row.job_name).options
    except UnknownJobError:
        options = envelope.resolve({})
    if row.queue:
        options = replace(options, queue=envelope.resolve({"queue": row.queue}).queue)
    return replace(options, job=_kept(options.job), run_at=None)


def _kept(options: JobOptions) -> JobOptions:
    """Write the job before the row moves on, and keep its record long enough to find it again."""
    is_kept = options.kept is None or options.kept >= MIN_RETENTION
    return replace(options, durable=True, retention=options.retention if is_kept else MIN_RETENTION)


def declare(alias: str, now: int) -> None:
    """Bring the rows up to date with this process's code; rows made by hand are left alone.

    A row that was switched off by hand stays off, unless it was over or no longer declared.
    """
    rows = CronJob.objects.using(alias)
    wanted = declared.of(registry.names())
    of_code = Q(source__in=[ScheduleSource.CODE, ScheduleSource.WITHDRAWN])
    known = {row.name: row for row in rows.filter(of_code | Q(name__in=wanted))}
    new = []
    for name, entry in wanted.items():
        row = known.get(name)
        if row is None:
            new.append(CronJob(name=name, **_fields(entry)))
        elif row.source == ScheduleSource.HAND:
            logger.error(
                "Schedule %s: ignored the declaration in code; a schedule created by hand has this name.",
                name,
            )
        else:
            changed = {
                field: value for field, value in _fields(entry).items() if getattr(row, field) != value
            }
            if changed and (row.source == ScheduleSource.WITHDRAWN or _is_over(row, now)):
                changed.update(enabled=True, next_run_at=None, firing_at=None)
            if changed:
                rows.filter(pk=row.pk).update(**changed)
    rows.bulk_create(new, ignore_conflicts=True)
    gone = rows.filter(source=ScheduleSource.CODE).exclude(name__in=wanted)
    for name in gone.values_list("name", flat=True):
        logger.warning("Schedule %s: disabled, because the code no longer declares it.", name)
    gone.update(enabled=False, source=ScheduleSource.WITHDRAWN)


def _is_over(row: CronJob, now: int) -> bool:
    try:
        return not row.enabled and row.next_slot(now) is None
    except DjqueueError:
        return True


def _fields(entry: Declared) -> dict[str, Any]:
    schedule = entry.schedule
    return {
        "job_name": entry.job_name,
        "queue": "",
        "schedule": schedule.cron,
        "every": None if schedule.every is None else _duration(schedule.every),
        "timezone": schedule.timezone,
        "start_at": None if schedule.start_at is None else to_datetime(schedule.start_at),
        "end_at": None if schedule.end_at is None else to_datetime(schedule.end_at),
        "max_executions": schedule.max_executions,
        "jitter": _duration(schedule.jitter),
        "overlap": schedule.overlap,
        "missed": schedule.missed,
        "missed_window": _duration(schedule.missed_window),
        "blackouts": "\n".join(schedule.blackouts),
        "on_blackout": schedule.on_blackout,
        "args": entry.args,
        "kwargs": entry.kwargs,
        "source": ScheduleSource.CODE,
    }


def _duration(milliseconds: int) -> timedelta:
    return timedelta(milliseconds=milliseconds)


def next_runs(row: CronJob) -> Iterator[datetime]:
    """Yield the times of its next jobs, with jitter.

    Only the first may be in the past: it is due, and a worker decides about those that were missed since.

    Raises OptionError.
    """
    schedule, now = row.timing(), SYSTEM_CLOCK.now()
    known = row.next_run_at
    slot = row.next_slot(now) if known is None else to_milliseconds(known)
    left = None if schedule.max_executions is None else schedule.max_executions - row.executions
    while slot is not None and (left is None or left > 0):
        yield to_datetime(schedule.fires_at(slot, row.name))
        slot = schedule.next_slot(max(slot, now))
        left = None if left is None else left - 1


def queue_of(row: CronJob) -> str:
    """Return the queue of a schedule's jobs; empty if only a process with the job's handler knows it."""
    try:
        known = bool(row.queue) or registry.find(row.job_name) is not None
        return (options_of(row).queue or "") if known else ""
    except DjqueueError:
        return row.queue


def overdue(alias: str, now: int) -> list[tuple[CronJob, str]]:
    """Return the schedules whose run is missing, each with its queue, the most overdue first."""
    late = CronJob.objects.using(alias).filter(enabled=True, next_run_at__lt=to_datetime(now - OVERDUE_AFTER))
    rows = late.order_by("next_run_at")[:MAX_OVERDUE]
    return [(row, queue_of(row)) for row in rows if _is_late(row, now)]


def _is_late(row: CronJob, now: int) -> bool:
    """Return whether a run is overdue, including its jitter."""
    try:
        assert row.next_run_at is not None
        return row.timing().fires_at(to_milliseconds(row.next_run_at), row.name) < now - OVERDUE_AFTER
    except DjqueueError:
        return False


def shown(row: CronJob, at: datetime) -> str:
    """Return a time in the schedule's time zone."""
    try:
        at = at.astimezone(parse_timezone(row.timezone))
    except OptionError:
        pass  # shown in UTC; `about` reports the error
    return at.isoformat(" ", "seconds")
