"""Work in the background, along with the sweeps of a worker: firing schedules, running bulk operations."""

import os
from collections.abc import Callable
from functools import partial
from threading import Lock
from weakref import WeakKeyDictionary

from django.db import Error, router
from django.db.models import Model

from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.errors import DjqueueError
from djqueue.core.logs import Log
from djqueue.core.messages import in_one_line
from djqueue.models import BulkOperation, CronJob
from djqueue.storage.base import Storage
from djqueue.storage.tables.dberrors import raise_named

from .bulk import Bulk
from .firing import Firing

schedules_logger = Log("djqueue.cron")
bulk_logger = Log("djqueue.bulk")

MISSING_TABLES_INTERVAL = 60_000
"""Milliseconds between checks for missing tables."""


def scheduling(storage: Storage) -> Callable[[], None]:
    """Return a function that fires a storage's due schedules; it does nothing without the tables."""
    firing = firing_of(storage)

    def fire() -> None:
        try:
            firing.fire()
        except Exception:
            firing.leave()
            raise

    wanted = partial(is_scheduler, storage)
    return with_tables(fire, wanted, alias_of(storage), schedules_logger, "read the schedules", firing.clock)


def with_tables(
    work: Callable[[], object],
    wanted: Callable[[], object],
    alias: str,
    log: Log,
    what: str,
    clock: Clock = SYSTEM_CLOCK,
) -> Callable[[], None]:
    """Return a function that does work with tables of a database if it is wanted.

    A project without database storage need not have the tables: until the work has succeeded once, a failure
    is only a line for debugging, and the next call that tries again comes a minute later.

    Args:
        what: Name of the work in that line, a verb with its object.
    """
    has_worked, asleep_until = False, clock.monotonic()

    def look() -> None:
        nonlocal has_worked, asleep_until
        if not wanted() or clock.monotonic() < asleep_until:
            return
        try:
            work()
        except Exception as error:
            if has_worked and isinstance(error, Error):
                raise_named(alias, error)
            if has_worked or isinstance(error, DjqueueError):
                raise
            log.debug("Could not %s: %s", what, in_one_line(error))
            asleep_until = clock.monotonic() + MISSING_TABLES_INTERVAL
        else:
            has_worked = True

    return look


def bulking(storage: Storage) -> Callable[[], None]:
    """Return a function that runs a storage's bulk operations; it does nothing without the tables."""
    alias = alias_of(storage, BulkOperation)
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
            bulk_logger.debug("Could not read the bulk operations: %s", in_one_line(error))
        else:
            has_worked = True

    return look


def declare_now(storage: Storage) -> None:
    """Bring the rows of schedules up to date with this code, before the first job runs.

    Only a process that would fire them does so. Without the tables nothing happens.
    """
    if not is_scheduler(storage):
        return
    firing = firing_of(storage)
    try:
        firing.declare()
    except DjqueueError:
        raise
    except Exception as error:
        # A project without database storage need not have the tables.
        firing.leave()
        schedules_logger.debug("Could not declare the schedules: %s", in_one_line(error))


def firing_of(storage: Storage) -> Firing:
    """Return a `Firing` with the guarantees of a kind of storage."""
    lock = _locks.setdefault(storage, Lock())
    alias = alias_of(storage)
    capabilities = storage.capabilities
    if capabilities.scheduler is not None:
        # There is one scheduler, so a process that has begun with a slot is gone.
        return Firing(storage, alias, clock=capabilities.scheduler.clock, takeover_after=0, lock=lock)
    if capabilities.in_process:
        # The jobs of another process are unknown here, and gone with it.
        return Firing(storage, alias, ids_known_for=0, lock=lock)
    return Firing(storage, alias, lock=lock)


def alias_of(storage: Storage, model: type[Model] = CronJob) -> str:
    """Return the alias of the database with the rows of a model for a storage."""
    return storage.capabilities.database or router.db_for_write(model)


def is_scheduler(storage: Storage) -> bool:
    """Return whether this process does the work of the scheduler; True if the storage has none."""
    scheduler = storage.capabilities.scheduler
    return scheduler is None or scheduler.is_here


_locks: "WeakKeyDictionary[Storage, Lock]" = WeakKeyDictionary()
os.register_at_fork(after_in_child=_locks.clear)
