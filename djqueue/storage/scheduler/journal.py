"""The write buffer: the engine's changes, written to the tables by one thread.

A transaction has everything that has changed since the last one, as of one moment. It begins `WINDOW` after
the first change, with `WINDOW_JOBS` changed jobs, or as soon as a caller waits for it. After an error, the
same changes are written again, with those that followed. Jobs whose rows the database refuses are left out,
and are written again later.
"""

import math
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any

from django.db import Error, connections, transaction

from djqueue import models
from djqueue.core.clock import Clock
from djqueue.core.deadlines import GrowingPause, remaining
from djqueue.core.engine import Engine
from djqueue.core.engine.changes import Journal
from djqueue.core.enginejob import EngineJob
from djqueue.core.errors import JobNotStoredError, StorageUnavailableError
from djqueue.core.job import DeadLetterRecord
from djqueue.core.logs import Log
from djqueue.core.messages import hide_row, in_one_line, numbered
from djqueue.core.options import JobKey
from djqueue.core.overview import Finding
from djqueue.core.threads import start_daemon
from djqueue.storage.tables.dberrors import (
    LOCKED,
    LOCKED_FOR,
    locked_file,
    locked_tables,
    named,
    problem,
    refuses_rows,
    remedy,
)
from djqueue.storage.tables.dialects import Dialect
from djqueue.storage.tables.leaderlease import LeaderLease, LeaderLeaseLostError

from .changes import MODELS, Done, StoredMetrics, TableChange, UnwrittenChanges

logger = Log("djqueue.scheduler")

WINDOW = 0.010
"""Maximum seconds before a change is written."""
WINDOW_JOBS = 100
"""Number of changed jobs that are written at once."""
BACKLOG = 10_000
"""Unwritten jobs at which callers with more changes wait."""
KEEP_EVERY = 1.0
"""Seconds between two looks at the lease while there is nothing to write."""
FIRST_RETRY, LAST_RETRY = 0.1, 5.0
"""Seconds before changes are written again after an error: first and longest wait, with doubling."""
MAX_LEFT_OUT = 500
"""Maximum number of jobs that are left out because the database refuses their rows. With more, nothing is
written.
"""
MAX_TRIES = 200
"""Maximum number of sets of jobs that are tried in one transaction to find them."""
SEARCH_TIME = 3.0
"""Seconds after which such a transaction ends if some are found. The lease is renewed between two."""
LEFT_OUT_FOR = 60.0
"""Seconds before they are written again, unless they change."""
MAX_AGAIN = 50
"""Maximum number of them that are written again at a time."""
CLOSE_PATIENCE = 10.0
"""Seconds for which closing tries to write the rest."""


