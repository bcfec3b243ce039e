"""Fire schedules: enqueue one job per slot of each row exactly once, even if processes die at any point.

The rows of `CronJob` are the truth, for every storage. Any number of processes may fire them. A slot is fired
in three steps, and another process can tell from the row which one was reached:

1. `firing_at` is set, if it is unchanged since it was read: only one of several processes goes on;
2. the job is enqueued, with the slot in its id;
3. the row moves on to the next slot, and the execution is counted, unless another process has done so.

If a process dies after the first step, another takes the row over after `TAKEOVER_AFTER`, or after
`DEAD_TAKEOVER_AFTER` if the process ran on the same machine and is known to be gone. The job's id tells
whether it was enqueued, as long as its record is kept. After that it cannot be known, and the slot is
skipped: at most one job per slot.

The jobs pass the middleware like all others. A slot that the middleware refuses is skipped, with the reason
in the row, and so is one whose job a database refuses, because of a constraint or a trigger of the project.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from threading import Lock
from typing import Any, NamedTuple

from django.db import Error, connections, transaction
from django.db.models import F, Q, QuerySet

from djqueue.client import envelope
from djqueue.client.announcing import announcer
from djqueue.conf import get_settings
from djqueue.core.clock import Clock
from djqueue.core.errors import DjqueueError, JobNotStoredError, StorageUnavailableError
from djqueue.core.job import Batch, EnqueueResult, Incident
from djqueue.core.logs import Log
from djqueue.core.messages import in_one_line
from djqueue.core.options import JobKey, JobOptions
from djqueue.core.procfs import died_here, this_process
from djqueue.core.states import LIVE, PENDING, State
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.middleware import Layer, layers_of, through
from djqueue.models import CronJob
from djqueue.schedules import Schedule
from djqueue.schedules.schedule import plan
from djqueue.signals import job_enqueued
from djqueue.storage.base import Storage
from djqueue.storage.tables.clock import DatabaseClock, set_right
from djqueue.storage.tables.dberrors import refuses_rows

from .cronjobs import batch_of, declare, job_id

logger = Log("djqueue.cron")

SCHEDULES_PER_CALL = 500
"""Schedules per call of the storage."""
MAX_PASSES = 100
"""Passes of one `fire`; slots that are due after them wait for the next."""
TAKEOVER_AFTER = 75_000
"""Milliseconds that a process has for a slot: more than the longest call of a storage."""
DEAD_TAKEOVER_AFTER = 5_000
"""Milliseconds before a dead process's slot is taken over: its last request may still reach the storage."""
ENQUEUE_WITHIN = 5_000
"""Milliseconds after `firing_at` within which a process still enqueues."""
IDS_KNOWN_FOR = 25 * 60_000
"""Milliseconds for which an unknown id means that the job was not enqueued."""
SET_BACK = 60_000
"""Milliseconds that the clock must be set back for the next runs to be recomputed."""
LONGEST_REASON = 1_000
"""Maximum characters of the reason for skipping a slot."""
NOT_PASSED = "not enqueued by the middleware"
IN_DOUBT = "may have been enqueued already"
UNFINISHED = "the previous job is unfinished"
REFUSED = "refused by the database"

KnownStates = dict[JobKey, State]
"""The states of existing jobs."""


class FiringAttempt(NamedTuple):
    """The slots of one row that are due."""

    row: CronJob
    schedule: Schedule
    slots: tuple[int, ...]
    following: int | None
    batch: Batch
    """One job per slot."""

    def key(self, slot: int) -> JobKey:
        """Return the queue and the id of a slot's job."""
        return self.batch.queue, job_id(self.row, slot)

    @property
    def earlier(self) -> list[JobKey]:
        """Jobs of earlier slots that may be unfinished; none if runs may overlap."""
        if self.schedule.overlap == "allow":
            return []
        earlier = {(str(queue), str(one)) for queue, one in self.row.unfinished}
        last = _instant_of(self.row.last_run_at)
        if last is not None:
            earlier.add(self.key(last))
        return sorted(earlier)


