"""Turn schedules declared in code into rows, and switch off rows that are no longer declared."""

import logging
from datetime import timedelta
from typing import Any

from django.db.models import Q

from djqueue.client import registry
from djqueue.client.declarations import Declared, declared
from djqueue.core.errors import DjqueueError
from djqueue.core.units import to_datetime
from djqueue.models import CronJob, ScheduleSource

logger = logging.getLogger("djqueue.cron")


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