class TableJournal(Journal):
    """The engine's journal.

    Args:
        dialect: The database.
        lease: The lease of the scheduler, which is held in each transaction.
        clock: The engine's clock.
        metrics: The metrics, which are written along.
        lost: Called when another process is the scheduler.
    """

    engine: Engine
    """Set before the first change."""

    def __init__(
        self, dialect: Dialect, lease: LeaderLease, clock: Clock, metrics: StoredMetrics, lost: "Done"
    ) -> None:
        self._dialect = dialect
        self._lease = lease
        self._clock = clock
        self._metrics = metrics
        self._lost = lost
        self._changed = threading.Condition(threading.Lock())
        self._changes = UnwrittenChanges(1)
        self._left_out = UnwrittenChanges(0)
        """Changes of the jobs whose rows the database refuses."""
        self._refused: dict[JobKey, str] = {}
        """The errors of these jobs, until their rows are written."""
        self._again: set[JobKey] = set()
        """Jobs of these that are written now."""
        self._again_at = 0.0
        self._in_flight = 0
        self._flushing = threading.Lock()
        self._known: set[str] = set()
        """Queues that have a row."""
        self.written = 0
        """Generation of the last changes that are committed."""
        self._idle = False
        self._closing = False
        self._give_up_at = math.inf
        self._failure: Exception | None = None
        self._began = math.inf
        """When the transaction under way began."""
        self._thread: threading.Thread | None = None

    def start(self, known: set[str]) -> None:
        """Start the thread.

        Args:
            known: The queues that have a row.
        """
        self._known = known
        self._thread = start_daemon("djqueue-journal", self._run)

    def close(self) -> None:
        """Write the rest, and stop the thread. Raises StorageUnavailableError if the rest is lost."""
        with self._changed:
            self._closing = True
            self._give_up_at = monotonic() + CLOSE_PATIENCE
            if self._refused:
                # A last try: what made the database refuse them may be over.
                self._again |= self._refused.keys()
                self._changes.precede_with(self._left_out.take(self._refused))
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if refused := self._about_refused():
            logger.error("Stopped without the last changes of %s", refused)
        if self._changes:
            raise StorageUnavailableError(
                f"the last changes of {len(self._changes)} jobs were not written: {self._failure}"
            ) from self._failure

    @property
    def generation(self) -> int:
        """The generation of the changes that are made now."""
        return self._changes.generation

    @property
    def backlog(self) -> int:
        """Number of changed jobs that are not written."""
        return len(self._changes) + self._in_flight

    @property
    def failure(self) -> Exception | None:
        """The error of the last attempt to write; None if it succeeded."""
        return self._failure

    def problems(self) -> list[Finding]:
        """Return what keeps changes from being written: who has locked the tables, otherwise the error.

        The jobs whose rows the database refuses are a problem of their own.
        """
        refused = self._about_refused()
        if not refused:
            return self._problems_of_all()
        what_to_do = "Change the trigger, the constraint or the value that is the reason, or remove the jobs."
        text = f"only the scheduler's memory has the last changes of {refused}"
        return [*self._problems_of_all(), problem(text, what_to_do)]

    def _problems_of_all(self) -> list[Finding]:
        failure, waits = self._failure, monotonic() - self._began
        if failure is None and waits < LOCKED_FOR:
            return []
        alias = self._dialect.alias
        found: list[Finding] = []
        if self._dialect.connection.vendor == "postgresql":
            found = list(locked_tables(partial(_rows, alias)))
        elif self._dialect.connection.vendor == "sqlite" and (failure is None or LOCKED.search(str(failure))):
            found = list(locked_file(alias))
        if found:
            return found
        if failure is None:
            text = f"nothing could be written to the database {alias!r} for {waits:.0f} s"
            return [problem(text, "Check whether its server hangs or is overloaded.")]
        what_to_do = remedy(alias, failure) if isinstance(failure, Error) else "See the log of runworkers."
        return [problem(str(self._unwritten(failure)), what_to_do)]

    # Changes of the engine.

    @contextmanager
    def _noting(self) -> Iterator[UnwrittenChanges]:
        with self._changed:
            yield self._changes
            self._notice()

    def _notice(self) -> None:
        if self._idle or len(self._changes.jobs) >= WINDOW_JOBS:
            self._changed.notify_all()

    def added(self, jobs: list[EngineJob]) -> None:
        with self._noting() as changes:
            changes.jobs.update(dict.fromkeys(jobs, True))
            for job in jobs:
                if job.stream is not None and job.stream.items:
                    changes.items[job] = list(enumerate(job.stream.items))

    def changed(self, job: EngineJob) -> None:
        with self._changed:
            self._changes.jobs.setdefault(job, False)
            self._notice()

    completed = changed

    def updated(self, job: EngineJob) -> None:
        with self._noting() as changes:
            changes.jobs[job] = True
            changes.revived[job.queue, job.id] = None

    def died(self, job: EngineJob, letter: DeadLetterRecord) -> None:
        with self._noting() as changes:
            changes.jobs.setdefault(job, False)
            changes.died.pop(job, None)
            changes.died[job] = None

    def revived(self, job: EngineJob) -> None:
        with self._noting() as changes:
            changes.jobs.setdefault(job, False)
            changes.revived[job.queue, job.id] = None

    def removed(self, jobs: list[EngineJob]) -> None:
        with self._noting() as changes:
            for job in jobs:
                for noted in (changes.jobs, changes.died, changes.items, changes.lines, changes.logs):
                    noted.pop(job, None)
                changes.gone[job.queue, job.id] = None
                job.noted = 0

    def reported(self, job: EngineJob, lines: tuple[tuple[int, str], ...]) -> None:
        with self._noting() as changes:
            changes.jobs.setdefault(job, False)
            if lines:
                changes.lines.setdefault(job, []).extend(lines)

    def emitted(self, job: EngineJob, items: tuple[bytes, ...]) -> None:
        assert job.stream is not None
        first = job.stream.count - len(items)
        with self._noting() as changes:
            changes.jobs.setdefault(job, False)
            changes.items.setdefault(job, []).extend(enumerate(items, first))

    def restarted(self, job: EngineJob) -> None:
        with self._noting() as changes:
            changes.jobs.setdefault(job, False)
            changes.items.pop(job, None)
            changes.restarted[job] = None

    def trimmed(self, jobs: list[EngineJob]) -> None:
        with self._noting() as changes:
            changes.trimmed.update(dict.fromkeys(jobs))

    def let_go(self, key: JobKey) -> None:
        queue = self.engine.context.existing(key[0])
        if queue is not None and (job := queue.jobs.get(key[1])) is not None:
            self.trimmed([job])  # Its result may have expired while others held the record.

    # Changes of the scheduler.

    def queue_set(self, name: str) -> None:
        """Record that the settings of a queue have changed."""
        with self._noting() as changes:
            changes.queues.add(name)

    def limiter_set(self, name: str) -> None:
        """Record that the limits of a limiter have changed."""
        with self._noting() as changes:
            changes.limiters.add(name)

    def replaced(self) -> None:
        """Record that the whole contents were replaced. The caller holds all locks of the engine."""
        with self._noting() as changes:
            new = self._changes = UnwrittenChanges(changes.generation)
            new.everything = True
            new.waiting, new.durable = changes.waiting, changes.durable
            self._left_out, self._refused = UnwrittenChanges(0), {}

    # Waiting.

    def wait(self, *, durable: bool = False) -> None:
        """Wait until everything that has changed is committed.

        Raises StorageUnavailableError if that fails, or at the deadline: the changes are written later then.
        """
        done = threading.Event()
        outcome: list[BaseException | None] = []

        def notify(error: BaseException | None) -> None:
            outcome.append(error)
            done.set()

        with self._changed:
            self._check()
            self._changes.waiting.append(notify)
            self._changes.durable |= durable
            self._changed.notify_all()
        left = remaining(math.inf)
        if not done.wait(None if left == math.inf else left):
            raise StorageUnavailableError("the change was made, but is not written yet: the database is busy")
        if outcome[0] is not None:
            raise StorageUnavailableError(
                f"the change was made, but is not written yet: {self._unwritten(outcome[0])}"
            )

    def check_stored(self, jobs: Sequence[JobKey], *, all_of_them: bool = False) -> None:
        """Raise JobNotStoredError if the database refuses the rows of one of these jobs.

        Args:
            jobs: Jobs whose changes have been waited for.
            all_of_them: Raise it only if the database refuses the rows of all.
        """
        refused = self._refused
        found = {place: key for place, key in enumerate(jobs) if key in refused} if refused else {}
        if found and (not all_of_them or len(found) == len(jobs)):
            queue, job_id = key = next(iter(found.values()))
            others = f", and {numbered(len(found) - 1, 'other')}" if len(found) > 1 else ""
            raise JobNotStoredError(
                f"job {job_id!r} of queue {queue!r}{others}: the change was made, but is only in the "
                f"scheduler's memory, because the database {self._dialect.alias!r} refuses it: "
                f"{refused.get(key)}",
                found,
            )

    def refused(self, ids: Collection[str]) -> list[JobKey]:
        """Return the jobs with one of these ids, in any queue, whose rows the database refuses."""
        return [key for key in list(self._refused) if key[1] in ids]

    def _about_refused(self) -> str:
        refused = list(self._refused.items())
        if not refused:
            return ""
        (queue, job_id), error = refused[0]
        return (
            f"{numbered(len(refused), 'job')}, because the database {self._dialect.alias!r} refuses the "
            f"rows, such as those of job {job_id!r} of queue {queue!r}: {error}"
        )

    def wait_for_room(self) -> None:
        """Wait while too many changes are not written. Raises StorageUnavailableError at the deadline."""
        if self.backlog <= BACKLOG:
            return
        with self._changed:
            left = remaining(LAST_RETRY)
            if not self._changed.wait_for(lambda: self.backlog <= BACKLOG or self._closing, left):
                self._check()
                raise StorageUnavailableError(
                    f"{self.backlog} changed jobs wait to be written: the database is too slow"
                )
            self._check()

    def check_lease(self) -> None:
        """Raise StorageUnavailableError if another process has become the scheduler."""
        if self._failure is not None and isinstance(self._failure, LeaderLeaseLostError):
            raise self._unwritten(self._failure)

    def _check(self) -> None:
        if self._closing:
            raise StorageUnavailableError("the scheduler is stopping")
        self.check_lease()
        if self._failure is not None and self.backlog > BACKLOG:
            raise self._unwritten(self._failure)

    def _unwritten(self, error: BaseException) -> StorageUnavailableError:
        if isinstance(error, LeaderLeaseLostError):
            return StorageUnavailableError("another process has become the scheduler of the database")
        return StorageUnavailableError(
            f"the database {self._dialect.alias!r} cannot be written to: {in_one_line(error)}"
        )

    # The thread.

    def _run(self) -> None:
        pause = GrowingPause(FIRST_RETRY, LAST_RETRY)
        try:
            while self._next(pause.length):
                try:
                    self.flush()
                    pause.succeeded()
                except LeaderLeaseLostError as error:
                    self._lost(error)
                    return
                except Exception as error:
                    connections[self._dialect.alias].close()
                    if monotonic() > self._give_up_at:
                        return
                    # Other errors than those of the database are defects, and need a traceback.
                    unexpected = None if isinstance(error, Error | OSError) else error
                    logger.warning(
                        "Writing changed jobs failed, retrying in %.1f s: %s",
                        pause.failed(),
                        in_one_line(error),
                        exc_info=unexpected,
                    )
        finally:
            connections[self._dialect.alias].close()

    def _next(self, pause: float) -> bool:
        """Wait until changes are to be written, or the lease is to be kept; return False at the end."""
        with self._changed:
            if pause:
                # Closing shortens the wait, but does not end it.
                self._changed.wait_for(lambda: self._closing, pause)
                if self._closing:
                    self._changed.wait(FIRST_RETRY)
            self._idle = True
            if not self._changes and not self._closing:
                self._changed.wait(KEEP_EVERY)
            self._idle = False
            if self._changes and not pause:
                self._changed.wait_for(self._is_due, WINDOW)
            return bool(self._changes) or self._metrics.have_changed or not self._closing

    def _is_due(self) -> bool:
        changes = self._changes
        return bool(changes.waiting) or self._closing or len(changes) >= WINDOW_JOBS

    def flush(self) -> None:
        """Write everything that has changed, in one transaction. Raises the error if that fails."""
        with self._flushing:
            self._began = monotonic()
            changes, metrics = self._changes, self._metrics.take()
            try:
                changes, tables = self._cut()
                if changes or metrics:
                    self._write_or_leave_out(changes, tables, metrics)
                else:
                    self._lease.renew_if_due()
            except BaseException as error:
                self._metrics.give_back(metrics)
                try:
                    if isinstance(error, Exception) and refuses_rows(error):
                        self._keep_lease()
                except LeaderLeaseLostError as lost:
                    self._fail(changes, lost)
                    raise
                except Exception as other:
                    error.add_note(f"The lease could not be renewed either: {in_one_line(other)}")
                self._fail(changes, error)
                raise
            finally:
                self._began = math.inf
            self._succeed(changes)

    def _cut(self) -> tuple[UnwrittenChanges, list[TableChange]]:
        """Take the changes, and make their rows while nothing else changes."""
        context = self.engine.context
        locks = [shard.lock for shard in context.shards] + [one.lock for one in context.processing]
        for lock in locks:
            lock.acquire()
        try:
            names = {name for shard in context.shards for name in shard.queues}
            with self._changed:
                changes = self._changes
                if self._refused:
                    self._add_left_out(changes)
                self._changes = UnwrittenChanges(changes.generation + 1)
                self._in_flight = len(changes)
                changes.queues |= names ^ self._known
                self._known = names
            if changes.everything:
                self._add_everything(changes)
            return changes, changes.tables(context)
        finally:
            for lock in locks:
                lock.release()

    def _add_left_out(self, changes: UnwrittenChanges) -> None:
        """Add the changes that were left out: those of changed jobs, and after a while of all, in turn."""
        again = changes.touched(self._refused)
        if monotonic() >= self._again_at:
            self._again_at = monotonic() + LEFT_OUT_FOR * min(1, MAX_AGAIN / len(self._refused))
            again.update(islice(self._refused, MAX_AGAIN))
        if again:
            self._again |= again
            changes.precede_with(self._left_out.take(again))

    def _add_everything(self, changes: UnwrittenChanges) -> None:
        context = self.engine.context
        for shard in context.shards:
            for queue in shard.queues.values():
                changes.queues.add(queue.name)
                dead = {letter.id: queue.jobs[letter.id] for letter in queue.dead.letters()}
                # Dead letters last, in their order.
                jobs = [job for job in queue.jobs.values() if job.id not in dead]
                changes.died.update(dict.fromkeys(dead.values()))
                for job in (*jobs, *dead.values()):
                    changes.jobs[job] = True
                    if job.logs:
                        changes.logs[job] = None
                    if job.stream is not None and job.stream.items:
                        changes.items[job] = list(enumerate(job.stream.items))
        changes.limiters |= set(context.limiters)

    def _write_or_leave_out(
        self, changes: UnwrittenChanges, tables: list[TableChange], metrics: list[TableChange]
    ) -> None:
        """Write changes, without those of jobs whose rows the database refuses."""
        while True:
            try:
                self._write(changes, tables + metrics)
                return
            except Exception as error:
                # In the transaction of a restore, its caller gets the error.
                if not refuses_rows(error) or self._dialect.connection.in_atomic_block:
                    raise
                hide_row(error)
                self._keep_lease()
                refused = self._find_refused(tables)
                if not refused:
                    raise
            self._leave_out(changes, refused)
            tables = [change.without(refused) for change in tables]

    def _leave_out(self, changes: UnwrittenChanges, refused: dict[JobKey, str]) -> None:
        new = refused.keys() - self._refused.keys()
        with self._changed:
            if self._changes.everything:
                return  # All contents were replaced meanwhile.
            if not self._refused:
                self._again_at = monotonic() + LEFT_OUT_FOR
            self._left_out.follow(changes.take(refused))
            # Those that were tried last are tried again last.
            others = {key: error for key, error in self._refused.items() if key not in refused}
            self._refused = others | refused
            self._again -= refused.keys()
        if new:
            text = "Left out %s, because the database refuses the rows, such as those of job %r of %r: %s"
            queue, job_id = key = min(new)
            logger.error(text, numbered(len(new), "job"), job_id, queue, refused[key])

    def _find_refused(self, tables: Sequence[TableChange]) -> dict[JobKey, str]:
        """Return the jobs whose rows the database refuses, with its errors. Try halves in savepoints."""
        keys = list(dict.fromkeys(row[:2] for change in tables if change.is_of_jobs for row in change.rows))
        found: dict[JobKey, str] = {}
        left, room = [keys], MAX_LEFT_OUT - len(self._refused.keys() - self._again)
        until = monotonic() + SEARCH_TIME
        with self._dialect.transaction():
            for _ in range(MAX_TRIES):
                if not left or len(found) >= room or (found and monotonic() > until):
                    break
                some = left.pop()
                try:
                    with self._dialect.transaction():
                        for change in tables:
                            if (part := change.of(set(some))).rows:
                                part.apply(self._dialect)
                except Exception as error:
                    if not refuses_rows(error):
                        raise
                    if len(some) == 1:
                        found[some[0]] = in_one_line(error)
                    else:
                        middle = len(some) // 2
                        left += [some[middle:], some[:middle]]
            transaction.set_rollback(True, using=self._dialect.alias)
        return found

    def _keep_lease(self) -> None:
        """Renew the lease, whose renewal was rolled back with the rest of a transaction."""
        if not self._dialect.connection.in_atomic_block:
            self._lease.renew()

    def _write(self, changes: UnwrittenChanges, tables: list[TableChange]) -> None:
        self._dialect.tune()
        with self._dialect.transaction(durable=changes.durable):
            self._lease.renew()
            if changes.everything:
                for model in MODELS:
                    if model is not models.MetricBucket:
                        model._default_manager.using(self._dialect.alias).all().delete()
            for change in tables:
                change.apply(self._dialect)
            self._metrics.purge(self._dialect.alias, self._clock.now())

    def _succeed(self, changes: UnwrittenChanges) -> None:
        with self._changed:
            if self._failure is not None:
                logger.warning("Changed jobs can be written again; nothing was lost.")
            self._failure = None
            for key in self._again:
                self._refused.pop(key, None)
            self._again.clear()
            self._in_flight = 0
            self.written = changes.generation
            self._changed.notify_all()
        for done in changes.waiting:
            done(None)

    def _fail(self, changes: UnwrittenChanges, error: BaseException) -> None:
        hide_row(error)
        with self._changed:
            waiting, changes.waiting = changes.waiting, []
            if changes is not self._changes:
                changes.follow(self._changes)
                self._changes = changes
            self._in_flight = 0
            self._failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self._changed.notify_all()
        for done in waiting:
            done(error)


def _rows(alias: str, statement: str, *given: list[str]) -> list[tuple[Any, ...]]:
    try:
        with named(alias), connections[alias].cursor() as cursor:
            cursor.execute(statement.replace("?", "%s"), given)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
            return rows
    finally:
        connections[alias].close()  # The thread of a client's calls would keep it.
