"""`manage.py djqueue cron`, and its alias `schedules`."""

from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import islice
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import CommandError

from djqueue.client import get_storage, registry
from djqueue.client.declarations import declared
from djqueue.client.sending import enqueue
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import ArgumentsError, DjqueueError, OptionError
from djqueue.core.suggest import nearest
from djqueue.core.units import to_datetime
from djqueue.management.arguments import count, duration, json_list, json_object
from djqueue.models import CronJob, ScheduleSource
from djqueue.operations.cronjobs import batch_of, next_runs, shown
from djqueue.operations.sweeps import alias_of
from djqueue.runtime.exits import MISUSED

from .base import Options, Output, Subcommands, note

CRON = """List, add, pause, run and remove schedules."""
LIST = """List the schedules, each with its job, its last run and its next runs.

Times are in the schedule's time zone and include its jitter. If the first time is in the past, the run is
due and waits for a worker, which checks about once a second.

A schedule that is declared in code (@job(cron=...), .schedule(...)) is listed after `runworkers` has started
once.
"""
ADD = """Add a schedule.

    manage.py djqueue cron add nightly shop.jobs.report --cron '0 3 * * *' --timezone Europe/Berlin
    manage.py djqueue cron add poll shop.jobs.poll --every 5m --kwargs '{"shop": 3}'
"""
PAUSE = """Disable schedules. Runs missed meanwhile are not made up for."""
RESUME = """Enable schedules."""
RUN = """Enqueue a job of each schedule now; the next runs stay as they are."""
UNSEEN = "declared in code, but not in the table yet; runworkers adds it when it starts"
NONE = "There are no schedules."
REMOVE = """Delete schedules; their jobs are kept.

A schedule that is declared in code can't be deleted, because code would add it again: pause it instead.
"""


def add(subcommands: Subcommands) -> None:
    """Declare the subcommands."""
    cron = subcommands.group("cron", CRON)
    _add_list(cron.add("list", listed, LIST))
    _add_list(subcommands.add("schedules", listed, LIST))
    parser = cron.add("add", create, ADD)
    parser.add_argument("name", metavar="NAME", help="Name of the schedule.")
    parser.add_argument("job", metavar="JOB", help="Name of the job.")
    timing = parser.add_mutually_exclusive_group(required=True)
    timing.add_argument("--cron", default="", metavar="EXPRESSION", help="Five or six fields, or @hourly.")
    timing.add_argument("--every", type=duration, metavar="TIME", help="An interval, such as 5m.")
    parser.add_argument("--timezone", default="UTC", metavar="ZONE", help="Time zone (default: UTC).")
    parser.add_argument("--queue", default="", metavar="QUEUE", help="Queue (default: the job's own).")
    parser.add_argument(
        "--args", dest="positional", type=json_list, default=[], metavar="JSON", help="Positional arguments."
    )
    parser.add_argument(
        "--kwargs", dest="keywords", type=json_object, default={}, metavar="JSON", help="Keyword arguments."
    )
    for name, run, text in (
        ("pause", pause, PAUSE),
        ("resume", resume, RESUME),
        ("run", run_now, RUN),
        ("remove", remove, REMOVE),
    ):
        parser = cron.add(name, run, text)
        parser.add_argument("names", metavar="NAME", nargs="+", help="Names of schedules.")
        if run is remove:
            parser.add_argument("--dry-run", action="store_true", help="Only show what would be deleted.")


def listed(options: Options, output: Output) -> None:
    """List the schedules."""
    alias = alias_of(get_storage())
    if not output.as_json:
        for line in _agenda(alias, options["names"], options["next"]):
            output.line(line)
        return
    rows = _rows(options["names"]) if options["names"] else CronJob.objects.using(alias).order_by("name")
    output.document([_described(row, options["next"]) for row in rows])


def _agenda(alias: str, names: Sequence[str], runs: int) -> Iterator[str]:
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
            yield from _about(rows[name], runs) if name in rows else (f"{name}: {UNSEEN}",)
    if not known:
        yield NONE


def _about(row: CronJob, runs: int) -> Iterator[str]:
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


