"""Sources of rows (files, tables or queries), and backfills, which load them day by day.

Each day is loaded once: a second run of a backfill continues where the first one stopped.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import TYPE_CHECKING

from djqueue.contrib.spark import write
from djqueue.contrib.spark.options import key_of
from djqueue.contrib.spark.reporting import WriteReport
from djqueue.core.errors import OptionError
from djqueue.core.suggest import nearest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARQUET, CSV, JSON, TABLE, SQL = KINDS = ("parquet", "csv", "json", "table", "sql")
DAY = "{date}"
"""Placeholder for the day in a path or query, such as 2026-01-31."""
PRIORITY = -10
"""Default priority of a backfill, which places its jobs behind new ones."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The location of rows, and their selected columns."""

    kind: str
    """One of `KINDS`."""
    where: str
    """A path, a table name, or a query. A backfill replaces `{date}` with the day."""
    schema: str | None = None
    """The DDL schema of CSV and JSON. By default, CSV values are strings, with names in the first line, and
    Spark infers the schema of JSON."""
    columns: tuple[str, ...] = ()
    """Selected columns; all if empty."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """New column names by old name."""
    day_column: str | None = None
    """The column with a row's date or time, for backfills without `{date}`."""

    def read(self, spark: "SparkSession") -> "DataFrame":
        """Return all rows. Raises OptionError for a missing column."""
        if DAY in self.where:
            raise OptionError(f"{self.kind}: {DAY} is supported only by a backfill")
        return self._shaped(self._rows(spark, self.where))

    def of_day(self, spark: "SparkSession", day: date) -> "DataFrame":
        """Return the rows of one day. Raises OptionError for a missing column."""
        if self.day_column is None:
            return self._shaped(self._rows(spark, self.where.replace(DAY, day.isoformat())))
        from pyspark.sql import functions as sql

        rows = self._rows(spark, self.where)
        _check([self.day_column], rows.columns)
        return self._shaped(rows.where(sql.to_date(_named(self.day_column)) == sql.lit(day)))

    def check_days(self) -> None:
        """Raise OptionError unless the source can select the rows of one day."""
        if (self.day_column is None) == (DAY not in self.where):
            raise OptionError(
                f"a backfill must select the rows of one day: use {DAY} in the path or query, or "
                "--date-column NAME"
            )

    def _rows(self, spark: "SparkSession", where: str) -> "DataFrame":
        if self.kind == SQL:
            return spark.sql(where)
        if self.kind == TABLE:
            return spark.table(where)
        # Fail on malformed records instead of dropping them.
        reader = spark.read.option("mode", "FAILFAST")
        if self.schema is not None:
            reader = reader.schema(self.schema)
        if self.kind == CSV:
            return reader.option("header", True).option("enforceSchema", False).csv(where)
        return reader.json(where) if self.kind == JSON else reader.parquet(where)

    def _shaped(self, rows: "DataFrame") -> "DataFrame":
        _check([*self.columns, *self.renamed], rows.columns)
        if self.columns:
            chosen = list(dict.fromkeys([*self.columns, *self.renamed]))
            rows = rows.select(*(_named(name) for name in chosen))
        return rows.withColumnsRenamed(dict(self.renamed)) if self.renamed else rows


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
    has_priority = {"priority", "prioritycolumn"} & {key_of(option) for option in options}
    options_of_all = options if has_priority else {"priority": str(PRIORITY), **options}
    for day in days(since, until):
        version = day.strftime("%Y%m%d")
        named = {"txnAppId": f"{name} {day}", "txnVersion": version}
        yield day, write(source.of_day(spark, day), {**options_of_all, **named})


def days(since: date, until: date) -> Iterator[date]:
    """Return the days from `since` until before `until`. Raises OptionError if there are none."""
    if until <= since:
        raise OptionError(
            f"the range from {since} until {until} contains no day; until is the day after the last one"
        )
    for number in range((until - since).days):
        yield since + timedelta(days=number)


def _check(wanted: list[str], columns: list[str]) -> None:
    for name in wanted:
        if name not in columns:
            raise OptionError(f"no column {name!r}{nearest(name, columns)}")


def _named(column: str) -> str:
    """Quote a column name, so that dots are part of it."""
    return "`" + column.replace("`", "``") + "`"
