"""Snapshots of Redis."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager

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
from .snapshotwrites import Restore
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
        yield from RedisSnapshotReader(self._keyspace, self._limiters(), page).parts()
        if self.schedules is not None:
            for found in self.schedules.pages(page):
                yield Part(snapshots.SCHEDULE, "", found)

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

    def write(self, parts: Iterable[Part], *, replace: bool = False) -> SnapshotCounts:
        with self._restore() as restore, closing(self._spool()) as spool:
            if restore.end_interrupted():
                logger.warning("Completed a restore that was interrupted before.")
            check_target(self, self._workers.all(), replace=replace)
            spool.fill(parts)
            check_schedules(self.schedules, spool.schedules)
            try:
                queues = restore.stage(spool)
                # Again, because other processes may have written until the queues were closed.
                check_target(self, self._workers.all(), replace=replace)
                restore.decide()
            except (Exception, KeyboardInterrupt):
                restore.undo()
                raise
            restore.publish(queues)
            return spool.counts()

    def _restore(self) -> Restore:
        keyspace, limiters = self._keyspace, self._limiters()
        return Restore(keyspace, self._limits, self._removing, self._metrics, limiters, self.schedules)

    def _spool(self) -> SnapshotSpool:
        return SnapshotSpool(self._keyspace.policy, self._now())
