"""What the commands do: see `parser` for what they are told."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, timedelta
from typing import TYPE_CHECKING

from djqueue.contrib.spark import write
from djqueue.contrib.spark.aliases import alias_of, is_added
from djqueue.contrib.spark.locations import DATABASES, storage_at
from djqueue.contrib.spark.options import key_of
from djqueue.contrib.spark.writing import WriteReport
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.durations import to_datetime
from djqueue.core.errors import ConfigurationError, OptionError
from djqueue.storage.base import Storage

from .backfill import backfill
from .days import whole_hour
from .errors import plainly
from .session import session
from .sources import KINDS, Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Tell = Callable[[str], None]
UNKNOWN = "all of it is done; its report could not be kept, so there are no numbers."


@dataclass(frozen=True)
class PipelineContext:
    """Where the queue is, and the project's tables."""

    options: Mapping[str, str] = field(repr=False)
    """`url`, and what else says where the storage is."""
    alias: str | None = None
    """In DATABASES, of the database with the tables, where there is a project."""
    database: str | None = field(default=None, repr=False)
    """The URL of that database, where there is no project and it is not the storage's."""

    @contextmanager
    def storage(self) -> Iterator[Storage]:
        """The storage, for the block."""
        with closing(storage_at(self.options["url"], self.options.get("keyPrefix", ""))) as storage:
            yield storage

    @contextmanager
    def tables(self) -> Iterator[str]:
        """The alias of the database with the tables, for the block. Raises ConfigurationError."""
        if self.alias is not None:
            yield self.alias
            return
        url = self.database or self.options["url"]
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


def run(args: Namespace, place: PipelineContext, tell: Tell) -> None:
    """Do what the command line says; `tell` gets a line for what was done.

    Raises OptionError for what is wrong in the command line, and other DjqueueErrors.
    """
    check(args)
    with session(f"djqueue {args.action}", args.master, dict(args.conf)) as spark, plainly():
        COMMANDS[args.action](spark, args, place, tell)


def check(args: Namespace) -> None:
    """Raise OptionError for flags that do not go together."""
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
    """The rows that are loaded."""
    [(kind, where)] = [(kind, getattr(args, kind)) for kind in KINDS if getattr(args, kind) is not None]
    return Source(
        kind=kind,
        where=where,
        schema=args.schema,
        columns=args.columns,
        renamed=dict(args.rename),
        day_column=getattr(args, "date_column", None),
    )


def _enqueue(spark: "SparkSession", args: Namespace, place: PipelineContext, tell: Tell) -> None:
    report = write(source_of(args).read(spark), _options(args, place))
    tell(said_of(report, dry_run=args.dry_run))


def _backfill(spark: "SparkSession", args: Namespace, place: PipelineContext, tell: Tell) -> None:
    options = _options(args, place)
    if args.max_queue_depth is not None:
        options["maxQueueDepth"] = str(args.max_queue_depth)
    loaded = skipped = jobs = 0
    for day, report in backfill(spark, source_of(args), args.name, args.since, args.until, options):
        tell(f"{day}: {said_of(report, dry_run=args.dry_run)}")
        if report is not None and report.skipped:
            skipped += 1
            continue
        loaded += 1
        jobs += report.inserted if report is not None else 0
    tell(f"{loaded:,} days, {jobs:,} new jobs; {skipped:,} days were there.")


def _rollups(spark: "SparkSession", args: Namespace, place: PipelineContext, tell: Tell) -> None:
    from djqueue.contrib.spark.tables import ATTEMPTS, JOBS

    from .archive import archived
    from .rollups import rollups
    from .store import store

    until = args.until or whole_hour(to_datetime(SYSTEM_CLOCK.now()))
    since = args.since or until - timedelta(hours=1)
    if until <= since:
        raise OptionError(f"the range from {since:%Y-%m-%dT%H} until {until:%Y-%m-%dT%H} contains no hour")
    with place.tables() as alias:
        if args.archive is not None:
            jobs, attempts = archived(spark, args.archive), archived(spark, args.archive, ATTEMPTS)
            if args.queue is not None:
                jobs, attempts = (rows.where(rows.queue == args.queue) for rows in (jobs, attempts))
        else:
            only = {} if args.queue is None else {"queue": args.queue}
            jobs = table(spark, place, JOBS.name, **only)
            when = {"since": since.isoformat(), "until": until.isoformat()}
            attempts = table(spark, place, ATTEMPTS.name, **only, **when)
        hours, rows = store(rollups(jobs, attempts, since, until), alias)
    tell(f"{rows:,} rollups of {hours:,} hours, {since:%Y-%m-%d %H:00} to {until:%Y-%m-%d %H:00} UTC.")


