"""The database storage that a URL names. To be imported when Django is set up: see `aliases`."""

from django.db import Error, connections
from django.db.models import Model

from djqueue import models
from djqueue.core.errors import StorageUnavailableError
from djqueue.storage.database import DatabaseStorage

from .aliases import is_added


class UrlDatabase(DatabaseStorage):
    """Enqueues, stages and reads; never the scheduler, however often it is connected.

    Queues have the modes that are recorded with them: there need be no settings here.
    """

    def connect(self) -> None:
        """See whether the database answers, and has its tables. Raises StorageUnavailableError."""
        connection = connections[self.alias]
        try:
            there = set(connection.introspection.table_names())
        except Error as error:
            reason = " ".join(str(error).split())
            raise StorageUnavailableError(f"{self.describe()} does not answer: {reason}") from None
        wanted = {model._meta.db_table for model in vars(models).values() if _has_table(model)}
        if missing := sorted(wanted - there):
            raise StorageUnavailableError(
                f"{self.describe()} has no table {missing[0]}: run manage.py migrate with this djqueue"
            )

    def close(self) -> None:
        """See `Storage.close`. A project's own connection stays open."""
        super().close()
        if is_added(self.alias):
            connections[self.alias].close()

    def describe(self) -> str:
        """See `Storage.describe`."""
        return f"the database {self.alias}"


def _has_table(model: object) -> bool:
    return (
        isinstance(model, type)
        and issubclass(model, Model)
        and model._meta.managed
        and not model._meta.abstract
    )
