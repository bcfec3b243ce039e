"""Take backups regularly in a process of `runworkers`."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event

from django.db import Error, connections

from djqueue.conf import BackupSettings, get_settings
from djqueue.core.deadlines import GrowingPause
from djqueue.core.errors import DjqueueError
from djqueue.core.logs import Log
from djqueue.core.messages import in_one_line
from djqueue.core.threads import beside, start_daemon
from djqueue.operations.throttle import CopyThrottle
from djqueue.storage.base import Storage

from .archive import started_at
from .lease import BackupLease, BackupRunningError
from .store import BackupStore
from .transfer import Steps, prune, take

logger = Log("djqueue.backup")

FIRST_LOOK = 60_000
"""Milliseconds from the start of a process to its first look: one that runs shortly takes no backup."""
LOOK_EVERY = 600_000
"""Maximum milliseconds between two looks at the newest backup."""
LOOK_WHILE_BUSY = 30_000
"""Milliseconds until the next look while another process takes a backup."""
FIRST_RETRY, LAST_RETRY = 60_000, 3_600_000
"""Milliseconds until the next attempt after an error: first and longest wait, with doubling."""
CLOCK_SKEW = 60_000
"""Milliseconds by which clocks may differ. A backup from a later time does not delay the next one."""
STOP_TIMEOUT = 1.0
"""Seconds for which stopping waits for a backup; a process that exits ends it in any case."""
STUCK_AFTER = 60_000
"""Milliseconds after the timeout of a backup at which its thread counts as stuck."""


class BackupSchedule:
    """Takes a backup whenever the newest one has become too old. Any number of processes may run one.

    Args:
        storage: The storage to back up.
        settings: When, and how many to keep.
        rests: Whether to let other threads of this process work in between.
    """

    def __init__(self, storage: Storage, settings: BackupSettings, *, rests: bool = False) -> None:
        assert settings.every is not None
        self._storage = storage
        self._settings = settings
        self._every = settings.every
        self._rests = rests
        self._lease = BackupLease(storage)
        self._clock = self._lease.clock
        self._retry = GrowingPause(FIRST_RETRY, LAST_RETRY)
        self._reason = ""
        """The last error that was logged; empty if the last attempt succeeded."""
        self._begun: int | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether a backup has not ended although its time is over, such as in a call that never returns."""
        begun = self._begun
        return begun is not None and self._clock.monotonic() - begun > self._settings.timeout + STUCK_AFTER

    def run(self, stop: Event) -> None:
        """Take backups until `stop` is set. Errors are logged once, and shown by `backup status`."""
        wait = min(FIRST_LOOK, self._every)
        try:
            while not stop.wait(wait / 1_000):
                wait = self.look(stop)
        finally:
            connections.close_all()

    def look(self, stop: Event) -> int:
        """Take a backup if one is due; return the milliseconds until the next look."""
        try:
            if (wait := self._due_in(BackupStore.configured(self._settings))) > 0:
                return min(wait, LOOK_EVERY)
            if not self._lease.has_tables():
                raise DjqueueError(
                    "djqueue's tables are missing, so processes cannot agree on who takes a backup: run "
                    "manage.py migrate, or set DJQUEUE['BACKUP'] to None"
                )
            self._take(stop)
        except BackupRunningError:
            return min(LOOK_WHILE_BUSY, self._every)
        except Exception as error:
            if stop.is_set():
                logger.info("The backup was cancelled, because the process stops.")
                return LOOK_EVERY
            return self._failed(error)
        finally:
            self._begun = None
            # An idle process needs no connection.
            connections.close_all()
        if self._reason:
            logger.warning("Backups are taken again.")
        self._reason = ""
        self._retry.succeeded()
        return min(self._every, LOOK_EVERY)

    def _due_in(self, store: BackupStore) -> int:
        """Return the milliseconds until the next backup is due."""
        now = self._clock.now()
        return due_at(store.names(), self._settings, now) - now

    def _take(self, stop: Event) -> None:
        cancel = _Either(stop)
        with self._lease.acquire(self._settings.timeout, cancel) as held:
            store = BackupStore.configured(self._settings)
            if self._due_in(store) > 0:
                return  # Another process has taken it meanwhile.
            self._begun = self._clock.monotonic()
            self._lease.note_start()
            name = ""
            try:
                rest = CopyThrottle(cancel).rest if self._rests else _no_rest
                name = take(self._storage, store, self._clock, Steps(held.check, rest)).name
                prune(store, self._settings.keep, name, self._clock, is_alone=True)
            except Exception as error:
                if not stop.is_set():
                    self._lease.note_end(name, _reason(error))
                raise
            self._lease.note_end(name)

    def _failed(self, error: Exception) -> int:
        connections.close_all()
        reason = _reason(error)
        if reason != self._reason:
            self._reason = reason
            expected = isinstance(error, (DjqueueError, Error, OSError))
            # Any other error may be a defect of this package, or of a file storage: it needs its traceback.
            logger.error(
                "The backup failed, and is tried again: %s", reason, exc_info=None if expected else error
            )
        return min(int(self._retry.failed()), self._every)


def due_at(names: Sequence[str], settings: BackupSettings, now: int) -> int:
    """Return when the next backup is due, in UTC milliseconds, given the names of the backups."""
    # Those from the future were made before the clock was set back.
    times = [at for name in names if (at := started_at(name)) is not None and at <= now + CLOCK_SKEW]
    return max(times) + (settings.every or 0) if times else now


class _Either(Event):
    """An event that is also set when another one is."""

    def __init__(self, other: Event) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        return super().is_set() or self._other.is_set()


def _no_rest() -> None:
    pass


def _reason(error: Exception) -> str:
    text = in_one_line(error)
    return text if isinstance(error, DjqueueError) else f"{type(error).__name__}: {text}"


def schedule_of(storage: Storage, *, rests: bool = False) -> BackupSchedule | None:
    """Return the schedule of a storage's backups; None if the settings turn it off."""
    settings = get_settings()
    if not is_scheduled(storage, settings.backup):
        return None
    return BackupSchedule(storage, settings.backup, rests=rests)


def is_scheduled(storage: Storage, settings: BackupSettings) -> bool:
    """Return whether `runworkers` takes backups of a storage.

    Jobs in the memory of one process end with it, so they are backed up only if the project says so.
    """
    is_wanted = settings.is_every_given or not storage.capabilities.in_process
    return settings.every is not None and is_wanted


@contextmanager
def backing_up(storage: Storage) -> Iterator[None]:
    """Context manager: take backups on a thread beside the worker within the block."""
    schedule = schedule_of(storage, rests=True)
    if schedule is None:
        yield
        return
    with beside(schedule.run, "djqueue-backup", STOP_TIMEOUT):
        yield


NICENESS = 10
"""Added to the niceness of a process that only takes backups, so that jobs come first."""
LOOK_FOR_STUCK = 5.0
"""Seconds between checks for a backup that never ends."""


def run_schedule(schedule: BackupSchedule, stop: Event, ready: Callable[[], None]) -> bool:
    """Take backups in this process, which does nothing else, until `stop` is set.

    Returns:
        False if a backup does not end: only the end of the process ends it.
    """
    os.nice(NICENESS)
    thread = start_daemon("djqueue-backup", schedule.run, stop)
    ready()
    while not stop.wait(LOOK_FOR_STUCK):
        if schedule.is_stuck:
            logger.error("A backup has not ended in time; its process is replaced.")
            return False
    thread.join(STOP_TIMEOUT)
    return True
