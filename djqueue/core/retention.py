"""How long, how many and how much a queue keeps of what has ended: records, results, attempts, log lines."""

from dataclasses import dataclass

from .states import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Bounds for the records of jobs with one outcome; None is no bound but the job's own times."""

    age: int | None = None
    """Milliseconds from a job's end."""
    count: int | None = None
    """Records; those whose time would be over first go first."""
    bytes: int | None = None
    """Of payloads, results and errors together; those whose time would be over first go first."""

    def shorten(self, kept: int | None) -> int | None:
        """Milliseconds for which a record is kept whose job says `kept`; None is for ever."""
        return _shorter(kept, self.age)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepResults:
    """Bounds for results, which go before their jobs' records."""

    age: int | None = None
    """Milliseconds from a job's end."""
    bytes: int | None = None
    """Of all results of the queue; those whose time would be over first go first."""

    def shorten(self, readable: int | None) -> int | None:
        """Milliseconds for which a result can be read whose job says `readable`; None is for ever."""
        return _shorter(readable, self.age)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOfJob:
    """Bounds for what one job has many of."""

    age: int | None = None
    """Milliseconds from the job's end; None: as long as its record."""
    count: int = 1_000
    """Of one job; the oldest go first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """All of a queue's bounds. Failed jobs are kept by their dead letters: see `DeadLetterPolicy`."""

    completed: Keep = Keep()
    cancelled: Keep = Keep()
    results: KeepResults = KeepResults()
    attempts: KeepOfJob = KeepOfJob()
    """Ended runs that did not complete their job."""
    logs: KeepOfJob = KeepOfJob()

    def of(self, state: State) -> Keep:
        """Return the bounds for jobs that ended in this state."""
        return self.completed if state is State.COMPLETED else self.cancelled

    @property
    def counts(self) -> bool:
        """True if the number of records, or their bytes, is bounded."""
        return self.measures or self.completed.count is not None or self.cancelled.count is not None

    @property
    def measures(self) -> bool:
        """True if the bytes of records count."""
        bounds = (self.completed.bytes, self.cancelled.bytes, self.results.bytes)
        return any(bound is not None for bound in bounds)


def _shorter(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


NO_RETENTION = Retention()
"""As long as each job says."""
