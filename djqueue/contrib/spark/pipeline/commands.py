"""The commands `archive` and `rollups` of `python -m djqueue.contrib.spark` and `manage.py djqueue_spark`."""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from djqueue.contrib.spark.aliases import alias_of, is_added
from djqueue.contrib.spark.locations import DATABASES, resolved, storage_at
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import ConfigurationError, DjqueueError, OptionError
from djqueue.core.states import TERMINAL
from djqueue.core.units import to_datetime
from djqueue.storage.base import Storage

from .session import readable_errors, session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PrintLine = Callable[[str], None]
DONE, FAILED, WRONG = 0, 1, 2
"""Exit codes: success, a failed command, invalid arguments."""
PURGED = {"removed": "removed", "changed": "changed since and kept", "gone": "already gone"}
ENDED = sorted(state.value for state in TERMINAL)
MASTER = "local[*]"

HELP = """Archive ended jobs, and compute hourly metrics, on Spark.

Each command prints a summary of its results. Exit codes: 0 success, 1 failure, 2 invalid arguments.
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


@dataclass(frozen=True)
class PipelineContext:
    """The locations of the storage and of the project's tables."""

    options: Mapping[str, str] = field(repr=False)
    """`url`, and `keyPrefix` if set."""
    alias: str | None = None
    """Inside a project, the alias of the database with the tables."""
    database: str | None = field(default=None, repr=False)
    """Without a project, the URL of that database, if it is not the storage's."""

    @contextmanager
    def storage(self) -> Iterator[Storage]:
        """Open the storage for the block."""
        with closing(storage_at(self.options["url"], self.options.get("keyPrefix", ""))) as storage:
            yield storage

    @contextmanager
    def tables(self) -> Iterator[str]:
        """Yield the alias of the database with the tables. Raises ConfigurationError if there is none."""
        if self.alias is not None:
            yield self.alias
            return
        url = resolved(self.database or self.options["url"])
        if url.partition("://")[0].lower() not in DATABASES:
            raise ConfigurationError(
                "the storage has no tables: pass the project's database with --database postgresql://… "
                "or sqlite:///…, or use manage.py djqueue_spark"
            )
        alias = alias_of(url)
        try:
            yield alias
        finally:
            if is_added(alias):
                from django.db import connections

                connections[alias].close()


def run(args: Namespace, context: PipelineContext, print_line: PrintLine) -> None:
    """Run a command, and report its results with `print_line`.

    Raises:
        OptionError: The arguments are invalid.
        DjqueueError: The command failed.
    """
    with session(f"djqueue {args.action}", args.master, dict(args.conf)) as spark, readable_errors():
        COMMANDS[args.action](spark, args, context, print_line)


def main(argv: Sequence[str]) -> int:
    """Run a command line. Returns the exit code."""
    args = parser().parse_args(argv)
    prefix = {"keyPrefix": args.key_prefix} if args.key_prefix else {}
    context = PipelineContext({"url": args.url, **prefix}, database=getattr(args, "database", None))
    try:
        run(args, context, _print)
    except OptionError as error:
        sys.stderr.write(f"{error}\n")
        return WRONG
    except DjqueueError as error:
        sys.stderr.write(f"{error}\n")
        return FAILED
    return DONE


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _rollups(spark: "SparkSession", args: Namespace, context: PipelineContext, print_line: PrintLine) -> None:
    from djqueue.contrib.spark.tables import ATTEMPTS, JOBS

    from .archive import archived
    from .rollups import rollups, store

    until = args.until or start_of_hour(to_datetime(SYSTEM_CLOCK.now()))
    since = args.since or until - timedelta(hours=1)
    if until <= since:
        raise OptionError(f"the range from {since:%Y-%m-%dT%H} until {until:%Y-%m-%dT%H} contains no hour")
    with context.tables() as alias:
        if args.archive is not None:
            jobs, attempts = archived(spark, args.archive), archived(spark, args.archive, ATTEMPTS)
            if args.queue is not None:
                jobs, attempts = (rows.where(rows.queue == args.queue) for rows in (jobs, attempts))
        else:
            only = {} if args.queue is None else {"queue": args.queue}
            jobs = table(spark, context, JOBS.name, **only)
            when = {"since": since.isoformat(), "until": until.isoformat()}
            attempts = table(spark, context, ATTEMPTS.name, **only, **when)
        hours, rows = store(rollups(jobs, attempts, since, until), alias)
    print_line(
        f"{rows:,} rollups of {hours:,} hours from {since:%Y-%m-%d %H:00} until {until:%Y-%m-%d %H:00} UTC."
    )


def _archive(spark: "SparkSession", args: Namespace, context: PipelineContext, print_line: PrintLine) -> None:
    from .archive import EARLIEST, archive, ended, purge, readable, written

    until = args.until or to_datetime(SYSTEM_CLOCK.now()).astimezone(UTC).date()
    only = {} if args.queue is None else {"queue": args.queue}
    # Only ended jobs are read, and their payloads only if they are written.
    chosen = {**only, "state": ",".join(args.states)}
    if args.dry_run:
        everything = table(spark, context, "jobs", columns="queue,id,state,finished_at", **chosen)
        jobs = ended(everything, args.since or EARLIEST, until, args.states)
        print_line(f"Dry run: {jobs.count():,} jobs before {until} would be archived.")
        return
    everything = table(spark, context, "jobs", includePayload="true", values="binary", **chosen)
    jobs = ended(everything, args.since or EARLIEST, until, args.states)
    jobs = (readable(jobs) if args.json else jobs).persist()
    try:
        done = archive(spark, args.path, jobs, table(spark, context, "attempts", **only))
        print_line(
            f"{done.jobs:,} jobs and {done.attempts:,} attempts archived in {args.path}: "
            f"{done.partitions:,} queue days before {until}."
        )
        if args.purge:
            with context.storage() as storage:
                purged = purge(storage, written(spark, args.path, jobs))
            counts = [f"{purged[word]:,} {text}" for word, text in PURGED.items() if purged[word]]
            print_line((", ".join(counts) or "0 removed") + ".")
    finally:
        jobs.unpersist()


