"""Run the bulk operations of a process that runs jobs, along with its worker's sweeps."""

import logging
from collections.abc import Callable

from django.db import Error, router

from djqueue.core.messages import in_one_line
from djqueue.models import BulkOperation
from djqueue.storage.base import Storage
from djqueue.storage.tables.dberrors import raise_named

from .bulk import Bulk
from .scheduling import is_scheduler

logger = logging.getLogger("djqueue.bulk")


def bulking(storage: Storage) -> Callable[[], None]:
    """Return a function that runs a storage's bulk operations; it does nothing without the tables."""
    alias = storage.capabilities.database or router.db_for_write(BulkOperation)
    bulk = Bulk(storage, alias)
    has_worked = False

    def look() -> None:
        nonlocal has_worked
        if not is_scheduler(storage):
            return
        try:
            bulk.work()
        except Error as error:
            if has_worked:
                raise_named(alias, error)
            # A project without database storage need not have the tables.
            logger.debug("Could not read the bulk operations: %s", in_one_line(error))
        else:
            has_worked = True

    return look
