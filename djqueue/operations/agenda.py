"""Lines for people about the schedules and their next runs."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice

from djqueue.client import registry
from djqueue.client.declarations import declared
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import DjqueueError, OptionError
from djqueue.core.suggest import nearest
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.models import CronJob
from djqueue.schedules.zones import parse_timezone


def agenda(alias: str, names: Sequence[str], runs: int) -> Iterator[str]:
    """Yield lines about all schedules, or those with these names, each with its next runs.

    Raises OptionError for an unknown name.
    """
    rows = {row.name: row for row in CronJob.objects.using(alias).order_by("name")}
    waiting = declared.of(registry.names()).keys() - rows.keys()
    known = sorted({*rows, *waiting})
    for name in names:
        if name not in known:
            raise OptionError(f"unknown schedule {name!r}{nearest(name, known)}")
    for name in known:
        if not names or name in names:
            yield from about(rows[name], runs) if name in rows else (f"{name}: {UNSEEN}",)
    if not known:
        yield NONE


def about(row: CronJob, runs: int) -> Iterator[str]:
    """Yield lines about one schedule: what it enqueues and when, its past and its next runs."""
    when = row.schedule or f"every {row.every}"
    queue = f" in queue {row.queue}" if row.queue else ""
    yield f"{row.name}: {when} ({row.timezone}), {row.job_name}{queue}"
    done = f"    {row.executions:,} {'execution' if row.executions == 1 else 'executions'}"
    yield f"{done}, the last {shown(row, row.last_run_at)}" if row.last_run_at is not None else done
    if row.skipped_at is not None:
        yield f"    skipped {shown(row, row.skipped_at)}: {row.skip_reason}"
    if not row.enabled:
        yield "    disabled"
        return
    try:
        now = to_datetime(SYSTEM_CLOCK.now())
        for at in islice(next_runs(row), runs):
            if at <= now:
                yield f"    due since {shown(row, at)}, waits for a worker"
            else:
                yield f"    next {shown(row, at)}"
    except DjqueueError as error:
        yield f"    invalid: {error}"


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


def shown(row: CronJob, at: datetime) -> str:
    """Return a time in the schedule's time zone."""
    try:
        at = at.astimezone(parse_timezone(row.timezone))
    except OptionError:
        pass  # shown in UTC; `about` reports the error
    return at.isoformat(" ", "seconds")


UNSEEN = "declared in code, but not in the table yet; runworkers adds it when it starts"
NONE = "There are no schedules."
