"""The flights as Spark sees them: the data set's own file, and the demo's rule as columns."""

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.functions import coalesce, col, concat_ws, date_format, expr, lit, when

from demo_project.flights.dataset import MISSING, Dataset
from demo_project.flights.rules import BADLY_DELAYED_MINUTES
from demo_project.flights.season import LONG_WAIT_MINUTES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

FILE = "flights.csv"
SCHEMA = """
    year int, month int, day int, dep_time int, sched_dep_time int, dep_delay int, arr_time int,
    sched_arr_time int, arr_delay int, carrier string, flight int, tailnum string, origin string,
    dest string, air_time int, distance int, hour int, minute int, time_hour timestamp
"""


def unpacked(dataset: Dataset, folder: Path) -> Path:
    """The file of flights, for Spark, which reads no zip."""
    plain = dataset.directory / FILE
    if plain.exists():
        return plain
    with zipfile.ZipFile(dataset.directory / f"{FILE}.zip") as archive:
        return Path(archive.extract(FILE, folder))


def flights(spark: "SparkSession", file: Path, month: int | None) -> "DataFrame":
    """The flights of the season: of one month, or all."""
    rows = spark.read.csv(str(file), schema=SCHEMA, header=True, nullValue=MISSING, enforceSchema=False)
    return rows if month is None else rows.where(col("month") == month)


def is_badly_delayed() -> "Column":
    """The rule of rules.py; one that left late and whose arrival is unknown cannot be assessed."""
    late = col("arr_delay") >= BADLY_DELAYED_MINUTES
    left_late = col("arr_delay").isNull() & (col("dep_delay") >= BADLY_DELAYED_MINUTES)
    return coalesce(late | left_late, lit(False))


def claims(rows: "DataFrame") -> "DataFrame":
    """What is to be enqueued of the badly delayed ones: arguments, and columns that options use."""
    departure = expr("time_hour + make_interval(0, 0, 0, 0, 0, minute)")
    return rows.where(is_badly_delayed()).select(
        col("carrier").alias("airline"),
        col("flight").alias("number"),
        departure.alias("scheduled_departure"),
        concat_ws("-", "carrier", "flight", date_format(departure, "yyyyMMdd'T'HHmm")).alias("id"),
        when(col("arr_delay") >= LONG_WAIT_MINUTES, 10).otherwise(0).alias("priority"),
    )
