"""A range of days, loaded one after the other, each once: a second run goes on where the first one ended."""

from collections.abc import Iterator, Mapping
from datetime import date
from typing import TYPE_CHECKING

from djqueue.contrib.spark import write
from djqueue.contrib.spark.options import key_of
from djqueue.contrib.spark.writing import WriteReport

from .days import days
from .sources import Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PRIORITY = -10
"""Behind what comes while the backfill goes on, unless it is given another one."""


def backfill(
    spark: "SparkSession", source: Source, name: str, since: date, until: date, options: Mapping[str, str]
) -> Iterator[tuple[date, WriteReport | None]]:
    """Load the rows of each day, and say what became of them; a day that was published is skipped.

    name: of this backfill: each of its days is one transaction, `NAME 2026-01-31`. They are apart, so that
        earlier days may be loaded after later ones.
    options: of the writes.
    """
    source.check_days()
    is_said = {"priority", "prioritycolumn"} & {key_of(option) for option in options}
    given = options if is_said else {"priority": str(PRIORITY), **options}
    for day in days(since, until):
        version = day.strftime("%Y%m%d")
        named = {"txnAppId": f"{name} {day}", "txnVersion": version}
        yield day, write(source.of_day(spark, day), {**given, **named})