def _archive(spark: "SparkSession", args: Namespace, place: PipelineContext, tell: Tell) -> None:
    from .archive import EARLIEST, archive, ended, written
    from .purge import purge

    until = args.until or to_datetime(SYSTEM_CLOCK.now()).astimezone(UTC).date()
    only = {} if args.queue is None else {"queue": args.queue}
    everything = table(spark, place, "jobs", includePayload="true", **only)
    jobs = ended(everything, args.since or EARLIEST, until, args.states).persist()
    try:
        done = archive(spark, args.path, jobs, table(spark, place, "attempts", **only))
        tell(
            f"{done.jobs:,} jobs and {done.attempts:,} runs are in {args.path}: "
            f"{done.partitions:,} days of queues, until {until}, which is not in it."
        )
        if args.purge:
            with place.storage() as storage:
                purged = purge(storage, written(spark, args.path, jobs))
            tell(_counted(purged, PURGED))
    finally:
        jobs.unpersist()


def _restore(spark: "SparkSession", args: Namespace, place: PipelineContext, tell: Tell) -> None:
    from .replay import selected
    from .restore import restore

    jobs = selected(spark, args.path, args.where, args.since, args.until)
    with place.tables() as alias:
        done = restore(spark, args.path, jobs, alias, args.keep)
    tell(f"{done.inserted:,} jobs are in the tables for {args.keep:,} days, {done.there:,} were there.")


def _replay(spark: "SparkSession", args: Namespace, place: PipelineContext, tell: Tell) -> None:
    from .replay import replay_archived, replay_dead, selected

    if args.archive is not None:
        jobs = selected(spark, args.archive, args.where, args.since, args.until)
        report = replay_archived(jobs, args.name, _options(args, place))
        tell(said_of(report, dry_run=args.dry_run))
        return
    days = {name: day.isoformat() for name in ("since", "until") if (day := getattr(args, name)) is not None}
    letters = table(spark, place, "dead", **days).where(args.where)
    report = replay_dead(letters, _options(args, place))
    tell(UNKNOWN if report is None else _counted(report.answers, RETRIED))


COMMANDS: "Mapping[str, Callable[[SparkSession, Namespace, PipelineContext, Tell], None]]" = {
    "enqueue": _enqueue,
    "rollups": _rollups,
    "archive": _archive,
    "restore": _restore,
    "replay": _replay,
    "backfill": _backfill,
}
PURGED = {"removed": "removed", "changed": "left, as they have changed", "gone": "gone"}
RETRIED = {
    "retried": "retried",
    "not_found": "gone",
    "not_failed": "retried by others",
    "unique_key_taken": "left, as their unique key is taken",
    "rejected": "left, as they need another payload",
    "blocked_again": "blocked until their dependencies complete",
    "dependency_gone": "left, as a dependency was cancelled or removed",
}


def table(spark: "SparkSession", place: PipelineContext, name: str, **options: str) -> "DataFrame":
    """A table of the storage."""
    return spark.read.format("djqueue").options(table=name, **place.options, **options).load()


def _options(args: Namespace, place: PipelineContext) -> dict[str, str]:
    """Those of a write."""
    said = {name: value for name in ("queue", "job") if (value := getattr(args, name, None)) is not None}
    for name, _ in args.option:
        if key_of(name) in said:
            raise OptionError(
                f"--{key_of(name)} and --option {name}=... set the same option: remove one of them"
            )
    return {**place.options, **said, **dict(args.option), **({"dryRun": "true"} if args.dry_run else {})}


def said_of(report: WriteReport | None, *, dry_run: bool = False) -> str:
    """What became of a write, in a line."""
    if report is None:
        return UNKNOWN
    rejected = sum(report.rejected.values())
    why = ", ".join(f"{many:,} {reason}" for reason, many in sorted(report.rejected.items()))
    lost = f"; {rejected:,} rows are no jobs ({why})" if rejected else ""
    lost += f", {report.letters:,} of which are dead letters" if report.letters else ""
    if dry_run:
        return f"{report.rows - rejected:,} jobs would come{lost}; nothing was enqueued."
    if report.skipped:
        return f"this was published before: nothing was enqueued{lost}."
    return f"{report.inserted:,} new jobs, {report.duplicates:,} were there{lost}."


def _counted(done: Mapping[str, int], words: Mapping[str, str]) -> str:
    first = next(iter(words))
    told = [f"{done.get(word, 0):,} {words[word]}" for word in words if done.get(word) or word == first]
    return ", ".join(told) + "."
