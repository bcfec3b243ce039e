"""Define the command line of `python -m djqueue.contrib.spark` and `manage.py djqueue_spark`."""

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any

from djqueue.core.states import TERMINAL

from .backfill import DAY, KINDS, PRIORITY

MASTER = "local[*]"

HELP = """Run bulk loads, backfills, metrics rollups, archives and replays on Spark.

Each command prints a summary of its results. Exit codes: 0 success, 1 failure, 2 invalid arguments.
"""

ENQUEUE = """Enqueue a job for each row of files, a table or a query.

Columns become the job's keyword arguments, except those that an option uses. --option sets any option of
format("djqueue"), such as idColumn=order_id, priority=5, delayColumn=wait or onError=skip. Either all
jobs are enqueued, or none. With --option txnAppId=orders --option txnVersion=7, repeating the command
enqueues nothing more.
"""

ROLLUPS = """Compute hourly metrics, and write them to the table behind the dashboard's charts.

For each hour, queue and job name: jobs enqueued, completed, failed and cancelled; attempts retried and
stalled; the 50th, 95th and 99th percentiles of wait time and run time; failures by reason. Running an
hour again replaces its rows.

The default is the last full hour: run the command once an hour. Only jobs that the storage still has are
counted: set retention to two hours or more, or read an archive.
"""

ARCHIVE = """Write ended jobs and their attempts to Parquet files, by queue and day (UTC).

Running a day again replaces its files. Archived jobs that the storage no longer has are kept. With
--purge, the storage deletes the jobs after they have been read back from the files and counted.
"""

RESTORE = """Insert archived jobs into the tables of the project's database, as history.

The admin and the dashboard show the jobs with their attempts for --keep days. Nothing runs. Jobs already
in the tables are left alone. Failed jobs are skipped: they are dead letters; use `replay` for these. For
a Redis storage, these are the tables of its mirror.
"""

REPLAY = """Run jobs again: retry dead letters, or enqueue archived jobs (--archive) as new jobs.

--where is an SQL condition on the columns of the table "dead", or of the table "jobs" with --archive.
Each dead letter is retried once, unchanged. Archived jobs become new jobs with new ids, and keep their
payload, priority, concurrency key, unique key, subject, tags and headers. Other options have their
defaults, unless --option sets them. A second replay with the same --name enqueues nothing more.
"""

BACKFILL = f"""Enqueue the rows of a range of days, one day at a time and each day once.

Each day is loaded completely or not at all. A second run with the same --name skips the days already
loaded, so an interrupted backfill continues where it stopped. Jobs have priority {PRIORITY}, behind new
jobs, unless --option priority=... sets another. --max-queue-depth waits while that many jobs are pending.

To select the rows of a day, use {DAY} in the path or query, which is replaced by a date such as
2026-01-31, or name the column with the date with --date-column.
"""


class PipelineHelpFormatter(RawDescriptionHelpFormatter):
    """Help formatter that keeps the paragraphs of descriptions."""


def add_commands(parser: ArgumentParser, *, is_project: bool) -> None:
    """Add the pipeline commands as subcommands.

    Args:
        parser: The parser.
        is_project: Whether the settings of a project define the storage.
    """
    commands = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)

    def add(name: str, brief: str, description: str) -> ArgumentParser:
        parser: ArgumentParser = commands.add_parser(
            name, help=brief, description=description, formatter_class=PipelineHelpFormatter
        )
        _add_place(parser, is_project=is_project)
        return parser

    enqueue = add("enqueue", "enqueue a job for each row", ENQUEUE)
    _add_source(enqueue)
    _add_jobs(enqueue)
    _add_dry_run(enqueue, "Read and validate the rows without enqueueing jobs.")

    rollups = add("rollups", "compute hourly metrics for the dashboard", ROLLUPS)
    rollups.add_argument(
        "--since",
        type=hour,
        metavar="HOUR",
        help="The first hour (UTC), such as 2026-01-31T05. Default: the last full hour.",
    )
    rollups.add_argument(
        "--until", type=hour, metavar="HOUR", help="The hour after the last one. Default: the current hour."
    )
    rollups.add_argument("--queue", metavar="NAME", help="Only this queue. Default: all queues.")
    rollups.add_argument("--archive", metavar="PATH", help="Read an archive instead of the storage.")
    _add_database(rollups, is_project=is_project)

    archive = add("archive", "write ended jobs to Parquet", ARCHIVE)
    archive.add_argument(
        "path", metavar="PATH", help="The archive's directory, which may be a URL such as s3a://..."
    )
    _add_days(archive, needed=False)
    archive.add_argument("--queue", metavar="NAME", help="Only this queue. Default: all queues.")
    archive.add_argument(
        "--states",
        type=states,
        metavar="STATE,STATE",
        default=tuple(ENDED),
        help=f"Any of {', '.join(ENDED)}. Default: all. Failed jobs are the dead letters.",
    )
    archive.add_argument(
        "--json",
        action="store_true",
        help="Add the column payload_json, which has the payload as readable JSON.",
    )
    _add_dry_run(archive, "Print the number of jobs without archiving them.")
    archive.add_argument(
        "--purge", action="store_true", help="Delete the archived jobs from the storage afterwards."
    )

    restore = add("restore", "insert archived jobs into the tables, as history", RESTORE)
    restore.add_argument("path", metavar="PATH", help="The archive's directory.")
    _add_days(restore, needed=False)
    restore.add_argument(
        "--where", metavar="SQL", default="true", help="An SQL condition on the jobs. Default: all."
    )
    restore.add_argument(
        "--keep", type=count, metavar="DAYS", default=7, help="Days until the jobs expire. Default: 7."
    )
    _add_database(restore, is_project=is_project)

    replay = add("replay", "run dead letters or archived jobs again", REPLAY)
    replay.add_argument(
        "--where",
        metavar="SQL",
        required=True,
        help="An SQL condition, such as \"queue = 'mail' and reason = 'timeout'\".",
    )
    replay.add_argument(
        "--archive", metavar="PATH", help="Replay jobs of this archive instead of dead letters."
    )
    replay.add_argument("--name", metavar="NAME", help="The replay's name; required with --archive.")
    _add_days(replay, needed=False)
    _add_options(replay)
    _add_dry_run(replay, "Print the number of jobs without running them.")

    backfill = add("backfill", "enqueue the rows of a range of days", BACKFILL)
    backfill.add_argument("--name", metavar="NAME", required=True, help="The backfill's name.")
    _add_days(backfill, needed=True)
    _add_source(backfill)
    backfill.add_argument("--date-column", metavar="NAME", help="The column with a row's date or time.")
    _add_jobs(backfill)
    backfill.add_argument(
        "--max-queue-depth",
        type=count,
        metavar="N",
        help="Wait while this many jobs are pending in the queue.",
    )
    _add_dry_run(backfill, "Read and validate the rows without enqueueing jobs.")


