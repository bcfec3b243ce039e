"""Changes of the engine: as its journal records them, what follows them, and their number."""

from collections import deque
from collections.abc import Callable
from functools import wraps
from itertools import count
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ..enginejob import EngineJob, incident_of
from ..job import Claims, DeadLetterRecord, Event, Incident
from ..options import JobKey
from ..states import State
from .limiters import SharedLimiter


class Journal(Protocol):
    """Receives every change, in order, while the lock of the job is held: it must return quickly, and copy
    what it keeps.
    """

    def added(self, jobs: list[EngineJob]) -> None:
        """Record new jobs."""
        ...

    def changed(self, job: EngineJob) -> None:
        """Record a changed state, counter, time or option of a job."""
        ...

    def updated(self, job: EngineJob) -> None:
        """Record a new payload or priority of a pending job, which may just have been revived."""
        ...

    def completed(self, job: EngineJob) -> None:
        """Record a completed job with its result."""
        ...

    def died(self, job: EngineJob, letter: DeadLetterRecord) -> None:
        """Record a failed job with its dead letter."""
        ...

    def revived(self, job: EngineJob) -> None:
        """Record the retry of a dead letter."""
        ...

    def removed(self, jobs: list[EngineJob]) -> None:
        """Record the removal of jobs with their results and dead letters."""
        ...

    def trimmed(self, jobs: list[EngineJob]) -> None:
        """Record that results, items, attempts or log lines of ended jobs may be gone."""
        ...

    def let_go(self, key: JobKey) -> None:
        """Record that no other job holds the record of an ended one any more; it may be gone."""
        ...

    def reported(self, job: EngineJob, lines: tuple[tuple[int, str], ...]) -> None:
        """Record the progress of a job and its new log lines."""
        ...

    def emitted(self, job: EngineJob, items: tuple[bytes, ...]) -> None:
        """Record streamed items, the last ones of a job's stream."""
        ...

    def restarted(self, job: EngineJob) -> None:
        """Record that a job starts over, without the streamed items of its last attempt."""
        ...


class PendingChanges:
    """Consequences of an operation, collected while it holds locks: see `Settlement.settle`."""

    __slots__ = ("ended", "events", "freed", "incidents", "now", "unbound", "woken")

    def __init__(self, now: int) -> None:
        self.now = now
        """Time of the operation, in UTC milliseconds."""
        self.events: list[Event] = []
        self.incidents: list[Incident] = []
        self.ended: deque[tuple[JobKey, State, list[EngineJob]]] = deque()
        """(job, its last state, the jobs that wait for it)."""
        self.unbound: list[tuple[EngineJob, tuple[JobKey, ...]]] = []
        """(job that has ended, its dependencies)."""
        self.woken: set[str] = set()
        """Queues in which jobs may have become claimable."""
        self.freed: dict[SharedLimiter, int] | None = None
        """Permits of jobs that are no longer active."""

    def note_incident(self, job: EngineJob, event: str) -> None:
        """Add what happened to a job beyond what its worker reported."""
        self.incidents.append(incident_of(job, event))


S = TypeVar("S", bound="HasChanges")
P = ParamSpec("P")
T = TypeVar("T")


class ChangeCounter:
    """Counts changes. Any thread may bump it, after the change.

    A reader that reads the number before the state, and finds the same number later, has missed nothing.
    """

    __slots__ = ("_numbers", "value")

    def __init__(self) -> None:
        self._numbers = count(1)
        self.value = 0

    def bump(self) -> None:
        """Record a change."""
        self.value = next(self._numbers)


class HasChanges(Protocol):
    """A part of the engine whose operations change the answers of reads."""

    @property
    def changes(self) -> ChangeCounter:
        """The engine's counter of changes."""


def counted(operation: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Count every call of an operation as a change.

    Claims also promote and expire jobs, which shows in the sizes of queues.
    """
    return _counting(operation, lambda _args, _answer: True)


def counted_if_answered(operation: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Count a call of an operation as a change unless its answer is empty."""
    return _counting(
        operation, lambda _args, answer: bool(answer.jobs if isinstance(answer, Claims) else answer)
    )


def counted_unless_empty(
    position: int,
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Count a call of an operation as a change unless its argument at this position is empty."""

    def decorate(operation: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        return _counting(operation, lambda args, _answer: len(args) <= position or bool(args[position]))

    return decorate


def _counting(
    operation: Callable[Concatenate[S, P], T], has_changed: Callable[[tuple[Any, ...], T], bool]
) -> Callable[Concatenate[S, P], T]:
    @wraps(operation)
    def counting(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            answer = operation(self, *args, **kwargs)
        except BaseException:
            self.changes.bump()  # A part of it may have been done.
            raise
        if has_changed(args, answer):
            self.changes.bump()
        return answer

    return counting
