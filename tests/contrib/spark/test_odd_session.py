"""Unsupported types and values in a Spark session."""

from contextlib import closing

import pytest

from djqueue.codecs import MSGPACK, decode
from djqueue.contrib.spark import enqueue
from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage

pytestmark = [pytest.mark.spark, pytest.mark.slow]
MONTHS = "make_ym_interval(1, 2)"
LATE = "timestamp_micros(253402300800000000)"


@pytest.fixture
def storage(redis_url):
    with closing(RedisStorage(url=redis_url)) as storage:
        yield storage


def arguments(storage):
    jobs = storage.reads.page("emails", State.WAITING, 100)
    return [decode(job.payload, MSGPACK)["kwargs"] for job in jobs]


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        (MONTHS, {}, "odd: a column of type interval year to month can't be written"),
        (
            "map(struct(1 as a), 2)",
            {},
            "odd: a column of type map<struct<a:int>,int> can't be part of a payload",
        ),
        (f"array({MONTHS})", {}, "type array<interval year to month> can't be part of a payload"),
        (
            "timestamp_ntz'2026-01-01 00:00:00'",
            {"runAtColumn": "odd"},
            "runAtColumn: column 'odd' has type timestamp_ntz: it has no time zone; cast it to timestamp",
        ),
    ],
)
@pytest.mark.parametrize("dry", [False, True])
def test_unsupported_column_types_are_rejected_before_tasks_start(
    spark, redis_url, column, options, message, dry
):
    rows = spark.range(3).selectExpr("id as n", f"{column} as odd")

    with pytest.raises(Exception, match="odd") as raised:
        enqueue(rows, "emails", "shop.send", {"url": redis_url, "onError": "skip", "dryRun": dry, **options})

    assert message in str(raised.value)


def test_column_of_an_unsupported_type_can_be_excluded(spark, storage, redis_url):
    rows = spark.range(3).selectExpr("id as n", f"array({MONTHS}) as odd")
    options = {"url": redis_url, "excludeColumns": "odd"}

    for on_error in ("skip", "dead"):
        report = enqueue(rows, "emails", "shop.send", {**options, "onError": on_error})
        assert (report.inserted, report.rejected) == (3, {})

    assert sorted(found["n"] for found in arguments(storage)) == [0, 0, 1, 1, 2, 2]


def test_unsupported_values_invalidate_only_their_rows(spark, storage, redis_url):
    rows = spark.range(10).selectExpr("id as n", f"if(id % 5 = 0, {LATE}, timestamp'2026-01-01') as at")

    report = enqueue(rows, "emails", "shop.send", {"url": redis_url, "onError": "dead"})

    assert (report.rows, report.rejected, report.dead_letters) == (10, {"at": 2}, 2)
    assert sorted(found["n"] for found in arguments(storage)) == [1, 2, 3, 4, 6, 7, 8, 9]
    with pytest.raises(Exception, match=r"of partition .*: at: the value of type timestamp"):
        enqueue(rows, "emails", "shop.send", {"url": redis_url})


def test_variants_and_other_new_types_become_python_values(spark, storage, redis_url):
    rows = spark.sql(
        """SELECT parse_json('{"a": [1, 2.5, null, "x"]}') AS v, array(parse_json('1')) AS list,
        timestamp_ntz'2026-01-01 12:00:00' AS local, interval '1 02:00:00' day to second AS lasts"""
    )

    assert enqueue(rows, "emails", "shop.send", {"url": redis_url}).inserted == 1

    [found] = arguments(storage)
    assert (found["v"]["a"][0], found["v"]["a"][2:], found["list"]) == (1, [None, "x"], [1])
    assert found["local"].isoformat() == "2026-01-01T12:00:00"
    assert found["lasts"].total_seconds() == 26 * 3_600
