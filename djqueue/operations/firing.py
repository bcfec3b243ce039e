"""Schedules fire: a job for each slot of each row, once, whoever looks and whenever one of them dies.

The rows of `CronJob` are the truth, whatever the storage. Any number of processes may look at them. A slot
is fired in three steps, each of which whoever comes next can tell from the others:

1. `firing_at` is set, if it is as it was read: of several who look, one goes on;
2. the job is enqueued, with the slot in its id;
3. the row is moved on to the next slot, and the execution counted, unless somebody has done so.

One who dies behind the first step leaves a row that is taken over after `GRACE`; after `DEAD` if its process
was one of this machine, which can be seen to be gone. Whether the job was enqueued then, its id says, for
as long as the record of a job is kept. Behind that nobody can know, and the slot is left out: at most one
job for each.

The jobs go through the middleware, as all others do. What that refuses is left out, with the reason in the
row.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from threading import Lock
from typing import Any, NamedTuple

from django.db import connections, transaction
from django.db.models import F, Q, QuerySet

from djqueue.client.announcing import announcer
from djqueue.conf import get_settings
from djqueue.core.clock import Clock
from djqueue.core.durations import to_datetime, to_milliseconds
from djqueue.core.errors import DjqueueError, StorageUnavailableError
from djqueue.core.job import Batch, EnqueueResult, Incident
from djqueue.core.options import JobKey, JobOptions
from djqueue.core.states import LIVE, PENDING, State
from djqueue.middleware import layers_of
from djqueue.models import CronJob
from djqueue.schedules import Schedule
from djqueue.schedules.plan import plan
from djqueue.signals import job_enqueued
from djqueue.storage.base import Storage
from djqueue.storage.database.clock import DatabaseClock, set_right
from djqueue.storage.database.lease import LeaseHolder, died_here, host_name, start_mark

from .cron import batch_of, job_id
from .declaring import declare
from .middleware import passed

logger = logging.getLogger("djqueue.cron")

ROWS = 500
"""Schedules of one call of the storage."""
ROUNDS = 100
"""Looks of one round: what is due then is left to the next one."""
GRACE = 75_000
"""Milliseconds that one who has begun with a slot has for it: more than the longest call of a storage."""
DEAD = 5_000
"""The same if the process is known to be gone: a word of its own may still be on its way to the storage."""
HASTE = 5_000
"""Milliseconds after which one who has begun does not enqueue any more."""
SURE = 25 * 60_000
"""Milliseconds for which an id that is not known was not enqueued."""
SET_BACK = 60_000
"""Milliseconds by which a clock has to be set back for the next runs to be worked out anew."""


Known = dict[JobKey, State]
"""Jobs that are there."""


class FiringAttempt(NamedTuple):
    """Slots of one row that are to be fired now."""

    row: CronJob
    schedule: Schedule
    slots: tuple[int, ...]
    following: int | None
    batch: Batch
    """Of one job for each slot."""

    def key(self, slot: int) -> JobKey:
        """What names the job of a slot."""
        return self.batch.queue, job_id(self.row, slot)

    @property
    def earlier(self) -> list[JobKey]:
        """Jobs of the schedule that may be unfinished; none if it does not matter."""
        if self.schedule.overlap == "allow":
            return []
        earlier = {(str(queue), str(one)) for queue, one in self.row.unfinished}
        last = _instant(self.row.last_run_at)
        if last is not None:
            earlier.add(self.key(last))
        return sorted(earlier)


class Enqueued(NamedTuple):
    """The job of a slot."""

    queue: str
    id: str
    options: JobOptions


class Skipped(NamedTuple):
    """A slot that is left out."""

    slot: int
    reason: str


class FiredSlots(NamedTuple):
    """What becomes of an attempt."""

    attempt: FiringAttempt
    jobs: dict[int, Enqueued]
    """By slot."""
    unfinished: list[JobKey]
    """If runs may not overlap: the jobs of earlier slots that have not ended."""
    wanted: list[int]
    """Slots whose jobs are still to be enqueued."""
    skipped: Skipped | None
    """The last that is left out."""

    @property
    def missing(self) -> Batch:
        """The jobs that are still to be enqueued."""
        batch, ids = self.attempt.batch, [self.attempt.key(slot)[1] for slot in self.wanted]
        return batch._replace(payloads=batch.payloads[: len(ids)], ids=ids)

    def answered(self, answers: Sequence[tuple[Batch, EnqueueResult]], reason: str) -> "FiredSlots":
        """With the storage's answers to the batches that it was given.

        reason: why a slot has none.
        """
        jobs, skipped = dict(self.jobs), self.skipped
        by_id = {answer.id: (batch, answer) for batch, answer in answers}
        for at, slot in enumerate(self.wanted):
            _, job = self.attempt.key(slot)
            # Middleware may have given it another id.
            batch, answer = by_id.get(job) or (answers[at] if len(answers) == len(self.wanted) else NOTHING)
            if answer is not None and (answer.id == job or answer.status == "queued"):
                jobs[slot] = Enqueued(answer.queue, answer.id, batch.options)
            else:
                skipped = Skipped(slot, reason if answer is None else f"kept out by the job {answer.id}")
        unfinished = self.unfinished
        if self.attempt.schedule.overlap != "allow":
            unfinished = [*unfinished, *(jobs[slot][:2] for slot in self.wanted if slot in jobs)]
        return self._replace(
            jobs=dict(sorted(jobs.items())), unfinished=unfinished, wanted=[], skipped=skipped
        )


class Firing:
    """Fires what is due, in a storage. Any number of processes and threads may do so at once.

    alias: of the database with the rows.
    grace: milliseconds after which what another one has begun is taken over.
    sure: milliseconds for which the storage is known to know every job that it got.
    lock: shared by those who fire in the same storage in one process.
    """

    def __init__(
        self,
        storage: Storage,
        alias: str,
        *,
        clock: Clock | None = None,
        grace: int = GRACE,
        sure: int = SURE,
        lock: "Lock | None" = None,
    ) -> None:
        self.clock = clock or DatabaseClock(alias)
        self._storage = storage
        self._alias = alias
        self._grace = grace
        self._sure = sure
        self._lock = lock or Lock()
        self._is_declared = False
        self._mine: dict[int, int] = {}
        """`firing_at` by number of the row: where this process's own attempt has failed, and is over."""
        self._refused: set[int] = set()
        """Numbers of rows whose jobs the storage does not take."""
        self._seen: tuple[int, int] | None = None
        """What the clock said last, both ways."""

    def fire(self) -> int:
        """Enqueue what is due; returns how many jobs that was.

        Raises StorageError and the database's errors.
        """
        with self._lock:
            if not self._is_declared:
                self.declare()
            set_right(self.clock)
            self._look_at_the_clock()
            fired = 0
            for _ in range(ROUNDS):
                attempts = list(self._due())
                done = [
                    one
                    for start in range(0, len(attempts), ROWS)
                    for one in self._fire(attempts[start : start + ROWS])
                ]
                if not done:
                    break
                fired += sum(done)
            return fired

    def declare(self) -> None:
        """Make the rows equal to what this process's code declares, which `fire` does otherwise.

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
        """Rows to be fired; those that are only to be moved on are."""
        now = self.clock.now()
        rows = self._enabled().filter(Q(next_run_at__isnull=True) | Q(next_run_at__lte=now))
        for row in rows.order_by("id"):
            try:
                attempt = self._attempt(row, now)
            except DjqueueError as error:
                self._switch_off(row, error)
                continue
            if attempt is not None:
                yield attempt

    def _attempt(self, row: CronJob, now: int) -> FiringAttempt | None:
        schedule = row.timing()
        slot, last = _instant(row.next_run_at), _instant(row.last_run_at)
        if slot is None or (last is not None and slot <= last):
            # A new one, or one that was changed, or whose clock was set back.
            self._move(row, row.next_slot(now))
            return None
        began = _instant(row.firing_at)
        # What somebody has begun with is judged as it was then, and so is not missed by now.
        due = plan(schedule, row.name, slot, now if began is None else min(began, now))
        due = due or plan(schedule, row.name, slot, now)
        if due is None or not self._may_begin(row, now):
            return None
        slots, following = due
        if schedule.max_executions is not None:
            slots = slots[: max(0, schedule.max_executions - row.executions)]
            following = following if slots else None
        if not slots:
            logger.info("The cron job %s leaves out what it has missed.", row.name)
            self._move(row, following)
            return None
        return FiringAttempt(
            row, schedule, slots, following, batch_of(row, [job_id(row, slot) for slot in slots])
        )

    def _may_begin(self, row: CronJob, now: int) -> bool:
        """Whether nobody is at this row, or whoever was has had the time."""
        began = _instant(row.firing_at)
        if began is None or self._mine.get(row.pk) == began:
            return True
        age = now - began
        return not 0 <= age < self._grace or (age >= DEAD and _is_gone(row.firing_by))

    # One after the other.

    def _fire(self, attempts: Sequence[FiringAttempt]) -> list[int]:
        """How many jobs each had, of those that are done with."""
        known = self._known(attempts)
        tick = self.clock.monotonic()
        begun = self._begin(attempts)
        if self.clock.monotonic() - tick > HASTE:
            # Whoever comes next may take it for abandoned.
            return []
        sent = self._send(begun, known)
        with transaction.atomic(using=self._alias):
            is_new = [self._finish(one) for one in sent]
        for one in sent:
            self._mine.pop(one.attempt.row.pk, None)
        new = [list(one.jobs.values()) if is_its else [] for one, is_its in zip(sent, is_new, strict=True)]
        for one, jobs in zip(sent, new, strict=True):
            for job in jobs:
                self._tell(one.attempt.row, job)
        return list(map(len, new))

    def _known(self, attempts: Iterable[FiringAttempt]) -> Known:
        """The states of the jobs that are there for these slots, and of those that may be unfinished."""
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
        """Those that are this process's to fire from here on."""
        now = self.clock.now()
        begun = []
        with transaction.atomic(using=self._alias):
            for attempt in attempts:
                row = attempt.row
                mine = self._enabled().filter(pk=row.pk, next_run_at=row.next_run_at, firing_at=row.firing_at)
                if mine.update(firing_at=now, firing_by=_this_process()):
                    begun.append(attempt)
        self._mine.update((attempt.row.pk, now) for attempt in begun)
        return begun

    def _send(self, attempts: Sequence[FiringAttempt], known: Known) -> list[FiredSlots]:
        """Enqueue the jobs that are not there yet."""
        sent = [self._sorted_out(attempt, known) for attempt in attempts]
        if layers_of(get_settings()).enqueue:
            return self._send_apart(sent)
        batches = [one.missing for one in sent if one.wanted]
        if not batches:
            return sent
        try:
            answers = iter(self._enqueue(batches))
        except StorageUnavailableError:
            raise
        except DjqueueError:
            return self._send_apart(sent)
        answered = []
        for one in sent:
            batch = one.missing
            answered.append(one.answered([(batch, next(answers)) for _ in one.wanted], ""))
        return answered

    def _send_apart(self, sent: Sequence[FiredSlots]) -> list[FiredSlots]:
        """Each by itself: one that is refused, by a full queue say, is tried again, and keeps up no other."""
        accepted = []
        for one in sent:
            row = one.attempt.row
            try:
                accepted.append(self._send_one(one) if one.wanted else one)
            except StorageUnavailableError:
                raise
            except TakenOverError:
                logger.warning("The cron job %s: the middleware took so long that another goes on.", row.name)
            except DjqueueError as error:
                if row.pk not in self._refused:
                    self._refused.add(row.pk)
                    logger.error("The cron job %s is refused, and tried again: %s", row.name, error)
            else:
                self._refused.discard(row.pk)
        return accepted

    def _send_one(self, sent: FiredSlots) -> FiredSlots:
        """Through the middleware: it has the last word on a slot, as it has on every enqueue."""
        row = sent.attempt.row

        def enqueue(batch: Batch) -> list[EnqueueResult]:
            # Also those before it have taken their time since it was marked.
            if not 0 <= self.clock.now() - self._mine[row.pk] <= HASTE:
                self._renew(sent.attempt)
            return self._enqueue([batch])

        answers, error = passed(layers_of(get_settings()).enqueue, sent.missing, enqueue)
        reason = NOT_PASSED if error is None else f"{type(error).__name__}: {error}"
        answered = sent.answered(answers, reason)
        if error is not None:
            logger.error(
                "The cron job %s: the middleware raised %s; %d of %d jobs were enqueued.",
                row.name,
                reason,
                len(answered.jobs) - len(sent.jobs),
                len(sent.wanted),
                exc_info=error,
            )
        return answered

    def _renew(self, attempt: FiringAttempt) -> None:
        """Mark the row anew. Raises TakenOverError if it is not this process's any more."""
        row, now = attempt.row, self.clock.now()
        began = to_datetime(self._mine[row.pk])
        mine = self._enabled().filter(pk=row.pk, next_run_at=row.next_run_at, firing_at=began)
        if not mine.update(firing_at=now):
            raise TakenOverError
        self._mine[row.pk] = now

    def _enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        # Not to the table of the jobs on their way to Redis, where no id is known.
        enqueue = self._storage.capabilities.enqueue_directly or self._storage.enqueue
        return enqueue(batches)

    def _sorted_out(self, attempt: FiringAttempt, known: Known) -> FiredSlots:
        """The slots that have a job or get one, and those that do not."""
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
        """Whether the job may have been enqueued so long ago that it is not known any more."""
        began = _instant(attempt.row.firing_at)
        if began is None or slot > began or self.clock.now() - began <= self._sure:
            return False
        logger.warning(
            "Whether the cron job %s was enqueued for %s cannot be known any more: it is left out.",
            attempt.row.name,
            to_datetime(slot).isoformat(),
        )
        return True

    def _finish(self, sent: FiredSlots) -> bool:
        """Count, unless that is done, and move the row on, unless it was changed meanwhile.

        Whether its jobs are to be told of: once for each, and also if nobody counts them any more.
        """
        row, slots = sent.attempt.row, list(sent.jobs)
        executions, is_new = row.executions, False
        if slots:
            is_counted = Q(last_run_at__isnull=False, last_run_at__gte=slots[-1])
            mine = self._rows().filter(pk=row.pk)
            counted = mine.filter(~is_counted).update(
                executions=F("executions") + len(slots), last_run_at=slots[-1], unfinished=sent.unfinished
            )
            is_new = bool(counted) or not mine.exists()
            executions += len(slots)
        limit = sent.attempt.schedule.max_executions
        is_over = limit is not None and executions >= limit
        self._move(row, None if is_over else sent.attempt.following, sent.skipped)
        return is_new

    def _move(self, row: CronJob, following: int | None, skipped: Skipped | None = None) -> None:
        """Set the next slot, if the present one still is; a schedule without one is over."""
        more: dict[str, Any] = {} if following is not None else {"enabled": False}
        if skipped is not None:
            more.update(skipped_at=skipped.slot, skip_reason=skipped.reason[:LONGEST_REASON])
        self._rows().filter(pk=row.pk, next_run_at=row.next_run_at).update(
            next_run_at=following, firing_at=None, firing_by="", **more
        )

    def _switch_off(self, row: CronJob, why: DjqueueError) -> None:
        logger.error("The cron job %s is switched off: %s", row.name, why)
        self._enabled().filter(pk=row.pk).update(enabled=False)

    # Clocks that are set.

    def _look_at_the_clock(self) -> None:
        now, tick = self.clock.now(), self.clock.monotonic()
        seen, self._seen = self._seen, (now, tick)
        if seen is not None and (now - seen[0]) - (tick - seen[1]) < -SET_BACK:
            logger.warning("The clock was set back: next runs are worked out anew.")
            self._work_out_again(now)

    def _work_out_again(self, now: int) -> None:
        """What was next by a clock that was ahead may be years away. What has run does not run again."""
        for row in self._enabled().filter(next_run_at__gt=now, firing_at__isnull=True).order_by("id"):
            with suppress(DjqueueError):  # `_due` tells of it when its time comes
                slot = row.next_slot(now)
                if slot is not None and slot < (_instant(row.next_run_at) or 0):
                    self._move(row, slot)

    def _enabled(self) -> "QuerySet[CronJob]":
        return self._rows().filter(enabled=True)

    def _rows(self) -> "QuerySet[CronJob]":
        return CronJob.objects.using(self._alias)

    def _tell(self, row: CronJob, job: Enqueued) -> None:
        logger.info("The cron job %s has enqueued %s in queue %s.", row.name, job.id, job.queue)
        if job_enqueued.receivers:
            announcer.announce(
                job_enqueued, row.job_name, queue=job.queue, job_id=job.id, options=job.options
            )
        self._storage.notify_incidents([Incident(job.queue, job.id, row.job_name, "fired", row.name)])


class TakenOverError(DjqueueError):
    """Another process has begun with the slot."""


NOTHING: tuple[Any, None] = (None, None)
LONGEST_REASON = 1_000
"""Characters."""
NOT_PASSED = "the middleware has not passed it on"
IN_DOUBT = "whether it was enqueued cannot be known any more"
UNFINISHED = "a job of an earlier run is unfinished"


def _this_process() -> str:
    return f"{os.getpid()}@{host_name()}{start_mark(os.getpid())}"


def _is_gone(process: str) -> bool:
    """Whether it was a process of this machine that is no more; a stopped one is still there."""
    pid, _, host = process.partition("@")
    return pid.isdecimal() and died_here(LeaseHolder("", host, int(pid), ""))


def _overlaps(overlap: str, unfinished: list[JobKey], known: Known) -> bool:
    if overlap == "one_pending":
        # One that is not known is about to be enqueued.
        return any(known.get(key, State.WAITING) in PENDING for key in unfinished)
    return overlap == "skip" and bool(unfinished)


def _instant(value: datetime | None) -> int | None:
    return None if value is None else to_milliseconds(value)
