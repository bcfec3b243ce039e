"""The database storage that a URL names. To be imported when Django is set up: see `aliases`."""

from django.apps import apps
from django.db import Error, connections

from djqueue.core.errors import StorageUnavailableError
from djqueue.core.shown import in_one_line
from djqueue.storage.database import DatabaseStorage

from .aliases import is_added


class UrlDatabase(DatabaseStorage):
    """Enqueues, stages and reads; never the scheduler, however often it is connected.

    Queues have the modes that are recorded with them: there need be no settings here.
    """

    _lacks_spark_tables = False

    def connect(self) -> None:
        """See whether the database answers, and has its tables. Raises StorageUnavailableError."""
        connection = connections[self.alias]
        try:
            there = set(connection.introspection.table_names())
        except Error as error:
            raise StorageUnavailableError(
                f"{self.describe()} does not answer: {in_one_line(error)}"
            ) from None
        if missing := sorted(_tables("djqueue") - there):
            raise StorageUnavailableError(
                f"{self.describe()} has no table {missing[0]}: run manage.py migrate with this version of "
                "djqueue"
            )
        self._lacks_spark_tables = super().has_spark_tables and not _tables("djqueue_spark") <= there

    @property
    def has_spark_tables(self) -> bool:
        """Whether this process and the database have the tables of `djqueue.contrib.spark`."""
        return super().has_spark_tables and not self._lacks_spark_tables

    def close(self) -> None:
        """See `Storage.close`. A project's own connection stays open."""
        super().close()
        if is_added(self.alias):
            connections[self.alias].close()

    def describe(self) -> str:
        """See `Storage.describe`."""
        return f"database {self.alias}" if is_added(self.alias) else super().describe()


def _tables(label: str) -> set[str]:
    return {model._meta.db_table for model in apps.get_app_config(label).get_models() if model._meta.managed}
