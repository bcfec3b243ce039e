"""The steps of the pipeline, one after the other, each with its time and its counts."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from django.conf import settings
from django.core.management import CommandError
from django.db import DEFAULT_DB_ALIAS

from demo_project.demo.children import PORT, ChildError, Children, free_port
from demo_project.demo.progress import Progress
from demo_project.demo.run import PROGRESS_SECONDS, follow_for_ever, prepare_database, start_server
from demo_project.demo.servers import redis_in
from demo_project.demo.tally import differences, table
from demo_project.flights.dataset import Dataset
from djqueue.contrib.spark import WriteReport, enqueue

from .session import expect_spark, spark_in
from .tally import NAME, QUEUE, Account, finished_jobs, queued_jobs, tally

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WORKERS = 2
CONCURRENCY = "4"


def run(season: str, month: int | None, port: int, *, serve: bool) -> int:
    """Bring a season through Spark once; 0 if its counts add up, 1 if not or if something fails before."""
    started = time.monotonic()
    folder = Path(settings.VAR_DIR)
    try:
        expect_spark()
        with redis_in(folder, port), Children(folder / "log") as children:
            prepare_database()
            if serve:
                start_server(children, free_port(PORT))
            counts = list(tally(pipeline(season, month, folder), month))
            print(table(counts))
            for difference in differences(counts):
                print(f"The counts do not add up: {difference}", file=sys.stderr)
            print(f"{time.monotonic() - started:.0f} seconds; all of it lies in {folder}", flush=True)
            if serve:
                stay_up(children)
    except (ChildError, CommandError) as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if differences(counts) else 0


def pipeline(season: str, month: int | None, folder: Path) -> Account:
    """All steps; what they say of themselves."""
    account = Account()
    with ExitStack() as stack:
        with step("Starting Spark") as tell:
            spark = stack.enter_context(spark_in(folder))
            tell(f"version {spark.version}, two threads")
        claims = select(spark, month, folder, account)
        enqueue_claims(claims, season, account)
        work(folder)
        keep_history(spark, folder, account)
    return account


@contextmanager
def step(what: str) -> Iterator[Callable[[str], None]]:
    """Say what a step does, and then what came of it, and in how many seconds."""
    print(what, flush=True)
    began, told = time.monotonic(), [""]
    yield told.append
    print(f"{time.monotonic() - began:>7.1f} s  {told[-1]}", flush=True)


def select(spark: "SparkSession", month: int | None, folder: Path, account: Account) -> "DataFrame":
    """The claims among the flights."""
    from . import flights

    with step("Reading the flights, and finding those badly delayed") as tell:
        rows = flights.flights(spark, flights.unpacked(Dataset.installed(), folder), month)
        counts = dict(rows.groupBy(flights.is_badly_delayed()).count().collect())
        account.kept, account.delayed = counts.get(False, 0), counts.get(True, 0)
        tell(f"{account.kept + account.delayed:,} read, {account.delayed:,} of them badly delayed")
    return flights.claims(rows)


def enqueue_claims(claims: "DataFrame", season: str, account: Account) -> None:
    """A job for each claim, in one write that can be made again. The settings say where Redis is."""

    def write() -> WriteReport:
        report = enqueue(
            claims,
            QUEUE,
            NAME,
            id_column="id",
            priority_column="priority",
            retention=settings.KEPT.total_seconds(),
            txn_app_id=f"season-{season}",
            txn_version=1,
        )
        if report is None:
            raise ChildError("Redis has no report of the write.")
        return report

    with step("Enqueueing a job for each") as tell:
        report = write()
        account.inserted, account.duplicates = report.inserted, report.duplicates
        was = "were published by an earlier run" if report.skipped else "are new"
        tell(f"{report.inserted:,} {was}, {report.duplicates:,} duplicates")
    with step("The same write again") as tell:
        before = queued_jobs()
        write()
        account.repeated = queued_jobs() - before
        tell(f"{account.repeated:,} are new")


def work(folder: Path) -> None:
    """Processes that do the jobs, and copy them into the tables."""
    with step(f"Working the jobs in {WORKERS} processes") as tell, Children(folder / "log") as children:
        arguments = ("runworkers", "--until-empty", "--concurrency", CONCURRENCY)
        workers = [children.start(f"workers {number + 1}", *arguments) for number in range(WORKERS)]
        progress = Progress([QUEUE])
        while any(worker.running for worker in workers):
            time.sleep(PROGRESS_SECONDS)
            progress.tell()
        for worker in workers:
            worker.expect_success()
        completed, dead = finished_jobs()
        tell(f"{completed:,} completed, {dead:,} dead")


def keep_history(spark: "SparkSession", folder: Path, account: Account) -> None:
    """What has ended as Parquet, and that in numbers by the hour, in the tables."""
    from djqueue.contrib.spark.pipeline.archive import EARLIEST, archive, archived, ended, start_of_day
    from djqueue.contrib.spark.pipeline.rollups import rollups, store
    from djqueue.contrib.spark.tables import ATTEMPTS

    path = str(folder / "archive")
    tomorrow = datetime.now(UTC).date() + timedelta(days=1)
    source = {"url": settings.REDIS_URL, "queue": QUEUE}
    with step("Archiving what has ended") as tell:
        chosen = {"table": "jobs", "includePayload": True, "values": "binary"}
        claims = spark.read.format("djqueue").options(**source, **chosen).load()
        runs = spark.read.format("djqueue").options(**source, table="attempts").load()
        done = archive(spark, path, ended(claims, EARLIEST, tomorrow).persist(), runs)
        account.archived = archived(spark, path).count()
        tell(f"{done.jobs:,} jobs and {done.attempts:,} attempts archived in {path}")
    with step("Rolling the archive up, by hours") as tell:
        until = start_of_day(tomorrow)
        numbers = rollups(
            archived(spark, path), archived(spark, path, ATTEMPTS), start_of_day(EARLIEST), until
        )
        hours, rows = store(numbers, DEFAULT_DB_ALIAS)
        tell(f"{rows:,} rollups of {hours:,} hours")


def stay_up(children: Children) -> None:
    """Serve, and work what is retried or enqueued in the dashboard, until Ctrl-C."""
    children.start("workers", "runworkers", "--concurrency", CONCURRENCY)
    print("Server and workers stay up until Ctrl-C.", flush=True)
    follow_for_ever(children, Progress([QUEUE]).tell)