COMMANDS: "Mapping[str, Callable[[SparkSession, Namespace, PipelineContext, PrintLine], None]]" = {
    "rollups": _rollups,
    "archive": _archive,
}


def table(spark: "SparkSession", context: PipelineContext, name: str, **options: str) -> "DataFrame":
    """Return a table of the storage as a DataFrame."""
    return spark.read.format("djqueue").options(table=name, **context.options, **options).load()


def start_of_hour(at: datetime) -> datetime:
    """Return the start of the hour that contains a time, in UTC."""
    return at.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


# The command line.


class PipelineHelpFormatter(RawDescriptionHelpFormatter):
    """Help formatter that keeps the paragraphs of descriptions."""


def parser() -> ArgumentParser:
    """Return the parser of `python -m djqueue.contrib.spark`."""
    parser = ArgumentParser(
        prog="python -m djqueue.contrib.spark", description=HELP, formatter_class=PipelineHelpFormatter
    )
    add_commands(parser, is_project=False)
    return parser


def add_commands(parser: ArgumentParser, *, is_project: bool) -> None:
    """Add the pipeline commands as subcommands.

    Args:
        parser: The parser.
        is_project: Whether the settings of a project define the storage.
    """
    commands = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)

    def add(name: str, brief: str, description: str) -> Callable[..., Any]:
        parser: ArgumentParser = commands.add_parser(
            name, help=brief, description=description, formatter_class=PipelineHelpFormatter
        )
        _add_place(parser, is_project=is_project)
        parser.add_argument("--queue", metavar="NAME", help="Only this queue. Default: all queues.")
        return parser.add_argument

    rollups = add("rollups", "compute hourly metrics for the dashboard", ROLLUPS)
    since = "The first hour (UTC), such as 2026-01-31T05. Default: the last full hour."
    rollups("--since", type=hour, metavar="HOUR", help=since)
    until = "The hour after the last one. Default: the current hour."
    rollups("--until", type=hour, metavar="HOUR", help=until)
    rollups("--archive", metavar="PATH", help="Read an archive instead of the storage.")
    if not is_project:
        rollups(
            "--database",
            metavar="URL",
            help="The project's database, if it is not the storage: postgresql://..., sqlite:///..., "
            "env:NAME or file:/path.",
        )

    archive = add("archive", "write ended jobs to Parquet", ARCHIVE)
    archive("path", metavar="PATH", help="The archive's directory, which may be a URL such as s3a://...")
    archive("--since", type=day, metavar="DATE", help="The first day, such as 2026-01-31.")
    archive("--until", type=day, metavar="DATE", help="The day after the last one. Default: today.")
    archive(
        "--states",
        type=states,
        metavar="STATE,STATE",
        default=tuple(ENDED),
        help=f"Any of {', '.join(ENDED)}. Default: all. Failed jobs are the dead letters.",
    )
    more = "Add the column payload_json, which has the payload as readable JSON."
    archive("--json", action="store_true", help=more)
    archive("--dry-run", action="store_true", help="Print the number of jobs without archiving them.")
    purge = "Delete the archived jobs from the storage afterwards."
    archive("--purge", action="store_true", help=purge)


def _add_place(parser: ArgumentParser, *, is_project: bool) -> None:
    add = parser.add_argument_group("storage and Spark").add_argument
    instead = " Default: the storage of the settings." if is_project else ""
    add(
        "--url",
        metavar="URL",
        required=not is_project,
        help="The storage's URL, reachable from the executors. With a password, use env:NAME or file:/path, "
        f"because other users see the command line.{instead}",
    )
    add("--key-prefix", metavar="TEXT", help="The PREFIX of a Redis storage.")
    add("--master", metavar="URL", default=MASTER, help=f"The Spark master. Default: {MASTER}, this machine.")
    conf = "A Spark property, such as spark.jars.packages=...; can be repeated."
    add("--conf", type=pair, action="append", default=[], metavar="NAME=VALUE", help=conf)


def day(text: str) -> date:
    """Parse a date."""
    parsed: date = _read(text, date.fromisoformat, "expected a day like 2026-01-31")
    return parsed


def hour(text: str) -> datetime:
    """Parse a whole hour, in UTC unless it has an offset."""
    at: datetime = _read(text, datetime.fromisoformat, "expected an hour like 2026-01-31T05")
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    if at != start_of_hour(at):
        raise ArgumentTypeError(f"{text!r} is not a whole hour; expected a format like 2026-01-31T05")
    return at


def pair(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise ArgumentTypeError(f"{text!r} does not have the form NAME=VALUE")
    return name, value


def states(text: str) -> tuple[str, ...]:
    """Parse comma-separated states of ended jobs."""
    chosen = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in chosen:
        if name not in ENDED:
            raise ArgumentTypeError(f"{name!r} is not one of {', '.join(ENDED)}")
    return chosen


def _read(text: str, read: Callable[[str], Any], how: str) -> Any:
    try:
        return read(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is invalid: {how}") from None
