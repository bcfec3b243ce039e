"""Options that the data source rejects for streams, where they would have no effect."""

import pytest

types = pytest.importorskip("pyspark.sql.types", reason="Spark is not installed here: see make test-spark")

from djqueue.contrib.spark import source  # noqa: E402
from djqueue.core.errors import OptionError  # noqa: E402

pytestmark = pytest.mark.spark
WRITE = {"url": "redis://127.0.0.1/0", "queue": "emails", "job": "shop.send"}


@pytest.mark.parametrize("more", [{"writeId": "tonight"}, {"txnAppId": "nightly", "txnVersion": "7"}])
def test_stream_rejects_a_name_for_its_writes(more):
    schema = types.StructType([types.StructField("n", types.LongType())])

    with pytest.raises(OptionError, match=f"{next(iter(more))}.*: not supported by streams"):
        source.DjqueueDataSource({**WRITE, **more}).streamWriter(schema, False)


def test_stream_in_complete_mode_is_rejected():
    schema = types.StructType([types.StructField("n", types.LongType())])

    with pytest.raises(OptionError, match="outputMode: complete is not supported"):
        source.DjqueueDataSource(WRITE).streamWriter(schema, True)


@pytest.mark.parametrize(
    "column", [types.StructField("id", types.LongType()), types.StructField("ID", types.StringType())]
)
def test_read_rejects_a_schema_other_than_its_columns(column):
    made = source.DjqueueDataSource({"url": WRITE["url"], "columns": "id"})

    with pytest.raises(OptionError, match="schema: cannot be changed: select columns with the option"):
        made.reader(types.StructType([column]))


def test_limit_that_spark_would_ignore_is_rejected(monkeypatch):
    monkeypatch.setattr(source, "Limited", object)
    made = source.DjqueueDataSource(
        {"url": WRITE["url"], "table": "events", "columns": "id", "maxRowsPerTrigger": "5"}
    )
    schema = types.StructType([types.StructField("id", types.StringType())])

    with pytest.raises(OptionError, match=r"maxRowsPerTrigger: requires Spark 4\.2 or later"):
        made.streamReader(schema)
