"""Snapshots of Redis."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager

from djqueue.core.errors import RestoreInProgressError
from djqueue.storage import snapshots
from djqueue.storage.snapshots import (
    Part,
    ScheduleRows,
    SnapshotCounts,
    Snapshots,
    check_schedules,
    check_target,
)
from djqueue.storage.snapshotspool import SnapshotSpool

from .keyspace import Keyspace, answer
from .limits import SharedLimits
from .metrics import Metrics
from .removing import Removing
from .roundtrips import RedisCommand
from .snapshotreads import RedisSnapshotReader, limiter_settings, settings
from .snapshotwrites import STAGING, Restore
from .workers import RedisWorkers

logger = logging.getLogger("djqueue.redis")


class RedisSnapshots(Snapshots):
    """Snapshots of all queues, and of the limiters that the settings name."""

    def __init__(
        self,
        keyspace: Keyspace,
        limits: SharedLimits,
        removing: Removing,
        workers: RedisWorkers,
        metrics: Metrics,
        now: Callable[[], int],
    ) -> None:
        self.schedules: ScheduleRows | None = None
        self._keyspace = keyspace
        self._limits = limits
        self._removing = removing
        self._workers = workers
        self._metrics = metrics
        self._now = now

    def _limiters(self) -> set[str]:
        named = {policy.limiter for policy in self._keyspace.every_policy if policy.limiter is not None}
        return named | self._limits.names

    @contextmanager
    def read(self, page: int = snapshots.PAGE) -> Iterator[Iterator[Part]]:
        yield self._parts(page)

    def _parts(self, page: int) -> Iterator[Part]:
        last = self._last_replacement()
        yield from RedisSnapshotReader(self._keyspace, self._limiters(), page).parts()
        if self.schedules is not None:
            for found in self.schedules.pages(page):
                yield Part(snapshots.SCHEDULE, "", found)
        if self._last_replacement() != last:
            raise RestoreInProgressError(
                "a restore replaced everything while the storage was read: try again"
            )

    def _last_replacement(self) -> bytes | None:
        """Return a value that each restore changes before it replaces anything.

        Raises RestoreInProgressError while the storage holds some of the old and some of the new.
        """
        run, common = self._keyspace.run, self._keyspace.common
        last: bytes | None = run(answer(RedisCommand((b"GET", common.key("replaced")))))
        if run(answer(RedisCommand((b"HGET", common.key("restore"), b"phase")))) not in (None, STAGING):
            raise RestoreInProgressError(
                "a restore is replacing everything that the storage holds: wait until it ends. If it was "
                "killed, restore a backup again, which completes it"
            )
        return last

    def is_empty(self) -> bool:
        run = self._keyspace.run
        for queue in run(self._keyspace.names()):
            if run(answer(RedisCommand((b"EXISTS", self._keyspace.keys(queue).key("jobs"))))):
                return False
            if not run(settings(self._keyspace, queue)).is_empty:
                return False
        if any(run(limiter_settings(self._keyspace, name)) is not None for name in self._limiters()):
            return False
        return self.schedules is None or self.schedules.is_empty()

    def was_interrupted(self) -> bool:
        return self._restore().was_interrupted()

    def write(self, parts: Iterable[Part], *, replace: bool = False) -> SnapshotCounts:
        restore = self._restore()
        with closing(self._spool()) as spool:
            if not restore.is_open():
                check_target(self, self._workers.all(), replace=replace)
            # Before the restore begins: the records may arrive slowly.
            spool.fill(parts)
            check_schedules(self.schedules, spool.schedules)
            with restore:
                if restore.end_interrupted():
                    logger.warning("Completed a restore that was interrupted before.")
                check_target(self, self._workers.all(), replace=replace)
                self._write(restore, spool, replace=replace)
            return spool.counts()

    def _write(self, restore: Restore, spool: SnapshotSpool, *, replace: bool) -> None:
        try:
            queues = restore.stage(spool)
            # Again, because other processes may have written until the queues were closed.
            check_target(self, self._workers.all(), replace=replace)
            restore.decide()
        except (Exception, KeyboardInterrupt):
            restore.undo()
            raise
        restore.publish(queues)

    def _restore(self) -> Restore:
        keyspace, limiters = self._keyspace, self._limiters()
        return Restore(keyspace, self._limits, self._removing, self._metrics, limiters, self.schedules)

    def _spool(self) -> SnapshotSpool:
        return SnapshotSpool(self._keyspace.policy, self._now())
