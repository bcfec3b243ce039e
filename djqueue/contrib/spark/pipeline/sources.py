"""What is loaded: files, tables or queries, with the columns chosen and renamed; whole, or day by day."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING

from djqueue.core.errors import OptionError
from djqueue.core.suggest import nearest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARQUET, CSV, JSON, TABLE, SQL = KINDS = ("parquet", "csv", "json", "table", "sql")
DAY = "{date}"
"""In a path or a query: the day that is loaded, as 2026-01-31."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where rows are, and which of their columns are taken."""

    kind: str
    """One of `KINDS`."""
    where: str
    """A path, a table's name, or a query; the day goes where `{date}` stands."""
    schema: str | None = None
    """Of CSV and JSON, as DDL; without it CSV is texts under the names of its first line, and JSON is as
    Spark finds it."""
    columns: tuple[str, ...] = ()
    """All of them unless some are named."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """New names by the old ones."""
    day_column: str | None = None
    """The column with the day, or time, of a row; if the days are not told apart by `{date}`."""

    def read(self, spark: "SparkSession") -> "DataFrame":
        """All rows. Raises OptionError for a column that is not there."""
        if DAY in self.where:
            raise OptionError(f"{self.kind}: {DAY} is supported only by a backfill")
        return self._shaped(self._rows(spark, self.where))

    def of_day(self, spark: "SparkSession", day: date) -> "DataFrame":
        """The rows of one day. Raises OptionError for a column that is not there."""
        if self.day_column is None:
            return self._shaped(self._rows(spark, self.where.replace(DAY, day.isoformat())))
        from pyspark.sql import functions as sql

        rows = self._rows(spark, self.where)
        _check([self.day_column], rows.columns)
        return self._shaped(rows.where(sql.to_date(_named(self.day_column)) == sql.lit(day)))

    def check_days(self) -> None:
        """Raise OptionError unless the rows of one day can be told from the others'."""
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
        # What cannot be read fails the load, and is not passed over as nothing.
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


def _check(wanted: list[str], columns: list[str]) -> None:
    for name in wanted:
        if name not in columns:
            raise OptionError(f"no column {name!r}{nearest(name, columns)}")


def _named(column: str) -> str:
    """For Spark: dots and the like are a part of the name."""
    return "`" + column.replace("`", "``") + "`"
