"""Pending changes of an operation, carried out after its locks are released."""

from collections import deque

from .enginejob import EngineJob
from .job import Event, Incident
from .options import JobKey
from .queue import JobQueue
from .sharing import SharedLimiter
from .states import State


class PendingChanges:
    """Pending changes of one operation: see `Settlement.settle`."""

    __slots__ = ("ended", "events", "freed", "incidents", "unbound", "woken")

    def __init__(self) -> None:
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

    def note(self, queue: JobQueue, job: EngineJob, event: str, at: int) -> None:
        """Add an event for the subscribers of a queue, if it has any."""
        if queue.observed:
            self.events.append(Event(queue.name, job.id, job.name, event, job.state, at))

    def note_incident(self, job: EngineJob, event: str) -> None:
        """Add what happened to a job beyond what its worker reported."""
        self.incidents.append(incident_of(job, event))

    def free_permits(self, queue: JobQueue, job: EngineJob) -> None:
        """Return the permits that a job took of its queue's shared limiter."""
        shared = queue.shared
        if shared is not None:
            if self.freed is None:
                self.freed = {}
            self.freed[shared] = self.freed.get(shared, 0) + job.options.weight


def incident_of(job: EngineJob, event: str) -> Incident:
    """Return what happened to a job as an incident."""
    reason = job.reason if event != "stalled" else ""
    error = job.error if event == "failed" else None
    return Incident(job.queue, job.id, job.name, event, reason, error)