class Enqueued(NamedTuple):
    """The job of a slot."""

    queue: str
    id: str
    options: JobOptions


class Skipped(NamedTuple):
    """A slot that is skipped."""

    slot: int
    reason: str


class FiredSlots(NamedTuple):
    """The outcome of an attempt so far."""

    attempt: FiringAttempt
    jobs: dict[int, Enqueued]
    """By slot."""
    unfinished: list[JobKey]
    """Jobs of earlier slots that have not ended; empty if runs may overlap."""
    wanted: list[int]
    """Slots whose jobs are still to be enqueued."""
    skipped: Skipped | None
    """The last slot that was skipped."""

    @property
    def missing(self) -> Batch:
        """The jobs that are still to be enqueued."""
        batch, ids = self.attempt.batch, [self.attempt.key(slot)[1] for slot in self.wanted]
        return batch._replace(payloads=batch.payloads[: len(ids)], ids=ids)

    def answered(self, answers: Sequence[tuple[Batch, EnqueueResult]], reason: str) -> "FiredSlots":
        """Return a copy with the storage's answers to the batches.

        Args:
            reason: Why a slot has no answer.
        """
        jobs, skipped = dict(self.jobs), self.skipped
        by_id = {answer.id: (batch, answer) for batch, answer in answers}
        for index, slot in enumerate(self.wanted):
            _, job = self.attempt.key(slot)
            # Middleware may have given it another id.
            by_index = answers[index] if len(answers) == len(self.wanted) else (self.attempt.batch, None)
            batch, answer = by_id.get(job) or by_index
            if answer is not None and (answer.id == job or answer.status == "queued"):
                jobs[slot] = Enqueued(answer.queue, answer.id, batch.options)
            else:
                skipped = Skipped(slot, reason if answer is None else f"duplicate of job {answer.id}")
        unfinished = self.unfinished
        if self.attempt.schedule.overlap != "allow":
            unfinished = [*unfinished, *(jobs[slot][:2] for slot in self.wanted if slot in jobs)]
        return self._replace(
            jobs=dict(sorted(jobs.items())), unfinished=unfinished, wanted=[], skipped=skipped
        )


def _instant_of(value: datetime | None) -> int | None:
    """Return a time of a row in UTC milliseconds."""
    return None if value is None else to_milliseconds(value)


