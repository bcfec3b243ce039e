"""`manage.py djqueue mark`, `upgrade`, `resync`, `restore-from-mirror`, `health` and `doctor`."""

import sys
from argparse import ArgumentParser
from dataclasses import replace
from typing import Any

from django.core.management.base import CommandError
from django.db import connections, router

from djqueue import models
from djqueue.client import get_storage
from djqueue.conf import HealthSettings, get_settings
from djqueue.core.errors import ConfigurationError
from djqueue.core.messages import numbered
from djqueue.core.states import State
from djqueue.management.arguments import seconds
from djqueue.operations.annotations import annotate
from djqueue.operations.doctor import diagnose
from djqueue.operations.healthchecks import HealthRun, finding_document
from djqueue.operations.mirror import Mirror, is_mirrored, mirror_of
from djqueue.operations.mirrorrestore import Restoration, RestoreCounts
from djqueue.operations.sweeps import alias_of
from djqueue.runtime.exits import FAILED
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.database import upgrade as former
from djqueue.storage.tables import schema

from .base import Options, Output, Subcommands, add_no_input, note, record_progress

HEALTH = """Check whether the storage answers and jobs are being run.

The exit code is 0 if every check passes, and 1 otherwise. The bounds are those of the setting HEALTH, unless
options name others.

    manage.py djqueue health
    manage.py djqueue health --max-wait 300 --json
"""

DOCTOR = """Explain what is wrong with the jobs, the storage and the configuration, and how to fix it.

Includes the health checks, the system checks, the settings of the servers, unapplied migrations, clocks and
versions. The exit code is 0 without findings of level error, and 1 otherwise.

    manage.py djqueue doctor
"""
MARK = """Add an annotation to the charts of the dashboard, such as a deploy, a change or an incident.

Workers add one automatically when they start with another VERSION (in the settings) than the last worker.
"""
UPGRADE = """Bring the tables and jobs of an earlier development version into the form of this version.

    manage.py djqueue upgrade --dry-run

For projects that used djqueue while a scheduler process kept the jobs. Adds the tables and columns that are
missing, which `migrate` does not do for these projects. Then carries over all jobs, in order, with their
results, dead letters, unique keys, concurrency keys and dependencies, and the pauses and limits of queues.
Active jobs wait again, with a stall counted, as after the loss of a worker. Schedules and metrics stay as
they are.

Stop all workers and web servers first; the command refuses while workers run. It can be repeated: tables are
changed completely or not at all, and so are jobs. If nothing is to be done, it says so and changes nothing.

Afterwards run `migrate`, which creates the permissions of the dashboard, such as save_view and share_view.
"""
PROGRESS_EVERY = 10_000
"""Jobs between two progress lines of a queue."""
RESYNC = """Make the tables match Redis.

Copies all jobs in Redis to the tables again. Deletes the rows of unfinished jobs that are not in Redis; rows
of finished jobs stay until their RETENTION ends. Workers can keep running.

The mirror does this automatically when it has missed changes. Use this command after the tables were
changed or emptied by hand, or after STATES were added to the settings.

If Redis has lost its data, run restore-from-mirror first.
"""
RESTORE = """Enqueue again the jobs that Redis has lost, after it has come back empty or with old data.

Enqueues every unfinished job (waiting, delayed, blocked, active) that is in the tables and not in Redis,
the oldest first, with its ID, name, payload, options, unique key and due time. Restores the pauses and
limits of queues that are not in Redis.

Jobs that are in Redis are left unchanged, so the command can run more than once, and beside workers.

Restored jobs start again: attempts, failures and stalls are counted from 0, and the enqueue time is new. A
job that was active when Redis was lost runs again, even if a worker has finished or is still running it.

Not restored: failed jobs, whose rows stay with payload and error; finished jobs and their results; and jobs
that were enqueued too shortly before the loss to be mirrored, usually half a second. A job is refused, with
the reason, if its TTL has expired, its unique key is in use, or it depends on a failed or unknown job.
"""


