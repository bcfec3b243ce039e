"""Bulk operations of a process that runs jobs: looked at beside each round of its worker's upkeep."""

import logging
from collections.abc import Callable

from django.db import Error, router

from djqueue.core.shown import in_one_line
from djqueue.models import BulkOperation
from djqueue.storage.base import Storage
from djqueue.storage.database.dberrors import raise_named

from .bulk import Bulk
from .scheduling import is_scheduler

logger = logging.getLogger("djqueue.bulk")


def bulking(storage: Storage) -> Callable[[], None]:
    """What does the bulk operations of a storage; quiet where there are no tables to look at."""
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
            # A project whose jobs are elsewhere need not have the tables.
            logger.debug("Bulk operations are not looked at: %s", in_one_line(error))
        else:
            has_worked = True

    return look
