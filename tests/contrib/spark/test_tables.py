"""Columns of the tables that Spark reads, without Spark."""

import re

import pytest

from djqueue.contrib.spark.tables import DATABASE, JOBS, REDIS, TABLES

TYPE = re.compile(r"string|binary|boolean|int|bigint|double|timestamp|array<string>")


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_columns_have_unique_names_and_spark_types(table):
    names = [column.name for column in table.columns]

    assert len(set(names)) == len(names)
    assert all(TYPE.fullmatch(column.type) for column in table.columns)
    assert table.time is None or table.time in names
    assert table.kinds <= {REDIS, DATABASE}


def test_payload_is_a_column_only_if_requested():
    assert "payload" not in JOBS.names()
    assert JOBS.names(payload=True)[-1] == "payload"


def test_selected_columns_keep_the_order_of_the_option():
    assert JOBS.ddl(["concurrency_key", "id"]) == "`concurrency_key` string, `id` string"
    with pytest.raises(KeyError, match="payload"):
        JOBS.chosen(["payload"])
