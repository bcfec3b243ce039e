"""Killed drivers: repeating the load enqueues each row once."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tests.contrib.spark.cluster.checks import QUEUE, are_once, goes_by_itself, multiset

pytest.importorskip("pyspark", reason="Spark is not installed here: see make test-spark")

from tests.contrib.spark.cluster.faulty import STEPS

pytestmark = [pytest.mark.spark_cluster, pytest.mark.slow]

ROWS = 2_000
KILLS = int(os.environ.get("DJQUEUE_TEST_KILLS", "4"))
"""Of drivers of one stream: `DJQUEUE_TEST_KILLS=20` makes a soak of it, and of the other test."""
SOAKS = KILLS > 4
MOMENTS = ("after stage", "after begin", "before end", "after end", "amid publish", "before begin")
EACH = 120
"""Rows of a batch of a stream."""


def load(url: str, queue: str, **more: Any) -> dict[str, Any]:
    named = {"txnAppId": f"of {queue}", "txnVersion": 3, "batchSize": 200}
    return {"rows": ROWS, "options": {"url": url, "queue": queue, "job": "shop.send", **named, **more}}


def test_driver_killed_during_its_commit_can_be_repeated(
    storage: Any, redis_server: Any, drive: Callable[..., int], tmp_path: Any
) -> None:
    url, before = redis_server.url, []
    steps = STEPS if SOAKS else ["amid publish"]  # In the others, drivers of a stream die.
    for number, step in enumerate(steps):
        queue = f"emails-{number}"
        deadly = load(url, queue, dies=step, marks=str(tmp_path))

        # Each driver finishes the previous load, and then dies at the next step.
        assert drive(*before, deadly) == -signal.SIGKILL

        assert (tmp_path / f"died {step}").exists()
        there = len(multiset(storage, queue))
        assert {
            "amid publish": 0 < there < ROWS,
            "before end": there == ROWS,
            "after end": there == ROWS,
        }.get(step, there == 0), f"{there} jobs after a death {step}"
        before = [load(url, queue)]
    twice = load(url, "emails-0")

    assert drive(*before, twice, twice) == 0

    for number, _ in enumerate(steps):
        are_once(storage, range(ROWS), f"emails-{number}")
    goes_by_itself(storage)


def test_repeatedly_killed_stream_continues(
    storage: Any, redis_server: Any, drive: Callable[..., int], tmp_path: Any
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    files = KILLS + 2
    for number in range(files):
        numbers = pyarrow.table({"n": range(number * EACH, number * EACH + EACH)})
        parquet.write_table(numbers, source / f"{number:03}.parquet")
    stream = {"source": str(source), "checkpoint": str(tmp_path / "checkpoint")}
    options = {"url": redis_server.url, "queue": QUEUE, "job": "shop.send", "batchSize": 25}

    for kill in range(KILLS):
        marks = tmp_path / f"kill-{kill}"
        marks.mkdir()
        moment = MOMENTS[kill % len(MOMENTS)]
        deadly = {**options, "dies": moment, "marks": str(marks)}
        assert drive({**stream, "options": deadly}) == -signal.SIGKILL
        assert (marks / f"died {moment}").exists()
    assert drive({**stream, "options": options}) == 0

    are_once(storage, range(files * EACH))
    goes_by_itself(storage)