class Firing:
    """Fires the due schedules of a storage. Any number of processes and threads may do so at once.

    Args:
        alias: The database with the rows.
        takeover_after: Milliseconds after which another process's slot is taken over.
        ids_known_for: Milliseconds for which the storage knows every job that was enqueued.
        lock: Shared by all that fire in the same storage in one process.
    """

    def __init__(
        self,
        storage: Storage,
        alias: str,
        *,
        clock: Clock | None = None,
        takeover_after: int = TAKEOVER_AFTER,
        ids_known_for: int = IDS_KNOWN_FOR,
        lock: "Lock | None" = None,
    ) -> None:
        self.clock = clock or DatabaseClock(alias)
        self._storage = storage
        self._alias = alias
        self._takeover_after = takeover_after
        self._ids_known_for = ids_known_for
        self._lock = lock or Lock()
        self._is_declared = False
        self._mine: dict[int, int] = {}
        """`firing_at` of this process's own attempts, by primary key of the row."""
        self._refused: set[int] = set()
        """Primary keys of rows whose jobs the storage refuses."""
        self._seen: tuple[int, int] | None = None
        """The last wall-clock and monotonic times."""

    def fire(self) -> int:
        """Enqueue the jobs of all due slots, and return their number.

        Raises StorageError and the database's errors.
        """
        with self._lock:
            if not self._is_declared:
                self.declare()
            set_right(self.clock)
            self._check_clock()
            fired = 0
            for _ in range(MAX_PASSES):
                attempts = list(self._due())
                done = [
                    one
                    for start in range(0, len(attempts), SCHEDULES_PER_CALL)
                    for one in self._fire(attempts[start : start + SCHEDULES_PER_CALL])
                ]
                if not done:
                    break
                fired += sum(done)
            return fired

    def declare(self) -> None:
        """Bring the rows up to date with this process's code. The first `fire` does it otherwise.

        Raises the database's errors.
        """
        set_right(self.clock)
        declare(self._alias, self.clock.now())
        self._is_declared = True

    def leave(self) -> None:
        """Close this thread's connection, after an error."""
        connections[self._alias].close()

    # What is due.

    def _due(self) -> Iterator[FiringAttempt]:
        """Yield the rows to fire, and move the others on."""
        now = self.clock.now()
        rows = self._enabled().filter(Q(next_run_at__isnull=True) | Q(next_run_at__lte=now))
        for row in rows.order_by("id"):
            try:
                attempt = self._attempt(row, now)
            except DjqueueError as error:
                self._disable(row, error)
                continue
            if attempt is not None:
                yield attempt

    def _attempt(self, row: CronJob, now: int) -> FiringAttempt | None:
        schedule = row.timing()
        slot, last = _instant_of(row.next_run_at), _instant_of(row.last_run_at)
        if slot is None or (last is not None and slot <= last):
            # The row is new or was changed, or the clock was set back.
            self._move(row, row.next_slot(now))
            return None
        began = _instant_of(row.firing_at)
        # A slot that a process has begun is judged by that time, so that it does not count as missed.
        due = plan(schedule, row.name, slot, now if began is None else min(began, now))
        due = due or plan(schedule, row.name, slot, now)
        if due is None or not self._may_begin(row, now):
            return None
        slots, following = due
        if schedule.max_executions is not None:
            slots = slots[: max(0, schedule.max_executions - row.executions)]
            following = following if slots else None
        if not slots:
            logger.info("Schedule %s: skipped its missed runs.", row.name)
            self._move(row, following)
            return None
        return FiringAttempt(
            row, schedule, slots, following, batch_of(row, [job_id(row, slot) for slot in slots])
        )

    def _may_begin(self, row: CronJob, now: int) -> bool:
        """Return whether no process is firing the row, or its time is over."""
        began = _instant_of(row.firing_at)
        if began is None or self._mine.get(row.pk) == began:
            return True
        age = now - began
        return not 0 <= age < self._takeover_after or (age >= DEAD_TAKEOVER_AFTER and _is_gone(row.firing_by))

    # Firing.

    def _fire(self, attempts: Sequence[FiringAttempt]) -> list[int]:
        """Return the number of new jobs of each finished attempt."""
        known = self._known(attempts)
        tick = self.clock.monotonic()
        begun = self._begin(attempts)
        if self.clock.monotonic() - tick > ENQUEUE_WITHIN:
            # Another process may take the attempts for abandoned. They are not left to the next pass, because
            # no other process may fire these rows meanwhile.
            begun = [attempt for attempt in begun if self._is_renewed(attempt)]
        sent = self._send(begun, known)
        with transaction.atomic(using=self._alias):
            are_new = [self._finish(fired) for fired in sent]
        counts = []
        for fired, is_new in zip(sent, are_new, strict=True):
            self._mine.pop(fired.attempt.row.pk, None)
            new = list(fired.jobs.values()) if is_new else []
            for job in new:
                self._announce(fired.attempt.row, job)
            counts.append(len(new))
        return counts

    def _known(self, attempts: Iterable[FiringAttempt]) -> KnownStates:
        """Return the states of the existing jobs of these slots, and of earlier ones."""
        wanted: dict[str, dict[str, None]] = {}
        for attempt in attempts:
            for queue, one in (*map(attempt.key, attempt.slots), *attempt.earlier):
                wanted.setdefault(queue, {})[one] = None
        return {
            (queue, one): state
            for queue, ids in wanted.items()
            for one, state in zip(ids, self._storage.reads.states(queue, list(ids)), strict=True)
            if state is not None
        }

    def _begin(self, attempts: Sequence[FiringAttempt]) -> list[FiringAttempt]:
        """Mark the rows, and return the attempts that this process may continue."""
        now = self.clock.now()
        begun = []
        with transaction.atomic(using=self._alias):
            for attempt in attempts:
                row = attempt.row
                unchanged = self._enabled().filter(
                    pk=row.pk, next_run_at=row.next_run_at, firing_at=row.firing_at
                )
                if unchanged.update(firing_at=now, firing_by=_this_process()):
                    begun.append(attempt)
        self._mine.update((attempt.row.pk, now) for attempt in begun)
        return begun

    def _send(self, attempts: Sequence[FiringAttempt], known: KnownStates) -> list[FiredSlots]:
        """Enqueue the jobs that do not exist yet."""
        divided = [self._divide(attempt, known) for attempt in attempts]
        if layers_of(get_settings()).enqueue:
            return self._send_apart(divided)
        batches = [one.missing for one in divided if one.wanted]
        if not batches:
            return divided
        try:
            answers = iter(self._enqueue(batches))
        except Exception as error:
            if not (_is_refusal(error) or _is_of_jobs(error)):
                raise
            return self._send_apart(divided)
        answered = []
        for one in divided:
            batch = one.missing
            answered.append(one.answered([(batch, next(answers)) for _ in one.wanted], ""))
        return answered

    def _send_apart(self, divided: Sequence[FiredSlots]) -> list[FiredSlots]:
        """Enqueue each attempt by itself: one that a full queue refuses must not hold up the rest."""
        accepted = []
        for one in divided:
            row = one.attempt.row
            try:
                accepted.append(self._send_one(one) if one.wanted else one)
            except TakenOverError:
                logger.warning(
                    "Schedule %s: the middleware took too long, so another process took over.", row.name
                )
            except Exception as error:
                if _is_refusal(error):
                    accepted.append(self._skip_refused(one, error))
                    self._log_refused(row, "its run was skipped, because the database refused the job", error)
                elif _is_of_jobs(error):
                    self._log_refused(row, "enqueueing was refused, retrying", error)
                else:
                    raise
            else:
                self._refused.discard(row.pk)
        return accepted

    def _log_refused(self, row: CronJob, what: str, error: Exception) -> None:
        """Log once, until a job of the row is enqueued, what has become of its slots."""
        if row.pk not in self._refused:
            self._refused.add(row.pk)
            logger.error("Schedule %s: %s: %s", row.name, what, in_one_line(error))

    def _skip_refused(self, divided: FiredSlots, error: Exception) -> FiredSlots:
        """Skip the slots whose jobs a database refuses.

        A scheduler has such jobs in memory. Those that have not started are removed, and the others count.
        """
        is_kept = isinstance(error, JobNotStoredError)
        jobs, skipped = dict(divided.jobs), divided.skipped
        for slot in divided.wanted:
            key = divided.attempt.key(slot)
            if is_kept and not self._take_back(*key):
                jobs[slot] = Enqueued(*key, divided.attempt.batch.options)
            else:
                skipped = Skipped(slot, f"{REFUSED}: {in_one_line(error)}")
        return divided._replace(jobs=dict(sorted(jobs.items())), wanted=[], skipped=skipped)

    def _take_back(self, queue: str, job_id: str) -> bool:
        """Remove a job that only a scheduler's memory has; return False if it has started."""
        if self._storage.reads.states(queue, [job_id])[0] not in PENDING:
            return False
        with suppress(JobNotStoredError):
            return self._storage.jobs.remove(queue, [job_id])[0]
        return True

    def _send_one(self, divided: FiredSlots) -> FiredSlots:
        """Enqueue the jobs of an attempt through the middleware, which may refuse or change them."""
        row = divided.attempt.row

        def enqueue(batch: Batch) -> list[EnqueueResult]:
            # The attempts before this one, too, have taken time since the row was marked.
            if not 0 <= self.clock.now() - self._mine[row.pk] <= ENQUEUE_WITHIN:
                self._renew(divided.attempt)
            return self._enqueue([batch])

        answers, error = _enqueue_through(layers_of(get_settings()).enqueue, divided.missing, enqueue)
        reason = NOT_PASSED if error is None else f"{type(error).__name__}: {error}"
        answered = divided.answered(answers, reason)
        if error is not None:
            logger.error(
                "Schedule %s: the middleware raised %s; %d of %d jobs were enqueued.",
                row.name,
                reason,
                len(answered.jobs) - len(divided.jobs),
                len(divided.wanted),
                exc_info=error,
            )
        return answered

    def _is_renewed(self, attempt: FiringAttempt) -> bool:
        """Renew the mark of the row; return False if another process has it."""
        try:
            self._renew(attempt)
        except TakenOverError:
            return False
        return True

    def _renew(self, attempt: FiringAttempt) -> None:
        """Renew the mark of the row. Raises TakenOverError if another process has it."""
        row, now = attempt.row, self.clock.now()
        began = to_datetime(self._mine[row.pk])
        unchanged = self._enabled().filter(pk=row.pk, next_run_at=row.next_run_at, firing_at=began)
        if not unchanged.update(firing_at=now):
            raise TakenOverError
        self._mine[row.pk] = now

    def _enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        # Not through the outbox, which does not know the ids of existing jobs.
        enqueue = self._storage.capabilities.enqueue_directly or self._storage.enqueue
        return enqueue(batches)

    def _divide(self, attempt: FiringAttempt, known: KnownStates) -> FiredSlots:
        """Return the slots that have a job or get one, and those that do not."""
        overlap = attempt.schedule.overlap
        unfinished = [key for key in attempt.earlier if known.get(key) in LIVE]
        jobs: dict[int, Enqueued] = {}
        wanted: list[int] = []
        skipped = None
        for slot in attempt.slots:
            key = attempt.key(slot)
            if key in known:
                jobs[slot] = Enqueued(*key, attempt.batch.options)
            elif self._is_in_doubt(attempt, slot):
                skipped = Skipped(slot, IN_DOUBT)
            elif _overlaps(overlap, [*unfinished, *map(attempt.key, wanted)], known):
                skipped = Skipped(slot, UNFINISHED)
            else:
                wanted.append(slot)
        return FiredSlots(attempt, jobs, unfinished, wanted, skipped)

    def _is_in_doubt(self, attempt: FiringAttempt, slot: int) -> bool:
        """Return whether the job may have been enqueued so long ago that its record is gone."""
        began = _instant_of(attempt.row.firing_at)
        if began is None or slot > began or self.clock.now() - began <= self._ids_known_for:
            return False
        logger.warning(
            "Schedule %s: skipped its run at %s, which may have been enqueued already.",
            attempt.row.name,
            to_datetime(slot).isoformat(),
        )
        return True

    def _finish(self, sent: FiredSlots) -> bool:
        """Count the executions once, and move the row on unless it was changed in the meantime.

        Returns whether to announce the jobs: once for each, and also if the row is gone.
        """
        row, slots = sent.attempt.row, list(sent.jobs)
        executions, is_new = row.executions, False
        if slots:
            is_counted = Q(last_run_at__isnull=False, last_run_at__gte=slots[-1])
            rows = self._rows().filter(pk=row.pk)
            counted = rows.filter(~is_counted).update(
                executions=F("executions") + len(slots), last_run_at=slots[-1], unfinished=sent.unfinished
            )
            is_new = bool(counted) or not rows.exists()
            executions += len(slots)
        limit = sent.attempt.schedule.max_executions
        is_over = limit is not None and executions >= limit
        self._move(row, None if is_over else sent.attempt.following, sent.skipped)
        return is_new

    def _move(self, row: CronJob, following: int | None, skipped: Skipped | None = None) -> None:
        """Set the next slot if the current one is unchanged; without a next slot the schedule is over."""
        more: dict[str, Any] = {} if following is not None else {"enabled": False}
        if skipped is not None:
            more.update(skipped_at=skipped.slot, skip_reason=skipped.reason[:LONGEST_REASON])
        self._rows().filter(pk=row.pk, next_run_at=row.next_run_at).update(
            next_run_at=following, firing_at=None, firing_by="", **more
        )

    def _disable(self, row: CronJob, error: DjqueueError) -> None:
        logger.error("Schedule %s was disabled: %s", row.name, error)
        self._enabled().filter(pk=row.pk).update(enabled=False)

    # Clock changes.

    def _check_clock(self) -> None:
        now, tick = self.clock.now(), self.clock.monotonic()
        seen, self._seen = self._seen, (now, tick)
        if seen is not None and (now - seen[0]) - (tick - seen[1]) < -SET_BACK:
            logger.warning("The clock was set back; recomputing the next runs of all schedules.")
            self._recompute(now)

    def _recompute(self, now: int) -> None:
        """Recompute the next runs: by a clock that was ahead they may be years away. No slot runs twice."""
        for row in self._enabled().filter(next_run_at__gt=now, firing_at__isnull=True).order_by("id"):
            with suppress(DjqueueError):  # `_due` logs it when the row is due
                slot = row.next_slot(now)
                if slot is not None and slot < (_instant_of(row.next_run_at) or 0):
                    self._move(row, slot)

    # Rows.

    def _enabled(self) -> "QuerySet[CronJob]":
        return self._rows().filter(enabled=True)

    def _rows(self) -> "QuerySet[CronJob]":
        return CronJob.objects.using(self._alias)

    def _announce(self, row: CronJob, job: Enqueued) -> None:
        logger.info("Schedule %s: enqueued job %s in queue %s.", row.name, job.id, job.queue)
        if job_enqueued.receivers:
            announcer.announce(
                job_enqueued, row.job_name, queue=job.queue, job_id=job.id, options=job.options
            )
        self._storage.notify_incidents([Incident(job.queue, job.id, row.job_name, "fired", row.name)])


