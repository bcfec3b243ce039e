"""The command line: one parser for `python -m djqueue.contrib.spark` and `manage.py djqueue_spark`."""

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any

from djqueue.core.states import TERMINAL

from .backfill import PRIORITY
from .sources import DAY, KINDS

MASTER = "local[*]"

HELP = """What goes on around the queue, in Spark: see the help of each command.

Each ends with what it did, in numbers. Exit codes: 0 it did it, 1 it could not, 2 wrong usage.
"""

ENQUEUE = """Enqueue a job for each row of files, of a table, or of a query.

All columns are the job's arguments, by their names, but for those that an option uses: --option takes each
option of format("djqueue"), such as idColumn=order_id, priority=5, delayColumn=wait, onError=skip. All jobs
come, or none. With --option txnAppId=orders --option txnVersion=7 a second run brings nothing more.
"""

ROLLUPS = """Reckon what happened in each hour, and write it into the table of the dashboard's charts.

For each hour, queue and job: jobs enqueued, completed, failed, cancelled; runs retried and stalled; the 50th,
95th and 99th percentile of waiting and running; the reasons of failures. A second run replaces the same rows.

Unless told otherwise it is the last whole hour: run it once an hour. Jobs that the storage has forgotten do
not count: let jobs be kept (retention) for longer than an hour and the wait for this command, or read an
archive.
"""

ARCHIVE = """Write jobs that have ended, with their runs, as Parquet by queue and day (UTC).

A second run replaces the same days; what an archive has of jobs that the storage has forgotten stays.
With --purge the storage forgets the jobs, when they have been read back from the files and counted.
"""

RESTORE = """Put archived jobs back into the tables of the project's database, as what they were: history.

They are seen in the admin and the dashboard again, with their runs, until --keep days are over; none of them
runs. Jobs that the tables have are left alone, and failed ones are left out: those are dead letters, which
`replay` enqueues anew. For a storage in Redis these are the tables of its mirror.
"""

REPLAY = """Run jobs once more: dead letters are retried, archived jobs (--archive) enqueued anew.

--where is a condition of SQL over the columns of table "dead", or of table "jobs" with an archive.
Dead letters go back to waiting as they are, each once. Archived jobs become new jobs with new ids, with
payload, priority, group, unique key, subject and tags as they were; other options are the defaults, unless
--option says them. A second replay of the same --name brings nothing more.
"""

BACKFILL = f"""Enqueue the rows of a range of days, one day after the other, each once.

Each day comes as a whole, or not at all; a second run of the same --name skips the days that are there, so
that one that was interrupted goes on. Jobs have priority {PRIORITY}, behind what comes meanwhile, unless
--option priority=... says another one. --max-queue-depth waits while so many jobs are pending.

The rows of a day: {DAY} in the path or query stands for it, as 2026-01-31; or --date-column names its column.
"""


class PipelineHelpFormatter(RawDescriptionHelpFormatter):
    """Keeps the description's paragraphs."""


def add_commands(parser: ArgumentParser, *, is_project: bool) -> None:
    """Add what there is to do, as subcommands.

    is_project: whether settings say where the storage is.
    """
    commands = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)

    def add(name: str, brief: str, description: str) -> ArgumentParser:
        made: ArgumentParser = commands.add_parser(
            name, help=brief, description=description, formatter_class=PipelineHelpFormatter
        )
        _add_place(made, is_project=is_project)
        return made

    enqueue = add("enqueue", "a job for each row", ENQUEUE)
    _add_source(enqueue)
    _add_jobs(enqueue)
    _add_dry_run(enqueue, "Read and check the rows, and enqueue nothing.")

    rollups = add("rollups", "what happened in each hour, for the dashboard", ROLLUPS)
    rollups.add_argument("--since", type=hour, metavar="HOUR", help="The first hour (UTC), as 2026-01-31T05.")
    rollups.add_argument(
        "--until", type=hour, metavar="HOUR", help="The hour behind the last one; this one unless given."
    )
    rollups.add_argument("--queue", metavar="NAME", help="One queue; all of them unless given.")
    rollups.add_argument("--archive", metavar="PATH", help="Read an archive, and not the storage.")
    _add_database(rollups, is_project=is_project)

    archive = add("archive", "ended jobs to Parquet", ARCHIVE)
    archive.add_argument("path", metavar="PATH", help="A folder, also s3a://... and the like.")
    _add_days(archive, needed=False)
    archive.add_argument("--queue", metavar="NAME", help="One queue; all of them unless given.")
    archive.add_argument(
        "--states",
        type=states,
        metavar="STATE,STATE",
        default=tuple(ENDED),
        help=f"Of {', '.join(ENDED)}; all of them unless given. Failed jobs are the dead letters.",
    )
    archive.add_argument("--purge", action="store_true", help="Then have the storage forget these jobs.")

    restore = add("restore", "archived jobs back into the tables, as history", RESTORE)
    restore.add_argument("path", metavar="PATH", help="Of the archive.")
    _add_days(restore, needed=False)
    restore.add_argument("--where", metavar="SQL", default="true", help="Which of them.")
    restore.add_argument("--keep", type=count, metavar="DAYS", default=7, help="For how many days (7).")
    _add_database(restore, is_project=is_project)

    replay = add("replay", "dead or archived jobs once more", REPLAY)
    replay.add_argument(
        "--where", metavar="SQL", required=True, help="Such as \"queue = 'mail' and reason = 'timeout'\"."
    )
    replay.add_argument("--archive", metavar="PATH", help="Archived jobs, and not dead letters.")
    replay.add_argument("--name", metavar="NAME", help="What this replay of an archive is called.")
    _add_days(replay, needed=False)
    _add_options(replay)
    _add_dry_run(replay, "Say how many it would be.")

    backfill = add("backfill", "rows of a range of days, each day once", BACKFILL)
    backfill.add_argument("--name", metavar="NAME", required=True, help="What this backfill is called.")
    _add_days(backfill, needed=True)
    _add_source(backfill)
    backfill.add_argument("--date-column", metavar="NAME", help="The column with the day, or time, of a row.")
    _add_jobs(backfill)
    backfill.add_argument(
        "--max-queue-depth", type=count, metavar="N", help="Wait while so many jobs are pending in the queue."
    )
    _add_dry_run(backfill, "Read and check the rows, and enqueue nothing.")


