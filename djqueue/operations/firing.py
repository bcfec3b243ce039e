"""Schedules fire: a job for each slot of each row, once, whoever looks and whenever one of them dies.

The rows of `CronJob` are the truth, whatever the storage. Any number of processes may look at them. A slot
is fired in three steps, each of which whoever comes next can tell from the others:

1. `firing_at` is set, if it is as it was read: of several who look, one goes on;
2. the job is enqueued, with the slot in its id;
3. the row is moved on to the next slot, and the execution counted, unless somebody has done so.

One who dies behind the first step leaves a row that is taken over after `GRACE`. Whether the job was
enqueued then, its id says, for as long as the record of a job is kept. Behind that nobody can know, and
the slot is left out: at most one job for each.
"""

import logging
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from threading import Lock
from typing import NamedTuple

from django.db import connections, transaction
from django.db.models import F, Q, QuerySet

from djqueue.core.clock import Clock
from djqueue.core.durations import to_datetime, to_milliseconds
from djqueue.core.errors import DjqueueError, StorageUnavailableError
from djqueue.core.job import Batch, Incident
from djqueue.core.options import JobKey
from djqueue.core.states import LIVE, PENDING, State
from djqueue.models import CronJob
from djqueue.schedules import Schedule
from djqueue.schedules.plan import plan
from djqueue.storage.base import Storage
from djqueue.storage.database.clock import DatabaseClock, set_right

from .cron import batch_of, job_id
from .declaring import declare

logger = logging.getLogger("djqueue.cron")

ROWS = 500
"""Schedules of one call of the storage."""
ROUNDS = 100
"""Looks of one round: what is due then is left to the next one."""
GRACE = 75_000
"""Milliseconds that one who has begun with a slot has for it: more than the longest call of a storage."""
HASTE = 5_000
"""Milliseconds after which one who has begun does not enqueue any more."""
SURE = 25 * 60_000
"""Milliseconds for which an id that is not known was not enqueued."""
SET_BACK = 60_000
"""Milliseconds by which a clock has to be set back for the next runs to be worked out anew."""


Known = dict[JobKey, State]
"""Jobs that are there."""


class Attempt(NamedTuple):
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


