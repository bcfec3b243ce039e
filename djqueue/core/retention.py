"""Retention of a queue's ended jobs: records, results, attempts, log lines."""

from dataclasses import dataclass

from .states import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Limits for the records of jobs with one outcome, below the jobs' own times; None: no limit."""

    age: int | None = None
    """Milliseconds after a job's end."""
    count: int | None = None
    """Number of records; those that expire first are removed first."""
    bytes: int | None = None
    """Bytes of payloads, results and errors; records that expire first are removed first."""

    def shorten(self, kept: int | None) -> int | None:
        """Return the milliseconds for which a record is kept, given the job's own time; None: forever."""
        return _shorter(kept, self.age)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepResults:
    """Limits for results, which are removed before their jobs' records."""

    age: int | None = None
    """Milliseconds after a job's end."""
    bytes: int | None = None
    """Bytes of all results of the queue; those that expire first are removed first."""

    def shorten(self, readable: int | None) -> int | None:
        """Return the milliseconds for which a result is kept, given the job's own time; None: forever."""
        return _shorter(readable, self.age)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOfJob:
    """Limits for what one job may have many of."""

    age: int | None = None
    """Milliseconds after the job's end; None: as long as its record."""
    count: int = 1_000
    """Number per job; the oldest are removed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """All limits of a queue. Failed jobs are kept by their dead letters: see `DeadLetterPolicy`."""

    completed: Keep = Keep()
    cancelled: Keep = Keep()
    results: KeepResults = KeepResults()
    attempts: KeepOfJob = KeepOfJob()
    """Ended attempts that did not complete their job."""
    logs: KeepOfJob = KeepOfJob()

    def of(self, state: State) -> Keep:
        """Return the limits for jobs that ended in this state."""
        return self.completed if state is State.COMPLETED else self.cancelled

    @property
    def counts(self) -> bool:
        """True if the number or the bytes of records are limited."""
        return self.measures or self.completed.count is not None or self.cancelled.count is not None

    @property
    def measures(self) -> bool:
        """True if the bytes of records are limited."""
        bounds = (self.completed.bytes, self.cancelled.bytes, self.results.bytes)
        return any(bound is not None for bound in bounds)


def _shorter(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


NO_RETENTION = Retention()
"""Each job's own times alone."""
