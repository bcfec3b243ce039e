"""The pipeline commands, and `main` for `python -m`. Their arguments are defined in `parser`."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from djqueue.contrib.spark import write
from djqueue.contrib.spark.aliases import alias_of, is_added
from djqueue.contrib.spark.locations import DATABASES, resolved, storage_at
from djqueue.contrib.spark.options import key_of
from djqueue.contrib.spark.reporting import WriteReport
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import ConfigurationError, DjqueueError, OptionError
from djqueue.core.units import to_datetime
from djqueue.storage.base import Storage

from .backfill import KINDS, Source, backfill
from .parser import HELP, PipelineHelpFormatter, add_commands
from .session import readable_errors, session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PrintLine = Callable[[str], None]
DONE, FAILED, WRONG = 0, 1, 2
"""Exit codes: success, a failed command, invalid arguments."""
NO_REPORT = "Done. The report could not be saved or read, so the numbers are unknown."
PURGED = {"removed": "removed", "changed": "changed since and kept", "gone": "already gone"}
RETRIED = {
    "retried": "retried",
    "not_found": "not found",
    "not_failed": "no longer failed",
    "unique_key_taken": "kept because their unique key is taken",
    "rejected": "kept because they need a valid payload",
    "blocked_again": "blocked until their dependencies complete",
    "dependency_gone": "kept because a dependency was cancelled or removed",
}


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
    check(args)
    with session(f"djqueue {args.action}", args.master, dict(args.conf)) as spark, readable_errors():
        COMMANDS[args.action](spark, args, context, print_line)


def check(args: Namespace) -> None:
    """Raise OptionError for arguments that contradict each other."""
    if args.action == "replay":
        if args.archive is None and args.name is not None:
            raise OptionError("--name requires --archive: dead letters are retried only once in any case")
        if args.archive is None and args.option:
            raise OptionError("--option requires --archive: dead letters are retried with their own options")
        if args.archive is not None and args.name is None:
            raise OptionError(
                "--archive requires --name, so that a second replay of the same name enqueues nothing twice"
            )
    if args.action == "backfill":
        source_of(args).check_days()


def source_of(args: Namespace) -> Source:
    """Return the source of the rows to load."""
    [(kind, where)] = [(kind, getattr(args, kind)) for kind in KINDS if getattr(args, kind) is not None]
    return Source(
        kind=kind,
        where=where,
        schema=args.schema,
        columns=args.columns,
        renamed=dict(args.rename),
        day_column=getattr(args, "date_column", None),
    )


def parser() -> ArgumentParser:
    """Return the parser of `python -m djqueue.contrib.spark`."""
    parser = ArgumentParser(
        prog="python -m djqueue.contrib.spark", description=HELP, formatter_class=PipelineHelpFormatter
    )
    add_commands(parser, is_project=False)
    return parser


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


def _enqueue(spark: "SparkSession", args: Namespace, context: PipelineContext, print_line: PrintLine) -> None:
    report = write(source_of(args).read(spark), _options(args, context))
    print_line(summary_of(report, dry_run=args.dry_run))


def _backfill(
    spark: "SparkSession", args: Namespace, context: PipelineContext, print_line: PrintLine
) -> None:
    options = _options(args, context)
    if args.max_queue_depth is not None:
        options["maxQueueDepth"] = str(args.max_queue_depth)
    loaded = skipped = jobs = 0
    for day, report in backfill(spark, source_of(args), args.name, args.since, args.until, options):
        print_line(f"{day}: {summary_of(report, dry_run=args.dry_run)}")
        if report is not None and report.skipped:
            skipped += 1
            continue
        loaded += 1
        jobs += report.inserted if report is not None else 0
    if not args.dry_run:
        print_line(f"{loaded:,} days loaded with {jobs:,} new jobs; {skipped:,} days skipped.")


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
            print_line(_counts_text(purged, PURGED))
    finally:
        jobs.unpersist()


def _restore(spark: "SparkSession", args: Namespace, context: PipelineContext, print_line: PrintLine) -> None:
    from .replay import selected
    from .restore import restore

    jobs = selected(spark, args.path, args.where, args.since, args.until)
    with context.tables() as alias:
        done = restore(spark, args.path, jobs, alias, args.keep)
    print_line(f"{done.inserted:,} jobs restored for {args.keep:,} days; {done.skipped:,} already existed.")


def _replay(spark: "SparkSession", args: Namespace, context: PipelineContext, print_line: PrintLine) -> None:
    from .replay import replay_archived, replay_dead, selected

    if args.archive is not None:
        jobs = selected(spark, args.archive, args.where, args.since, args.until)
        report = replay_archived(jobs, args.name, _options(args, context))
        print_line(summary_of(report, dry_run=args.dry_run))
        return
    days = {name: day.isoformat() for name in ("since", "until") if (day := getattr(args, name)) is not None}
    letters = table(spark, context, "dead", **days).where(args.where)
    report = replay_dead(letters, _options(args, context))
    if report is None:
        print_line(NO_REPORT)
    elif args.dry_run:
        print_line(f"Dry run: {_counts_text(report.answers, {**RETRIED, 'retried': 'would be retried'})}")
    else:
        print_line(_counts_text(report.answers, RETRIED))


COMMANDS: "Mapping[str, Callable[[SparkSession, Namespace, PipelineContext, PrintLine], None]]" = {
    "enqueue": _enqueue,
    "rollups": _rollups,
    "archive": _archive,
    "restore": _restore,
    "replay": _replay,
    "backfill": _backfill,
}


def table(spark: "SparkSession", context: PipelineContext, name: str, **options: str) -> "DataFrame":
    """Return a table of the storage as a DataFrame."""
    return spark.read.format("djqueue").options(table=name, **context.options, **options).load()


def _options(args: Namespace, context: PipelineContext) -> dict[str, str]:
    """Return the options of a write."""
    targets = {name: value for name in ("queue", "job") if (value := getattr(args, name, None)) is not None}
    for name, _ in args.option:
        if key_of(name) in targets:
            raise OptionError(
                f"--{key_of(name)} and --option {name}=... set the same option: remove one of them"
            )
    return {**context.options, **targets, **dict(args.option), **({"dryRun": "true"} if args.dry_run else {})}


def summary_of(report: WriteReport | None, *, dry_run: bool = False) -> str:
    """Describe the result of a write in one line."""
    if report is None:
        return NO_REPORT
    rejected = sum(report.rejected.values())
    why = ", ".join(f"{count:,} {reason}" for reason, count in sorted(report.rejected.items()))
    invalid = f"; {rejected:,} invalid rows ({why})" if rejected else ""
    invalid += f", {report.dead_letters:,} of which became dead letters" if report.dead_letters else ""
    if dry_run:
        return f"Dry run: {report.rows - rejected:,} jobs would be enqueued{invalid}."
    if report.skipped:
        return f"Already published: nothing was enqueued{invalid}."
    return f"{report.inserted:,} new jobs, {report.duplicates:,} duplicates{invalid}."


def _counts_text(done: Mapping[str, int], words: Mapping[str, str]) -> str:
    first = next(iter(words))
    counts = [f"{done.get(word, 0):,} {words[word]}" for word in words if done.get(word) or word == first]
    return ", ".join(counts) + "."


def start_of_hour(at: datetime) -> datetime:
    """Return the start of the hour that contains a time, in UTC."""
    return at.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
