"""Make Spark discover `format("djqueue")`; installed as the top-level package `pyspark_djqueue`.

Spark imports every top-level package whose name starts with `pyspark_`, and ignores all of them if one
raises. This package therefore never raises on import, and imports only pyspark until the format is used.
"""

from typing import Any

try:
    from pyspark.sql.datasource import DataSource
except ImportError:  # Spark 3, or not installed.
    pass
else:

    class DefaultSource(DataSource):
        """`format("djqueue")`, loaded on first use."""

        @classmethod
        def name(cls) -> str:
            """Return the format's name."""
            return "djqueue"

        def _source(self) -> Any:
            from djqueue.contrib.spark.source import DjqueueDataSource

            return DjqueueDataSource(dict(self.options))

        def schema(self) -> Any:
            """Return the schema of the table that the options select."""
            return self._source().schema()

        def reader(self, schema: Any) -> Any:
            """Return a reader for `load()`."""
            return self._source().reader(schema)

        def streamReader(self, schema: Any) -> Any:  # noqa: N802
            """Return a reader for a stream."""
            return self._source().streamReader(schema)

        def writer(self, schema: Any, overwrite: bool) -> Any:
            """Return a writer for `save()`."""
            return self._source().writer(schema, overwrite)

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
            """Return a writer for a streaming query."""
            return self._source().streamWriter(schema, overwrite)