def add(subcommands: Subcommands) -> None:
    """Declare the subcommands."""
    parser = subcommands.add("mark", mark, MARK)
    parser.add_argument("label", metavar="LABEL", help="Text of the annotation, such as v1.2.")
    parser = subcommands.add("upgrade", upgrade, UPGRADE)
    parser.add_argument(
        "--drop-finished",
        action="store_true",
        help="Delete completed and cancelled jobs, except those that unfinished jobs depend on.",
    )
    parser.add_argument("--dry-run", action="store_true", help="Only show what would be done.")
    add_no_input(parser)
    resyncing = subcommands.add("resync", resync, RESYNC)
    restoring = subcommands.add("restore-from-mirror", restore, RESTORE)
    for parser in (resyncing, restoring):
        parser.add_argument("--queue", metavar="NAME", help="Name of one queue (default: all queues).")
    resyncing.add_argument(
        "--dry-run", action="store_true", help="Only show what would be copied and deleted."
    )
    restoring.add_argument("--dry-run", action="store_true", help="Only show what would be enqueued.")
    for name, run, text in (("health", health, HEALTH), ("doctor", doctor, DOCTOR)):
        _add_bounds(subcommands.add(name, run, text))


def health(options: Options, output: Output) -> None:
    """Run the health checks."""
    report = HealthRun(_bounds(options)).report()
    output.document({**report.document(), "findings": [finding_document(one) for one in report.findings]})
    output.table(["check", "status"], [[check.name, check.status] for check in report.checks])
    for finding in report.findings:
        output.line(f"\n{finding.id}: {finding.text}\n    Fix: {finding.hint}")
    if not report.is_healthy:
        sys.exit(FAILED)


def doctor(options: Options, output: Output) -> None:
    """Explain each finding."""
    findings = diagnose(_bounds(options))
    has_errors = any(finding.level == "error" for finding in findings)
    output.document(
        {
            "status": "failed" if has_errors else "ok",
            "findings": [finding_document(finding) for finding in findings],
        }
    )
    for finding in findings:
        output.line(f"{finding.level.upper()} {finding.id}\n    {finding.text}\n    Fix: {finding.hint}\n")
    output.line(f"{numbered(len(findings), 'finding')}." if findings else "Nothing is wrong.")
    if has_errors:
        sys.exit(FAILED)


def _add_bounds(parser: ArgumentParser) -> None:
    help_texts = {
        "--max-wait": "Time that a job may be due before it counts as not being claimed.",
        "--lease-grace": "Time after which an expired lease counts as stale.",
        "--timeout": "Time that all health checks together may take.",
    }
    for flag, text in help_texts.items():
        parser.add_argument(flag, type=seconds, metavar="SECONDS", help=f"{text} (default: see HEALTH)")


def _bounds(options: Options) -> HealthSettings:
    try:
        bounds = get_settings().health
    except ConfigurationError:
        bounds = HealthSettings()  # the checks report the settings
    given: dict[str, Any] = {
        name: int(options[name] * 1_000)
        for name in ("max_wait", "lease_grace", "timeout")
        if options[name] is not None
    }
    return replace(bounds, **given)


def mark(options: Options, output: Output) -> None:
    """Add an annotation to the charts."""
    row = annotate(alias_of(get_storage()), options["label"])
    output.document({"label": row.label, "at": row.at})
    output.line(f"Added annotation: {row.label}")


