"""Attempts to fire the slots of a schedule, and what came of them."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.options import JobKey, JobOptions
from djqueue.core.states import State
from djqueue.core.units import to_milliseconds
from djqueue.models import CronJob
from djqueue.schedules import Schedule

from .cron import job_id

NOTHING: tuple[Any, None] = (None, None)
NOT_PASSED = "not enqueued by the middleware"
IN_DOUBT = "may have been enqueued already"
UNFINISHED = "the previous job is unfinished"

Known = dict[JobKey, State]
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
        last = instant_of(self.row.last_run_at)
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
            batch, answer = by_id.get(job) or (
                answers[index] if len(answers) == len(self.wanted) else NOTHING
            )
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


def instant_of(value: datetime | None) -> int | None:
    """Return a time of a row in UTC milliseconds."""
    return None if value is None else to_milliseconds(value)
