"""`pyspark_djqueue`: how Spark finds `format("djqueue")` by itself.

Spark imports every top-level package whose name begins with `pyspark_`, and gives up on all of them if one
raises: so this one never does, and imports nothing but pyspark before it is used.
"""

from typing import Any

try:
    from pyspark.sql.datasource import DataSource
except ImportError:  # Spark 3, or none
    pass
else:

    class DefaultSource(DataSource):
        """`format("djqueue")`, loaded when it is used."""

        @classmethod
        def name(cls) -> str:
            """See `DataSource`."""
            return "djqueue"

        def _source(self) -> Any:
            from djqueue.contrib.spark.source import DjqueueDataSource

            return DjqueueDataSource(dict(self.options))

        def schema(self) -> Any:
            """See `DataSource`."""
            return self._source().schema()

        def reader(self, schema: Any) -> Any:
            """See `DataSource`."""
            return self._source().reader(schema)

        def streamReader(self, schema: Any) -> Any:  # noqa: N802
            """See `DataSource`."""
            return self._source().streamReader(schema)

        def writer(self, schema: Any, overwrite: bool) -> Any:
            """See `DataSource`."""
            return self._source().writer(schema, overwrite)

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
            """See `DataSource`."""
            return self._source().streamWriter(schema, overwrite)
