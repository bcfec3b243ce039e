"""The write buffer of `durable=False`: jobs wait in the producer for a moment, and are written together."""

import atexit
import threading
from collections.abc import Sequence
from time import monotonic
from weakref import WeakSet

from django.db import connections

from djqueue.core.errors import StorageUnavailableError
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.logs import Log
from djqueue.core.messages import numbered
from djqueue.core.policies import full_error
from djqueue.core.threads import after_fork
from djqueue.storage import commits
from djqueue.storage.tables.dberrors import named

from .enqueue import DROPPING, enqueue, pending
from .transaction import Database
from .wake import Background

logger = Log("djqueue.storage")

WRITE_DELAY = 0.01
"""Seconds for which a job waits for others."""
JOBS_PER_WRITE = 100
"""Jobs that are written at once, without waiting for more."""
RETRY_INTERVAL = 0.5
"""Seconds between attempts to write while the database is unavailable."""
MAX_JOBS = 10_000
"""Jobs that wait while the database is unavailable."""


_buffers: "WeakSet[WriteBuffer]" = WeakSet()


class WriteBuffer:
    """The jobs of this process that are not written yet.

    Attributes:
        lost: Number of jobs that could not be written.
    """

    def __init__(self, database: Database, background: Background) -> None:
        self._database = database
        self._background = background
        self.lost = 0
        self._reset()
        after_fork(self._reset)
        _buffers.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        # Reentrant: a subscriber to the events of these jobs may use the storage.
        self._writing = threading.RLock()
        self._batches: list[Batch] = []
        self._jobs = 0
        self._is_writing = False
        self._failures = 0
        self._failure: BaseException | None = None
        """Exception of the last write that failed."""

    def __bool__(self) -> bool:
        return bool(self._batches) or self._is_writing

    def takes(self, batches: Sequence[Batch]) -> bool:
        """Return whether the results of these batches are known before they are written."""
        return all(self._is_simple(batch) for batch in batches) or self.would_wait_for_caller()

    def _is_simple(self, batch: Batch) -> bool:
        options = batch.options
        is_new = batch.ids is None or batch.fresh
        has_room = self._database.policy(batch.queue).max_size is None
        return (
            is_new
            and has_room
            and options.unique_key is None
            and not options.depends_on
            and options.rejected is None
        )

    def would_wait_for_caller(self) -> bool:
        """Return whether a write apart from the caller's transaction would wait for its end."""
        return not self._database.dialect.has_clock and self._database.is_in_transaction()

    def add(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Keep jobs, to be written soon; return their results.

        Raises:
            QueueFullError: A queue has no room for a batch. None of the jobs is kept.
            StorageUnavailableError: Too many jobs wait for the database.
        """
        database = self._database
        for batch in batches:
            database.policy(batch.queue).check_batch(batch)
            self._check_room(batch)
        now = database.clock.now()
        kept = [
            batch if batch.ids is not None else batch._replace(ids=database.ids.many(count, now), fresh=True)
            for batch in batches
            if (count := len(batch.payloads))
        ]
        with self._lock:
            if self._jobs >= MAX_JOBS:
                raise StorageUnavailableError(
                    f"{numbered(self._jobs, 'job')} with durable=False wait for the database "
                    f"{database.alias!r}, which cannot be written to. Is it running?"
                )
            jobs = self._jobs + sum(len(batch.payloads) for batch in kept)
            is_full = jobs >= JOBS_PER_WRITE
            # If this fails, no job is kept. The other thread waits for the lock.
            self._background.at(monotonic() + (0 if is_full else WRITE_DELAY), _key(is_full), self._write)
            self._batches += kept
            self._jobs = jobs
        results = [EnqueueResult(id, "queued", batch.queue) for batch in kept for id in batch.ids or ()]
        if not database.dialect.has_clock and connections[database.alias].in_atomic_block:
            commits.note(database.alias, results)  # Until the transaction ends, nobody can wait for them.
        return results

    def _check_room(self, batch: Batch) -> None:
        policy, count = self._database.policy(batch.queue), len(batch.payloads)
        limit = policy.max_size
        if limit is None or policy.when_full in DROPPING or batch.options.rejected is not None:
            return
        if self._database.transactions.read(lambda tx: pending(tx, batch.queue)) + count > limit:
            raise full_error(batch.queue, limit, count)

    def flush(self) -> None:
        """Write all jobs. Raises StorageUnavailableError; the jobs are kept then."""
        known = self._failures
        with self._writing:
            if self._failures != known and self._batches:
                # The write that this call has waited for failed. Another try would take as long again.
                raise StorageUnavailableError(str(self._failure)) from self._failure
            while batches := self._take():
                try:
                    self._write_all(batches)
                    self._is_writing = False
                except BaseException as error:
                    self._failures, self._failure = self._failures + 1, error
                    with self._lock:
                        # Some may be stored already.
                        self._batches = [batch._replace(fresh=False) for batch in batches] + self._batches
                        self._is_writing = False
                        self._jobs += sum(len(batch.payloads) for batch in batches)
                    raise

    def _write(self) -> None:
        try:
            self.flush()
        except Exception as error:
            logger.warning("Could not write jobs with durable=False, retrying: %s", error)
            self._background.at(monotonic() + RETRY_INTERVAL, _key(True), self._write)

    def _take(self) -> list[Batch]:
        with self._lock:
            self._is_writing = bool(self._batches)
            batches, self._batches = self._batches, []
            self._jobs = 0
        return batches

    def _write_all(self, batches: Sequence[Batch]) -> None:
        """Write batches in one transaction, or one by one if one of them is refused."""
        try:
            self._enqueue(batches)
        except (StorageUnavailableError, MemoryError, OSError):
            raise
        except Exception as error:
            if len(batches) > 1:
                for batch in batches:
                    self._write_all([batch])
                return
            [batch] = batches
            self.lost += len(batch.payloads)
            logger.error(
                "%s of queue %r with durable=False could not be enqueued, and %s lost: %s",
                numbered(len(batch.payloads), "job"),
                batch.queue,
                "is" if len(batch.payloads) == 1 else "are",
                error,
            )

    def _enqueue(self, batches: Sequence[Batch]) -> None:
        with named(self._database.alias):
            self._database.transactions.write_apart(lambda tx: enqueue(tx, batches))


def _key(is_full: bool) -> tuple[str, bool]:
    return "buffer", is_full


@atexit.register
def _flush_all() -> None:
    for buffer in list(_buffers):
        try:
            buffer.flush()
        except Exception:
            logger.exception("Jobs with durable=False could not be written at exit, and are lost.")