def _add_place(parser: ArgumentParser, *, is_project: bool) -> None:
    context = parser.add_argument_group("storage and Spark")
    instead = " Default: the storage of the settings." if is_project else ""
    context.add_argument(
        "--url",
        metavar="URL",
        required=not is_project,
        help="The storage's URL, reachable from the executors. With a password, use env:NAME or file:/path, "
        f"because other users see the command line.{instead}",
    )
    context.add_argument("--key-prefix", metavar="TEXT", help="The PREFIX of a Redis storage.")
    context.add_argument(
        "--master", metavar="URL", default=MASTER, help=f"The Spark master. Default: {MASTER}, this machine."
    )
    context.add_argument(
        "--conf",
        type=pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="A Spark property, such as spark.jars.packages=...; can be repeated.",
    )


def _add_database(parser: ArgumentParser, *, is_project: bool) -> None:
    if not is_project:
        parser.add_argument(
            "--database",
            metavar="URL",
            help="The project's database, if it is not the storage: postgresql://..., sqlite:///..., "
            "env:NAME or file:/path.",
        )


def _add_source(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("rows").add_mutually_exclusive_group(required=True)
    meanings = {
        "parquet": "Parquet files.",
        "csv": "CSV files with column names in the first line. Values are strings unless --schema is set.",
        "json": "JSON files with one object per line.",
        "table": "A table of Spark's catalog.",
        "sql": 'An SQL query, such as "select * from parquet.`/data/orders` where total > 100".',
    }
    for kind in KINDS:
        metavar = {"table": "NAME", "sql": "QUERY"}.get(kind, "PATH")
        group.add_argument(f"--{kind}", metavar=metavar, help=meanings[kind])
    parser.add_argument(
        "--schema", metavar="DDL", help='The schema of CSV or JSON files, such as "id bigint, total double".'
    )
    parser.add_argument(
        "--columns", type=names, metavar="NAME,NAME", default=(), help="The columns to use. Default: all."
    )
    parser.add_argument(
        "--rename",
        type=pair,
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="Rename a column; can be repeated.",
    )


def _add_jobs(parser: ArgumentParser) -> None:
    parser.add_argument("--queue", metavar="NAME", help="The queue of the jobs; or --option queueColumn=...")
    parser.add_argument("--job", metavar="NAME", help="The name of the jobs; or --option jobColumn=...")
    _add_options(parser)


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--option",
        type=pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help='An option of format("djqueue"); can be repeated.',
    )


def _add_days(parser: ArgumentParser, *, needed: bool) -> None:
    parser.add_argument(
        "--since", type=day, metavar="DATE", required=needed, help="The first day, such as 2026-01-31."
    )
    parser.add_argument(
        "--until", type=day, metavar="DATE", required=needed, help="The day after the last one."
    )


def _add_dry_run(parser: ArgumentParser, meaning: str) -> None:
    parser.add_argument("--dry-run", action="store_true", help=meaning)


ENDED = sorted(state.value for state in TERMINAL)


def day(text: str) -> date:
    """Parse a date."""
    parsed: date = _read(text, date.fromisoformat, "expected a day like 2026-01-31")
    return parsed


def hour(text: str) -> datetime:
    """Parse a whole hour, in UTC unless it has an offset."""
    at: datetime = _read(text, datetime.fromisoformat, "expected an hour like 2026-01-31T05")
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    if (at.minute, at.second, at.microsecond) != (0, 0, 0):
        raise ArgumentTypeError(f"{text!r} is not a whole hour; expected a format like 2026-01-31T05")
    return at


def pair(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise ArgumentTypeError(f"{text!r} does not have the form NAME=VALUE")
    return name, value


def names(text: str) -> tuple[str, ...]:
    """Parse comma-separated names."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def states(text: str) -> tuple[str, ...]:
    """Parse comma-separated states of ended jobs."""
    chosen = names(text)
    for name in chosen:
        if name not in ENDED:
            raise ArgumentTypeError(f"{name!r} is not one of {', '.join(ENDED)}")
    return chosen


def count(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _read(text: str, read: Callable[[str], Any], how: str) -> Any:
    try:
        return read(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is invalid: {how}") from None