class Sent(NamedTuple):
    """What became of an attempt."""

    attempt: Attempt
    slots: list[int]
    """Those with a job."""
    unfinished: list[JobKey]
    missing: Batch | None
    """Jobs that were still to be enqueued."""

    def with_those(self, there: Container[JobKey]) -> "Sent":
        """Without what was kept out, by another job's unique key say."""
        return self._replace(
            slots=[slot for slot in self.slots if self.attempt.key(slot) in there],
            unfinished=[key for key in self.unfinished if key in there],
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
            set_right(self.clock)
            if not self._is_declared:
                declare(self._alias, self.clock.now())
                self._is_declared = True
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

    def leave(self) -> None:
        """Close this thread's connection, after an error."""
        connections[self._alias].close()

    # What is due.

    def _due(self) -> Iterator[Attempt]:
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

    def _attempt(self, row: CronJob, now: int) -> Attempt | None:
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
        return Attempt(row, schedule, slots, following, batch_of(row, [job_id(row, slot) for slot in slots]))

    def _may_begin(self, row: CronJob, now: int) -> bool:
        """Whether nobody is at this row, or whoever was has had the time."""
        began = _instant(row.firing_at)
        if began is None or self._mine.get(row.pk) == began:
            return True
        return not 0 <= now - began < self._grace

    # One after the other.

    def _fire(self, attempts: Sequence[Attempt]) -> list[int]:
        """How many jobs each had, of those that are done with."""
        known = self._known(attempts)
        tick = self.clock.monotonic()
        begun = self._begin(attempts)
        if self.clock.monotonic() - tick > HASTE:
            # Whoever comes next may take it for abandoned.
            return []
        sent = self._send(begun, known)
        with transaction.atomic(using=self._alias):
            is_counted = [self._finish(one) for one in sent]
        for one in sent:
            self._mine.pop(one.attempt.row.pk, None)
        new = [one.slots if counted else [] for one, counted in zip(sent, is_counted, strict=True)]
        for one, slots in zip(sent, new, strict=True):
            for slot in slots:
                self._tell(one.attempt.row, one.attempt.key(slot))
        return list(map(len, new))

    def _known(self, attempts: Iterable[Attempt]) -> Known:
        """The states of the jobs that are there for these slots, and of those that may be unfinished."""
        wanted: dict[str, dict[str, None]] = {}
        for attempt in attempts:
            for queue, one in (*map(attempt.key, attempt.slots), *attempt.earlier):
                wanted.setdefault(queue, {})[one] = None
        return {
            (queue, one): state
            for queue, ids in wanted.items()
            for one, state in zip(ids, self._storage.states(queue, list(ids)), strict=True)
            if state is not None
        }

    def _begin(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Those that are this process's to fire from here on."""
        now = self.clock.now()
        begun = []
        with transaction.atomic(using=self._alias):
            for attempt in attempts:
                row = attempt.row
                mine = self._enabled().filter(pk=row.pk, next_run_at=row.next_run_at, firing_at=row.firing_at)
                if mine.update(firing_at=now):
                    begun.append(attempt)
        self._mine.update((attempt.row.pk, now) for attempt in begun)
        return begun

    def _send(self, attempts: Sequence[Attempt], known: Known) -> list[Sent]:
        """Enqueue the jobs that are not there yet."""
        sent = [self._sorted_out(attempt, known) for attempt in attempts]
        batches = [one.missing for one in sent if one.missing is not None]
        if not batches:
            return sent
        try:
            there = {*known, *self._enqueue(batches)}
        except StorageUnavailableError:
            raise
        except DjqueueError:
            return self._send_apart(sent, known)
        return [one.with_those(there) for one in sent]

    def _send_apart(self, sent: Sequence[Sent], known: Known) -> list[Sent]:
        """Each by itself: one that is refused, by a full queue say, is tried again, and keeps up no other."""
        accepted = []
        for one in sent:
            row = one.attempt.row
            try:
                there = {*known, *(self._enqueue([one.missing]) if one.missing is not None else ())}
            except StorageUnavailableError:
                raise
            except DjqueueError as error:
                if row.pk not in self._refused:
                    self._refused.add(row.pk)
                    logger.error("The cron job %s is refused, and tried again: %s", row.name, error)
            else:
                self._refused.discard(row.pk)
                accepted.append(one.with_those(there))
        return accepted

    def _enqueue(self, batches: Sequence[Batch]) -> list[JobKey]:
        # Not to the table of the jobs on their way to Redis, where no id is known.
        enqueue = getattr(self._storage, "enqueue_directly", self._storage.enqueue)
        return [(answer.queue, answer.id) for answer in enqueue(batches)]

    def _sorted_out(self, attempt: Attempt, known: Known) -> Sent:
        """The slots that have a job or get one, and the jobs that are still to be enqueued."""
        overlap = attempt.schedule.overlap
        unfinished = [key for key in attempt.earlier if known.get(key) in LIVE]
        slots: list[int] = []
        ids: list[str] = []
        for slot in attempt.slots:
            key = attempt.key(slot)
            if key not in known:
                if self._is_in_doubt(attempt, slot) or _overlaps(overlap, unfinished, known):
                    continue
                ids.append(key[1])
                if overlap != "allow":
                    unfinished.append(key)
            slots.append(slot)
        batch = attempt.batch
        missing = batch._replace(payloads=batch.payloads[: len(ids)], ids=ids) if ids else None
        return Sent(attempt, slots, unfinished if overlap != "allow" else [], missing)

    def _is_in_doubt(self, attempt: Attempt, slot: int) -> bool:
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

    def _finish(self, sent: Sent) -> bool:
        """Count, unless that is done, and move the row on, unless it was changed meanwhile.

        Whether there was something to count.
        """
        row, slots = sent.attempt.row, sent.slots
        executions, counted = row.executions, 0
        if slots:
            is_counted = Q(last_run_at__isnull=False, last_run_at__gte=slots[-1])
            counted = (
                self._rows()
                .filter(~is_counted, pk=row.pk)
                .update(
                    executions=F("executions") + len(slots), last_run_at=slots[-1], unfinished=sent.unfinished
                )
            )
            executions += len(slots)
        limit = sent.attempt.schedule.max_executions
        is_over = limit is not None and executions >= limit
        self._move(row, None if is_over else sent.attempt.following)
        return bool(counted)

    def _move(self, row: CronJob, following: int | None) -> None:
        """Set the next slot, if the present one still is; a schedule without one is over."""
        over = {} if following is not None else {"enabled": False}
        self._rows().filter(pk=row.pk, next_run_at=row.next_run_at).update(
            next_run_at=following, firing_at=None, **over
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

    def _tell(self, row: CronJob, key: JobKey) -> None:
        queue, job = key
        logger.info("The cron job %s has enqueued %s in queue %s.", row.name, job, queue)
        self._storage.told([Incident(queue, job, row.job_name, "fired", row.name)])


def _overlaps(overlap: str, unfinished: list[JobKey], known: Known) -> bool:
    if overlap == "one_pending":
        # One that is not known is about to be enqueued.
        return any(known.get(key, State.WAITING) in PENDING for key in unfinished)
    return overlap == "skip" and bool(unfinished)


def _instant(value: datetime | None) -> int | None:
    return None if value is None else to_milliseconds(value)
