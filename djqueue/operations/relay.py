"""The relay: sends jobs from the outbox table to the storage, in the order in which they were written."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import groupby
from logging import WARNING
from threading import Event
from typing import Any

from django.db import Error, connections, router, transaction
from django.db.models import QuerySet

from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.deadlines import GrowingPause
from djqueue.core.errors import DjqueueError, JobNotStoredError, OptionError, StorageUnavailableError
from djqueue.core.job import Batch
from djqueue.core.logs import Log
from djqueue.core.messages import ThrottledLog, in_one_line
from djqueue.core.options import JobKey
from djqueue.core.states import TERMINAL, State
from djqueue.core.threads import beside
from djqueue.core.units import to_milliseconds
from djqueue.models import OutboxJob
from djqueue.storage.base import Storage
from djqueue.storage.tables.rows import unpack_options

from .sweeps import is_scheduler

logger = Log("djqueue.relay")

ROWS_PER_READ = 1_000
"""Rows sent at a time."""
IDLE_INTERVAL = 0.5
"""Seconds between two reads of an empty table."""
FIRST_RETRY, LAST_RETRY = 0.5, 5.0
"""Seconds before the next attempt after an error: first and longest wait, with doubling."""
LOGGED = 60.0
"""Seconds between two lines about a queue that takes no jobs."""
MAX_CATCH_UP = 5_000
"""Maximum milliseconds for catching up."""
STOP_TIMEOUT = 5.0
"""Seconds for which stopping waits for the relay; the next relay repeats unfinished work."""


class Relay:
    """Sends jobs from a database's outbox table to a storage. Any number of processes may run one.

    A row is deleted after the storage has replied. If the deletion fails, the job is sent again with the same
    id, and the storage recognizes it.
    """

    def __init__(self, storage: Storage, alias: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        enqueue = storage.capabilities.enqueue_directly
        assert enqueue is not None
        self._storage = storage
        self._enqueue = enqueue
        self._woken = Event()
        if (on_outbox := storage.capabilities.on_outbox) is not None:
            on_outbox(self._woken.set)
        self._alias = alias
        self._clock = clock
        self._log = ThrottledLog(logger, LOGGED)
        self._refusing: set[str] = set()
        """Queues that have just refused jobs, so that those of others come first."""
        self._kept: dict[int, str] = {}
        """Rows that stay although the scheduler has their jobs, with the ids of these: its database refuses
        the rows of the jobs. They are not sent again, because a job may have been moved to another queue."""
        self._rejected: set[int] = set()
        """Rows of these whose jobs are dead letters."""

    def relay_once(self) -> int:
        """Send up to `ROWS_PER_READ` jobs, oldest first; return their number.

        Raises StorageUnavailableError and the database's errors.
        """
        if not self._rows().exclude(queue__in=list(self._refusing)).exists():
            self._refusing.clear()
            return 0
        with self._transaction():
            rows = list(self._locked().exclude(queue__in=list(self._refusing)).order_by("id")[:ROWS_PER_READ])
            sent = self._send(rows)
            done = {row.id for row in sent}
            self._rows().filter(id__in=done).delete()
        for one in done:
            self._kept.pop(one, None)
        self._rejected -= done
        return len(rows)

    def _transaction(self) -> AbstractContextManager[Any]:
        # Without SKIP LOCKED, a transaction would block other writers while it waits for the storage.
        return transaction.atomic(using=self._alias) if self._skips_locked else nullcontext()

    def _locked(self) -> "QuerySet[OutboxJob]":
        return self._rows().select_for_update(skip_locked=True) if self._skips_locked else self._rows()

    @property
    def _skips_locked(self) -> bool:
        return bool(connections[self._alias].features.has_select_for_update_skip_locked)

    def _rows(self) -> "QuerySet[OutboxJob]":
        return OutboxJob.objects.using(self._alias)

    def _send(self, rows: Sequence[OutboxJob]) -> Sequence[OutboxJob]:
        """Send jobs; return those that are done.

        Those of a queue that is full or wrongly set up, or whose rows the database of the scheduler refuses,
        stay in the table, without keeping others waiting. A job that breaks the rules of its queue becomes a
        dead letter.
        """
        try:
            return self._send_new(rows)
        except StorageUnavailableError:
            raise
        except DjqueueError as error:
            queues: dict[str, list[OutboxJob]] = {}
            for row in rows:
                queues.setdefault(row.queue, []).append(row)
            if len(queues) > 1:
                return [row for some in queues.values() for row in self._send(some)]
            if not isinstance(error, OptionError):
                self._refusing.update(queues)
                self._log.log(
                    WARNING, min(queues), "Jobs stay in the outbox, retrying: %s", in_one_line(error)
                )
                return ()
            if len(rows) > 1:
                return [*self._send(rows[: len(rows) // 2]), *self._send(rows[len(rows) // 2 :])]
            [row], batch = rows, self._batch(rows)
            text = "Job %s of queue %r in the outbox was refused, and is a dead letter: %s"
            logger.error(text, row.job_id, row.queue, in_one_line(error))
            try:
                self._enqueue([batch._replace(options=batch.options.refused(error))])
            except JobNotStoredError:
                self._kept[row.id] = row.job_id
                self._rejected.add(row.id)
                return ()
            return rows

    def _send_new(self, rows: Sequence[OutboxJob]) -> Sequence[OutboxJob]:
        """Send the jobs that were not sent before; return those that are done."""
        sent = self._sent(rows)
        new = [row for row in rows if row.id not in sent and row.id not in self._kept]
        batches = [self._batch(list(alike)) for _, alike in groupby(new, _kind)]
        try:
            if batches:
                self._enqueue(batches)
        except JobNotStoredError as error:
            self._log.log(WARNING, "", "Jobs stay in the outbox, retrying: %s", in_one_line(error))
            kept: dict[int, JobKey] = {}
            for place, key in error.jobs.items():
                row = new[place]
                # One row of each job is enough, best its own; the others are duplicates of it.
                if key not in kept.values() or (row.queue, row.job_id) == key:
                    kept = {other: job for other, job in kept.items() if job != key} | {row.id: key}
            self._kept |= {row_id: job_id for row_id, (_, job_id) in kept.items()}
        return [row for row in rows if row.id in sent or row.id not in self._kept]

    def _sent(self, rows: Sequence[OutboxJob]) -> set[int]:
        """Return the rows whose jobs were sent before, even if they have ended since, and are not kept."""
        scheduler = self._storage.capabilities.scheduler
        if scheduler is None:
            # A job with a generated id is only known to the storage if it was sent before.
            states = self._states((row.queue, row.job_id) for row in rows if row.fresh)
            return {row.id for row in rows if states.get((row.queue, row.job_id)) is not None}
        kept = {row.id: self._kept[row.id] for row in rows if row.id in self._kept}
        if not kept:
            return set()
        states = self._states(scheduler.refused(kept.values()))
        refused = {job_id for _, job_id in states}
        # A job that has ended in memory must not run again after a crash; a dead letter must not be lost.
        pending = {job_id for (_, job_id), state in states.items() if state and state not in TERMINAL}
        return {
            row_id
            for row_id, job_id in kept.items()
            if job_id not in (refused if row_id in self._rejected else pending)
        }

    def _states(self, keys: Iterable[JobKey]) -> dict[JobKey, State | None]:
        queues: dict[str, list[str]] = {}
        for queue, job_id in keys:
            queues.setdefault(queue, []).append(job_id)
        return {
            (queue, job_id): state
            for queue, ids in queues.items()
            for job_id, state in zip(ids, self._storage.reads.states(queue, ids), strict=True)
        }

    def _batch(self, rows: Sequence[OutboxJob]) -> Batch:
        first = rows[0]
        options = unpack_options(bytes(first.options))
        if options.ttl is not None:
            # An expired job is sent, too, so that its expiry is visible.
            age = self._clock.now() - to_milliseconds(first.created_at)
            options = replace(options, ttl=max(options.ttl - age, 1))
        return Batch(
            first.queue,
            first.name,
            options,
            [bytes(row.payload) for row in rows],
            ids=[row.job_id for row in rows],
            run_at=None if first.run_at is None else to_milliseconds(first.run_at),
            fresh=first.fresh,
        )

    # The thread.

    def catch_up(self) -> None:
        """Send the rows that are in the table now, for a limited time. `run` handles errors."""
        until = self._clock.monotonic() + MAX_CATCH_UP
        with suppress(DjqueueError, Error):
            while self.relay_once() and self._clock.monotonic() < until:
                pass

    def run(self, stop: Event) -> None:
        """Send jobs until `stop` is set. Errors are logged, not raised."""
        retry = GrowingPause(FIRST_RETRY, LAST_RETRY)
        try:
            while not stop.is_set():
                try:
                    count = self.relay_once()
                except Exception as error:
                    self._failed(error, again=retry.failures > 0)
                    stop.wait(retry.failed())
                    continue
                if retry.failures:
                    logger.warning("The outbox relay resumed.")
                retry.succeeded()
                if count < ROWS_PER_READ:
                    self._woken.wait(IDLE_INTERVAL)
                    self._woken.clear()
        finally:
            connections[self._alias].close()

    def _failed(self, error: Exception, *, again: bool) -> None:
        connections[self._alias].close()
        if not again:
            # Any other error is a defect of this package, and needs its traceback.
            unexpected = None if isinstance(error, DjqueueError | Error | OSError) else error
            reason = in_one_line(error)
            logger.warning("The outbox relay paused, retrying: %s", reason, exc_info=unexpected)


def _kind(row: OutboxJob) -> tuple[Any, ...]:
    """Return the attributes that all jobs of one batch share."""
    options = bytes(row.options)
    since = None if unpack_options(options).ttl is None else row.created_at
    return row.queue, row.name, options, row.run_at, row.fresh, since


@contextmanager
def relaying(storage: Storage) -> Iterator[None]:
    """Context manager: run the relay on a thread, if the storage has an outbox.

    A storage with a scheduler has its relay in the scheduler's process.
    """
    if not storage.capabilities.has_outbox or not is_scheduler(storage):
        yield
        return
    relay = relay_of(storage)
    relay.catch_up()  # so that `--until-empty` finds jobs that were committed before
    with beside(relay.run, "djqueue-relay", STOP_TIMEOUT):
        yield


def relay_of(storage: Any) -> Relay:
    """Return the relay of the database that the routers name."""
    return Relay(storage, router.db_for_write(OutboxJob))