class TakenOverError(DjqueueError):
    """Another process has taken over the slot."""


def _is_refusal(error: Exception) -> bool:
    """Return whether a database refuses the rows of a job, and may take those of others."""
    if isinstance(error, JobNotStoredError):
        return True
    cause = error.__cause__ if isinstance(error, StorageUnavailableError) else error
    return isinstance(cause, Error) and refuses_rows(cause)


def _is_of_jobs(error: Exception) -> bool:
    """Return whether an error concerns jobs, rather than the storage."""
    return isinstance(error, DjqueueError) and not isinstance(error, StorageUnavailableError)


def _this_process() -> str:
    return f"{os.getpid()}@{this_process()}"


def _is_gone(process: str) -> bool:
    """Return whether a process of this machine has ended; a suspended one has not."""
    pid, _, host = process.partition("@")
    return pid.isdecimal() and died_here(int(pid), host)


def _overlaps(overlap: str, unfinished: list[JobKey], known: KnownStates) -> bool:
    if overlap == "one_pending":
        # An unknown job is about to be enqueued.
        return any(known.get(key, State.WAITING) in PENDING for key in unfinished)
    return overlap == "skip" and bool(unfinished)


class EnqueuedBatch(NamedTuple):
    """The storage's answers to a batch."""

    answers: list[tuple[Batch, EnqueueResult]]
    """Each with its batch, in order."""
    error: Exception | None
    """The exception that the middleware raised."""


def _enqueue_through(
    layers: Iterable[Layer], batch: Batch, enqueue: Callable[[Batch], list[EnqueueResult]]
) -> EnqueuedBatch:
    """Enqueue a batch through the middleware.

    The storage's answers count, not those of the middleware. Raises the errors of `enqueue`, even if the
    middleware handles them.
    """
    answers: list[tuple[Batch, EnqueueResult]] = []
    failures: list[Exception] = []

    def take(changed: Batch) -> list[EnqueueResult]:
        if changed.options is not batch.options:
            envelope.check_size(changed.options, changed.name, changed.payloads)
        try:
            results = enqueue(changed)
        except Exception as error:
            failures.append(error)
            raise
        answers.extend((changed, result) for result in results)
        return results

    raised = None
    try:
        through(layers, take)(batch)
    except Exception as error:
        raised = error
    if failures:
        raise failures[0] from raised if raised is not failures[0] else None
    return EnqueuedBatch(answers, raised)