def upgrade(options: Options, output: Output) -> None:
    """Upgrade the tables and jobs."""
    storage = get_storage()
    database = storage.database if isinstance(storage, DatabaseStorage) else None
    alias = router.db_for_write(models.Job) if database is None else database.alias
    if models.Job._meta.db_table not in connections[alias].introspection.table_names():
        raise CommandError(f"database {alias!r} has no tables of djqueue: run manage.py migrate")
    tables, migration = schema.changes(alias)
    steps = [] if migration is None else [step.describe() for step in migration.operations]
    # Tables in an old form may not have the columns that tell what has written their rows.
    has_former = database is not None and (migration is not None or former.is_former(database))
    counts = former.counts(database) if database is not None and has_former else {}
    document = {"database": alias, "dry_run": options["dry_run"], "tables": steps, "jobs": counts}
    if migration is None and not has_former:
        output.document({**document, "written": None})
        output.line(f"Database {alias!r} is up to date.")
        return
    for step in steps:
        output.line(f"Table change: {step}")
    held = ", ".join(f"{counts[state]:,} {state.value}" for state in State if counts.get(state)) or "none"
    output.line(f"Jobs to carry over: {held}")
    if options["dry_run"]:
        output.document({**document, "written": None})
        return
    if database is not None:
        database.read(former.check_stopped)
    dropped = " Completed and cancelled jobs will be deleted." if options["drop_finished"] else ""
    output.confirm(f"Upgrade database {alias!r}?{dropped}", assume_yes=options["no_input"])
    if migration is not None:
        output.progress("Changing the tables")
        schema.apply(alias, tables, migration)
    written = None
    if database is not None and has_former:
        progress = record_progress(output, "Read {0:,} jobs")
        written = former.carry_over(database, drop_finished=options["drop_finished"], progress=progress)
        note("upgrade", count=written.jobs)
    output.document({**document, "written": None if written is None else written._asdict()})
    carried = (
        ""
        if written is None
        else (f" It holds {numbered(written.jobs, 'job')}, {written.dead:,} of them dead letters.")
    )
    output.line(f"Upgraded database {alias!r}.{carried}")


def resync(options: Options, output: Output) -> None:
    """Make the tables match Redis."""
    counts: dict[str, tuple[int, int]] = {}

    def progress(name: str, copied: int, forgotten: int) -> None:
        before = counts.get(name, (0, 0))[0]
        counts[name] = copied, forgotten
        if copied // PROGRESS_EVERY > before // PROGRESS_EVERY:
            output.progress(f"{name}: {copied:,} jobs so far")

    mirror, dry_run = _mirror(), options["dry_run"]
    (mirror.count_resync if dry_run else mirror.resync)(options["queue"], progress)
    output.document(
        [{"name": name, "copied": copied, "removed": removed} for name, (copied, removed) in counts.items()]
    )
    would = " would be" if dry_run else ""
    for name, (copied, forgotten) in counts.items():
        jobs, removed = numbered(copied, "job"), numbered(forgotten, "unfinished job")
        output.line(f"{name}: {jobs}{would} copied, {removed} no longer in Redis{would} removed")
    if not counts:
        output.line("No queues exist, neither in Redis nor in the tables.")


def restore(options: Options, output: Output) -> None:
    """Enqueue again the jobs that Redis has lost."""
    dry_run = options["dry_run"]
    reports = Restoration(_mirror(), dry_run=dry_run).run(options["queue"])
    output.document(
        [
            {
                "name": name,
                "restored": {state.value: number for state, number in report.restored.items()},
                "unchanged": report.unchanged,
                "refused": dict(report.refused),
            }
            for name, report in reports.items()
        ]
    )
    for name, report in reports.items():
        _report(output, name, report, "would be restored" if dry_run else "restored")
    if not any(report.restored for report in reports.values()):
        output.line("Nothing to restore.")


def _report(output: Output, queue: str, report: RestoreCounts, verb: str) -> None:
    words = [f"{report.restored.total():,} {verb}"]
    if report.restored:
        states = ", ".join(f"{count:,} {state.value}" for state, count in sorted(report.restored.items()))
        words[0] += f" ({states})"
    words.append(f"{report.unchanged:,} already in Redis")
    words.append(f"{report.refused.total():,} refused")
    output.line(f"{queue}: {', '.join(words)}")
    for reason, number in report.refused.most_common():
        output.line(f"    {number:,} refused: {reason}")


def _mirror() -> Mirror:
    storage = get_storage()
    if is_mirrored(storage):
        return mirror_of(storage)
    where = storage.describe()
    if storage.capabilities.database is None and not storage.capabilities.in_process:
        raise CommandError(f"{where} is not mirrored: MIRROR or STREAM is off in the settings")
    raise CommandError(
        f"this command requires the Redis storage, whose jobs are mirrored in tables; the storage is {where}"
    )
