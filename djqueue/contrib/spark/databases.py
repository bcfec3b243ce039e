"""Connect to a database storage by URL. Import this module only after Django is set up; see `aliases`."""

from django.apps import apps
from django.db import Error, connections

from djqueue.core.errors import StorageUnavailableError
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.tables.dberrors import unavailable

from .aliases import is_added


class UrlDatabase(DatabaseStorage):
    """Database storage that enqueues, stages and reads, without the settings of a project."""

    has_settings = False
    _lacks_spark_tables = False

    def connect(self) -> None:
        """Check that the database responds and has djqueue's tables. Raises StorageUnavailableError."""
        connection = connections[self.alias]
        try:
            existing = set(connection.introspection.table_names())
        except Error as error:
            raise unavailable(self.alias, error) from None
        if missing := sorted(_tables("djqueue") - existing):
            raise StorageUnavailableError(
                f"{self.describe()} has no table {missing[0]}: run manage.py migrate with this version of "
                "djqueue"
            )
        self._lacks_spark_tables = super().has_spark_tables and not _tables("djqueue_spark") <= existing

    @property
    def has_spark_tables(self) -> bool:
        """Whether this process and the database have the tables of `djqueue.contrib.spark`."""
        return super().has_spark_tables and not self._lacks_spark_tables

    def close(self) -> None:
        """Close the storage. A connection of the project itself stays open."""
        super().close()
        if is_added(self.alias):
            connections[self.alias].close()

    def describe(self) -> str:
        """Return the database's location without credentials."""
        return f"database {self.alias}" if is_added(self.alias) else super().describe()


def _tables(label: str) -> set[str]:
    return {model._meta.db_table for model in apps.get_app_config(label).get_models() if model._meta.managed}
