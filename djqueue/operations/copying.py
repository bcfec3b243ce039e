"""Copy the jobs of one queue from Redis to the tables: the changed ones, or all."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from django.db import DataError

from djqueue.core.clock import Clock
from djqueue.core.errors import SerializationError
from djqueue.core.messages import in_one_line
from djqueue.core.states import State
from djqueue.storage.base import Storage

from .tables import UNFINISHED, MirroredRows, Tables

if TYPE_CHECKING:
    from djqueue.storage.redis.changes import ChangeStream, Mark

logger = logging.getLogger("djqueue.mirror")

BATCH = 2_000
"""Jobs copied in one transaction."""
BAD = (DataError, SerializationError, OverflowError, ValueError)
"""Errors of jobs that can never be read or written, so that retries are useless."""
NOT_KNOWN = (
    "%d unfinished jobs of queue %r are in the tables but not in Redis, which may have lost them. Run "
    "`manage.py djqueue restore-from-mirror` to enqueue them again, or `manage.py djqueue resync` to "
    "delete their rows."
)

Counted = Callable[[int, int], None]
"""Called with the numbers of jobs copied and removed so far."""


class UnknownJobs(NamedTuple):
    """The jobs in the tables that Redis does not know, by outcome."""

    forgotten: int
    """Unfinished jobs whose rows were removed."""
    kept: int
    """Unfinished jobs that Redis may have lost."""
    since: int
    """Time in UTC milliseconds before which all of these were enqueued; 0 if there are none."""


class Copying:
    """Copies jobs while this process has the leader lease.

    hold: raises if another process has taken the lease.
    """

    def __init__(
        self,
        storage: Storage,
        changes: "ChangeStream",
        tables: Tables,
        clock: Clock,
        hold: Callable[[], None],
    ) -> None:
        self.between: Callable[[], None] = lambda: None
        """Called after each transaction."""
        self._storage = storage
        self._changes = changes
        self._tables = tables
        self._clock = clock
        self._hold = hold

    def copy(self, queue: str, ids: Sequence[str], mark: "Mark") -> None:
        """Write the current state of these jobs, while the queue has this mark."""
        for first in range(0, len(ids), BATCH):
            self._copy(queue, ids[first : first + BATCH], mark)
            self.between()

    def _copy(self, queue: str, ids: Sequence[str], mark: "Mark") -> None:
        try:
            found = dict(zip(ids, self._changes.records(queue, ids, mark), strict=True))
            failed = [job.id for job in found.values() if job is not None and job.state is State.FAILED]
            letters = self._changes.dead_letters(queue, failed)
            self._tables.write(queue, found, letters, self._clock.now())
        except BAD as error:
            if len(ids) == 1:
                logger.error("Job %r of queue %r cannot be copied: %s", ids[0], queue, in_one_line(error))
                return
            middle = len(ids) // 2
            self._copy(queue, ids[:middle], mark)
            self._copy(queue, ids[middle:], mark)

    def copy_all(
        self, queue: str, since: int | None, counted: Counted = lambda *_: None
    ) -> tuple[int, "Mark"]:
        """Make the tables equal to a queue in Redis; return the number of compared jobs and the queue's
        mark.

        since: jobs enqueued since then that Redis does not know were removed on purpose. None: Redis may
        have lost any job, so unknown jobs keep their rows.
        """
        place = self._changes.follow(queue)
        copied = 0
        for ids in self._changes.pages(queue):
            self.copy(queue, ids, place.mark)
            copied += len(ids)
            counted(copied, 0)
        unknown = self.forget_unknown(queue, since, place.mark)
        counted(copied, unknown.forgotten)
        if unknown.kept:
            logger.warning(NOT_KNOWN, unknown.kept, queue)
        self._hold()
        # In this order: the trusted time is lost together with the stream, or found to be no longer
        # followed.
        self._changes.trust(queue, unknown.since)
        mark = self._changes.go_on(queue, place)
        if not mark:
            self._changes.forget(queue)
        return copied, mark

    def forget_unknown(self, queue: str, since: int | None, mark: "Mark" = b"") -> UnknownJobs:
        """Remove jobs that Redis does not know: see `copy_all`."""
        forgotten = kept = newest = 0
        for unknown in self._unknown_pages(queue):
            gone: list[str] = []
            for row in unknown:
                if since is not None and row.created_at >= since:
                    gone.append(row.job_id)
                    forgotten += row.state in UNFINISHED
                elif row.state in UNFINISHED:
                    kept += 1
                    newest = max(newest, row.created_at + 1)
            # Read again together with the mark, which proves that Redis has not lost its data in between.
            self.copy(queue, gone, mark)
        return UnknownJobs(forgotten, kept, newest)

    def count_all(self, queue: str, counted: Counted) -> None:
        """Count the jobs that `copy_all` would copy and the rows that it would remove; change nothing."""
        copied = 0
        for ids in self._changes.pages(queue):
            copied += len(ids)
            counted(copied, 0)
        forgotten = sum(row.state in UNFINISHED for page in self._unknown_pages(queue) for row in page)
        counted(copied, forgotten)

    def _unknown_pages(self, queue: str) -> Iterator[list[MirroredRows]]:
        """Yield the rows of jobs that Redis does not know, a page at a time."""
        for page in self._tables.pages(queue):
            states = self._storage.reads.states(queue, [row.job_id for row in page])
            yield [row for row, state in zip(page, states, strict=True) if state is None]
