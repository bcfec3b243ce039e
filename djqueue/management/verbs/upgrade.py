"""`manage.py djqueue upgrade`: bring the tables of an earlier development version up to date."""

from django.core.management.base import CommandError
from django.db import connections, router

from djqueue import models
from djqueue.client import get_storage
from djqueue.core.shown import numbered
from djqueue.core.states import State
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.database import upgrade as former
from djqueue.storage.tables import schema

from .auditing import note
from .backup import record_progress
from .base import Options, Output, Verbs

UPGRADE = """Bring the tables and jobs of an earlier development version into the form of this version.

    manage.py djqueue upgrade --dry-run

For projects that used djqueue while a scheduler process kept the jobs. Adds the tables and columns that are
missing, which `migrate` does not do for these projects. Then carries over all jobs, in order, with their
results, dead letters, unique keys, groups and dependencies, and the pauses and limits of queues. Active jobs
wait again, with a stall counted, as after the loss of a worker. Schedules and metrics stay as they are.

Stop all workers and web servers first; the command refuses while workers run. It can be repeated: tables are
changed completely or not at all, and so are jobs. If nothing is to be done, it says so and changes nothing.
"""


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verbs.add("upgrade", upgrade, UPGRADE)
    parser.add_argument(
        "--drop-finished",
        action="store_true",
        help="Delete completed and cancelled jobs, except those that unfinished jobs depend on.",
    )
    parser.add_argument("--dry-run", action="store_true", help="Only show what would be done.")
    parser.add_argument(
        "--no-input", "--yes", action="store_true", dest="no_input", help="Do not ask for confirmation."
    )


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
        former.check_stopped(database)
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