def _add_place(parser: ArgumentParser, *, is_project: bool) -> None:
    place = parser.add_argument_group("where")
    instead = " That of the settings unless given." if is_project else ""
    place.add_argument(
        "--url", metavar="URL", required=not is_project, help=f"The storage, as executors reach it.{instead}"
    )
    place.add_argument("--key-prefix", metavar="TEXT", help="The PREFIX of a storage in Redis.")
    place.add_argument(
        "--master", metavar="URL", default=MASTER, help=f"The Spark that does it ({MASTER}: this machine)."
    )
    place.add_argument(
        "--conf",
        type=pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Of Spark, such as spark.jars.packages=...; as often as need be.",
    )


def _add_database(parser: ArgumentParser, *, is_project: bool) -> None:
    if not is_project:
        parser.add_argument(
            "--database",
            metavar="URL",
            help="Where the project's tables are, if the storage is not there: postgresql://..., sqlite:///...",
        )


def _add_source(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("rows").add_mutually_exclusive_group(required=True)
    meanings = {
        "parquet": "Files of Parquet.",
        "csv": "Files of CSV, the first line being names; values are texts unless --schema says more.",
        "json": "Files with an object in each line.",
        "table": "A table that Spark's catalog knows.",
        "sql": 'A query, such as "select * from parquet.`/data/orders` where total > 100".',
    }
    for kind in KINDS:
        of = {"table": "NAME", "sql": "QUERY"}.get(kind, "PATH")
        group.add_argument(f"--{kind}", metavar=of, help=meanings[kind])
    parser.add_argument("--schema", metavar="DDL", help='Of CSV and JSON, such as "id bigint, total double".')
    parser.add_argument("--columns", type=names, metavar="NAME,NAME", default=(), help="Only these columns.")
    parser.add_argument(
        "--rename",
        type=pair,
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="Another name for a column; as often as need be.",
    )


def _add_jobs(parser: ArgumentParser) -> None:
    parser.add_argument("--queue", metavar="NAME", help="Where the jobs go; or --option queueColumn=...")
    parser.add_argument("--job", metavar="NAME", help="Which job it is; or --option jobColumn=...")
    _add_options(parser)


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--option",
        type=pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help='An option of format("djqueue"); as often as need be.',
    )


def _add_days(parser: ArgumentParser, *, needed: bool) -> None:
    parser.add_argument(
        "--since", type=day, metavar="DATE", required=needed, help="The first day, as 2026-01-31."
    )
    parser.add_argument(
        "--until", type=day, metavar="DATE", required=needed, help="The day behind the last one."
    )


def _add_dry_run(parser: ArgumentParser, meaning: str) -> None:
    parser.add_argument("--dry-run", action="store_true", help=meaning)


ENDED = sorted(state.value for state in TERMINAL)


def day(text: str) -> date:
    """A date."""
    found: date = _read(text, date.fromisoformat, "expected a day like 2026-01-31")
    return found


def hour(text: str) -> datetime:
    """A whole hour, in UTC unless it says more."""
    at: datetime = _read(text, datetime.fromisoformat, "expected an hour like 2026-01-31T05")
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    if (at.minute, at.second, at.microsecond) != (0, 0, 0):
        raise ArgumentTypeError(f"{text!r} is not a whole hour; expected a format like 2026-01-31T05")
    return at


def pair(text: str) -> tuple[str, str]:
    """A name and a value."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise ArgumentTypeError(f"{text!r} does not have the form NAME=VALUE")
    return name, value


def names(text: str) -> tuple[str, ...]:
    """Names between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def states(text: str) -> tuple[str, ...]:
    """States in which jobs have ended."""
    found = names(text)
    for name in found:
        if name not in ENDED:
            raise ArgumentTypeError(f"{name!r} is not one of {', '.join(ENDED)}")
    return found


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _read(text: str, read: Callable[[str], Any], how: str) -> Any:
    try:
        return read(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is invalid: {how}") from None