def create(options: Options, output: Output) -> None:
    """Add a schedule."""
    alias = alias_of(get_storage())
    row = CronJob(
        name=options["name"],
        job_name=options["job"],
        schedule=options["cron"],
        every=None if options["every"] is None else timedelta(seconds=options["every"]),
        timezone=options["timezone"],
        queue=options["queue"],
        args=options["positional"],
        kwargs=options["keywords"],
    )
    try:
        row.full_clean(validate_unique=False, validate_constraints=False)
        registry.check_arguments(row.job_name, [{"args": row.args, "kwargs": row.kwargs}])
    except ArgumentsError as error:
        raise CommandError(str(error), returncode=MISUSED) from error
    except ValidationError as error:
        problems = [f"{name}: {' '.join(texts)}" for name, texts in error.message_dict.items()]
        raise CommandError(" ".join(problems), returncode=MISUSED) from error
    if CronJob.objects.using(alias).filter(name=row.name).exists():
        raise CommandError(f"schedule {row.name!r} already exists; remove it first, or choose another name")
    row.save(using=alias)
    note("schedule_create", queue=row.queue, detail={"name": row.name})
    if registry.find(row.job_name) is None:
        known = nearest(row.job_name, registry.names())
        output.progress(f"Warning: no @job function is registered as {row.job_name!r} here{known or '.'}")
    output.document(_described(row, 1))
    output.line(f"Added schedule {row.name}; next run {row.next_run_at}.")


def pause(options: Options, output: Output) -> None:
    """Disable schedules."""
    _switch(options, output, enabled=False)


def resume(options: Options, output: Output) -> None:
    """Enable schedules."""
    _switch(options, output, enabled=True)


def run_now(options: Options, output: Output) -> None:
    """Enqueue a job of each schedule."""
    enqueued = []
    for row in _rows(options["names"]):
        for result in enqueue(get_storage(), batch_of(row, None)):
            note("schedule_run", queue=result.queue, job_id=result.id, count=1, detail={"name": row.name})
            enqueued.append({"schedule": row.name, "id": result.id, "queue": result.queue})
            output.line(f"{row.name}: enqueued {result.id} in queue {result.queue}")
    output.document(enqueued)


def remove(options: Options, output: Output) -> None:
    """Delete schedules."""
    rows = _rows(options["names"])
    for row in rows:
        if row.source == ScheduleSource.CODE:
            raise CommandError(f"schedule {row.name!r} is declared in code: remove it there, or pause it")
    if options["dry_run"]:
        for row in rows:
            output.line(f"Would delete schedule {row.name}.")
        output.document({"matching": [row.name for row in rows], "deleted": []})
        return
    for row in rows:
        row.delete()
        note("schedule_delete", queue=row.queue, detail={"name": row.name, "job": row.job_name})
        output.line(f"Deleted schedule {row.name}.")
    output.document({"matching": [row.name for row in rows], "deleted": [row.name for row in rows]})


def _add_list(parser: ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="Names of the schedules (default: all).")
    parser.add_argument(
        "--next",
        type=count,
        metavar="N",
        default=5,
        help="Number of next runs to list for each schedule (default: 5).",
    )


def _rows(names: list[str]) -> list[CronJob]:
    """Return the named schedules, in this order. Raises CommandError."""
    rows = {row.name: row for row in CronJob.objects.using(alias_of(get_storage()))}
    for name in names:
        if name not in rows:
            raise CommandError(f"unknown schedule {name!r}{nearest(name, rows)}")
    return [rows[name] for name in dict.fromkeys(names)]


def _switch(options: Options, output: Output, *, enabled: bool) -> None:
    rows = _rows(options["names"])
    for row in rows:
        if enabled and row.source == ScheduleSource.WITHDRAWN:
            raise CommandError(f"schedule {row.name!r} is no longer declared in code, and can't be enabled")
    for row in rows:
        row.enabled = enabled
        row.save(using=row._state.db, update_fields=["enabled"])
        note("schedule_switch", queue=row.queue, detail={"name": row.name, "new": {"enabled": enabled}})
        output.line(f"{'Enabled' if enabled else 'Disabled'} schedule {row.name}.")
    output.document([{"name": row.name, "enabled": row.enabled} for row in rows])


def _described(row: CronJob, runs: int) -> dict[str, Any]:
    problem, following = None, []
    try:
        following = list(islice(next_runs(row), runs)) if row.enabled else []
    except DjqueueError as error:
        problem = str(error)
    return {
        "name": row.name,
        "job": row.job_name,
        "queue": row.queue or None,
        "cron": row.schedule or None,
        "every_seconds": None if row.every is None else row.every.total_seconds(),
        "timezone": row.timezone,
        "enabled": row.enabled,
        "source": row.source,
        "executions": row.executions,
        "last_run_at": row.last_run_at,
        "next_runs": following,
        "problem": problem,
    }
