"""Columns of the tables that Spark reads, without Spark."""

import re

import pytest

from djqueue.contrib.spark.tables import DATABASE, JOBS, REDIS, TABLES

TYPE = re.compile(r"string|binary|boolean|int|bigint|double|timestamp|array<string>")


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_columns_have_names_of_their_own_and_types_of_sparks(table):
    names = [column.name for column in table.columns]

    assert len(set(names)) == len(names)
    assert all(TYPE.fullmatch(column.type) for column in table.columns)
    assert table.time is None or table.time in names
    assert table.kinds <= {REDIS, DATABASE}


def test_a_payload_is_a_column_only_if_it_is_asked_for():
    assert "payload" not in JOBS.names()
    assert JOBS.names(payload=True)[-1] == "payload"


def test_columns_are_chosen_in_the_order_in_which_they_are_named():
    assert JOBS.ddl(["group", "id"]) == "`group` string, `id` string"
    with pytest.raises(KeyError, match="payload"):
        JOBS.chosen(["payload"])
