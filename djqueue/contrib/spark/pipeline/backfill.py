"""Load a range of days, one at a time and each once. A second run continues where the first one stopped."""

from collections.abc import Iterator, Mapping
from datetime import date, timedelta
from typing import TYPE_CHECKING

from djqueue.contrib.spark import write
from djqueue.contrib.spark.options import key_of
from djqueue.contrib.spark.writing import WriteReport
from djqueue.core.errors import OptionError

from .sources import Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PRIORITY = -10
"""Default priority, which places the jobs behind new ones."""


def backfill(
    spark: "SparkSession", source: Source, name: str, since: date, until: date, options: Mapping[str, str]
) -> Iterator[tuple[date, WriteReport | None]]:
    """Load the rows of each day, and yield its report. Days that were already published are skipped.

    Args:
        spark: The session.
        source: The rows.
        name: The backfill's name. Each day is a transaction of its own, `NAME 2026-01-31`, so earlier days
            can be loaded after later ones.
        since: The first day.
        until: The day after the last one.
        options: Options of the writes.
    """
    source.check_days()
    is_said = {"priority", "prioritycolumn"} & {key_of(option) for option in options}
    given = options if is_said else {"priority": str(PRIORITY), **options}
    for day in days(since, until):
        version = day.strftime("%Y%m%d")
        named = {"txnAppId": f"{name} {day}", "txnVersion": version}
        yield day, write(source.of_day(spark, day), {**given, **named})


def days(since: date, until: date) -> Iterator[date]:
    """Return the days from `since` until before `until`. Raises OptionError if there are none."""
    if until <= since:
        raise OptionError(
            f"the range from {since} until {until} contains no day; until is the day after the last one"
        )
    for number in range((until - since).days):
        yield since + timedelta(days=number)
