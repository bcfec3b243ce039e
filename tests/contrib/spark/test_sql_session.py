"""Tables and views of SQL; `make test-spark` installs Spark."""

from contextlib import closing

import pytest

from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage

pytest.importorskip("pyspark", reason="Spark is not installed here: see make test-spark")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

COLUMNS = "(customer STRING, total DOUBLE)"
TABLES = ("receipts", "made", "all_jobs")


@pytest.fixture
def storage(redis_server):
    redis_server.clean()
    with closing(RedisStorage(url=redis_server.url)) as storage:
        yield storage


@pytest.fixture
def options(redis_server):
    return {"url": redis_server.url, "queue": "mail", "job": "shop.send"}


@pytest.fixture
def sql(spark, options):
    """Run a statement, in which {given} and {named} are the options of OPTIONS and WITH."""
    given = ", ".join(f"{name} '{value}'" for name, value in options.items())
    named = ", ".join(f"{name} = '{value}'" for name, value in options.items())
    rows = spark.createDataFrame([("ann", 1.5), ("ben", 2.5)], COLUMNS.strip("()"))
    rows.createOrReplaceTempView("totals")
    yield lambda text: spark.sql(text.format(given=given, named=named, url=options["url"]))
    for name in TABLES:
        spark.sql(f"DROP TABLE IF EXISTS {name}")
    spark.sql("DROP VIEW IF EXISTS receipts_view")


def waiting(storage):
    return storage.reads.counts("mail")[State.WAITING]


def test_rows_inserted_into_a_view_or_a_table_become_jobs(sql, storage):
    sql(f"CREATE TEMPORARY VIEW receipts_view {COLUMNS} USING djqueue OPTIONS ({{given}})")
    sql("INSERT INTO receipts_view SELECT * FROM totals")
    sql("INSERT INTO receipts_view VALUES ('cleo', 3.5)")
    assert waiting(storage) == 3

    sql(f"CREATE TABLE receipts {COLUMNS} USING djqueue")
    sql("INSERT INTO receipts WITH ({named}) SELECT * FROM totals")

    assert waiting(storage) == 5


def test_rows_are_saved_as_a_table_that_spark_creates(spark, sql, storage, options):
    totals = spark.table("totals")

    totals.write.format("djqueue").options(**options).mode("append").saveAsTable("made")
    totals.writeTo("made").options(**options).append()

    assert waiting(storage) == 4


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("INSERT INTO receipts SELECT * FROM totals", r"use INSERT INTO name WITH \(url = 'env:NAME', queue"),
        (
            "CREATE TABLE made USING djqueue OPTIONS ({given}) AS SELECT * FROM totals",
            "Spark does not pass the options of CREATE TABLE, with or without AS SELECT: use INSERT",
        ),
        (
            "CREATE TABLE made USING djqueue OPTIONS ({given})",
            r"job: not an option of reads: .*CREATE TEMPORARY VIEW name \(customer STRING\) USING djqueue",
        ),
        ("INSERT OVERWRITE receipts WITH ({named}) SELECT * FROM totals", "use .* INSERT INTO"),
        ("SELECT * FROM receipts", r"with SELECT … FROM name WITH \(url = 'env:NAME'\)"),
        ("SELECT * FROM receipts WITH (url = '{url}')", "CREATE statement lists columns is for INSERT INTO"),
    ],
)
def test_statement_that_spark_cannot_run_says_what_does(sql, storage, statement, message):
    sql(f"CREATE TABLE receipts {COLUMNS} USING djqueue OPTIONS ({{given}})")

    with pytest.raises(Exception, match=message):
        sql(statement).collect()

    assert waiting(storage) == 0
    assert sql("SHOW TABLES LIKE 'made'").count() == 0


def test_table_of_the_catalog_is_read_with_the_options_of_the_query(sql, storage):
    sql("CREATE TABLE all_jobs USING djqueue OPTIONS (url '{url}')")

    assert sql("SELECT id FROM all_jobs WITH (url = '{url}')").count() == 0
