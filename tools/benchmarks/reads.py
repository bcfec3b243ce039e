"""`python -m tools.benchmarks.reads`: Spark reads a million jobs, at rest and while workers run them.

The workers are `manage.py runworkers` with default settings, and share two cores with Spark and the server.
A read must return each job once, in one of its states; otherwise, the benchmark fails. `make test-spark`
installs Spark.
"""

import argparse
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.contrib.spark.sessions import session
from tools.benchmarks.projects import Site

PLACES = ("redis", "postgresql", "sqlite")
AT_ONCE = 100_000
PARTITIONS = 4
START = 300.0
"""Seconds in which the first job must have run; other programs may share the machine."""
SETTINGS = {"spark.driver.extraJavaOptions": "", "spark.sql.execution.arrow.maxRecordsPerBatch": "10000"}


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.reads", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000, help="default: 1,000,000")
    parser.add_argument("--place", choices=PLACES, action="append", help="default: all")
    parser.add_argument("--runs", type=int, default=3, help="reads of each kind (default: 3)")
    options = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} cores, CPython {platform.python_version()}, ", end="")
    print(f"pyspark {version('pyspark')}")
    with tempfile.TemporaryDirectory() as folder, session("local[2]", Path(folder), SETTINGS) as spark:
        for place in options.place or PLACES:
            with Site(place) as site:
                measure(spark, place, site, options.jobs, options.runs)
    return 0


def measure(spark: Any, place: str, site: Site, jobs: int, runs: int) -> None:
    """Print a line for each read."""
    for first in range(0, jobs, AT_ONCE):
        site.client.call("bulk", min(AT_ONCE, jobs - first))
    for _ in range(runs):
        read(spark, place, site, jobs, "at rest")
    start = time.perf_counter()
    site.start()
    ran = site.marks.wait_for(1, site.check, idle=START)
    print(f"{place:10} first job run {ran - start:.1f} s after runworkers was started", flush=True)
    for _ in range(runs):
        read(spark, place, site, jobs, "running")
    site.check()


def read(spark: Any, place: str, site: Site, jobs: int, when: str) -> None:
    """Read all jobs. Raises RuntimeError unless each is returned once."""
    import pyarrow.compute as arrow

    before, start = site.marks.count(), time.perf_counter()
    frame = spark.read.format("djqueue").options(url=site.url, numPartitions=PARTITIONS).load()
    found = frame.select("id", "state").toArrow()
    took, ran = time.perf_counter() - start, site.marks.count() - before
    once = arrow.count_distinct(found["id"]).as_py()
    if not found.num_rows == once == jobs:
        raise RuntimeError(f"{place}: {found.num_rows} rows have {once} of {jobs} jobs")
    states = {each["values"].as_py(): each["counts"].as_py() for each in arrow.value_counts(found["state"])}
    said = ", ".join(f"{count:,} {state}" for state, count in sorted(states.items()))
    rate = f"{jobs / took:>9,.0f} jobs/s in {took:5.1f} s"
    print(f"{place:10} {when:8} {rate}; {ran:,} ran; {said}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
