"""Jobs about a subject: their summaries, and the index by subject."""

from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import quote, unquote

from .enginejob import EngineJob
from .errors import OptionError
from .job import JobRecord
from .pages import FORWARD
from .states import State


class JobSummary(NamedTuple):
    """A summary of a job about a subject."""

    queue: str
    id: str
    name: str
    """The job's name."""
    state: State
    created_at: int
    """UTC milliseconds, like every `…_at`."""
    run_at: int
    started_at: int
    """0 if it has not started."""
    finished_at: int
    """0 if it has not ended."""
    reason: str = ""
    """Reason of the failure or cancellation."""


class JobSummaryPage(NamedTuple):
    """Some jobs about a subject, newest first."""

    jobs: list[JobSummary]
    next: str | None
    """Cursor of the next page; None on the last page."""


def mention(record: EngineJob | JobRecord) -> JobSummary:
    """Return the summary of a job."""
    return JobSummary(
        record.queue,
        record.id,
        record.name,
        record.state,
        record.created_at,
        record.run_at,
        record.started_at,
        record.finished_at,
        record.reason,
    )


def mark_in(cursor: str | None) -> str | None:
    """Return the mark of the job before a page. Raises OptionError for an invalid cursor."""
    if cursor is None:
        return None
    if cursor[:1] != FORWARD:
        raise OptionError(f"cursor: {cursor!r} is invalid; pass the cursor of an earlier page")
    return cursor[1:]


def mark_at(created_at: int, queue: str, last: str) -> str:
    """Return the mark of a job in the order of all queues: by time, queue and position in the queue."""
    return f"{created_at}:{quote(queue, safe='')}:{last}"


def mark_before(mark: str) -> tuple[int, str, str]:
    """Return the time, queue and position that a mark consists of. Raises OptionError."""
    created_at, queue, last = [*mark.split(":", 2), "", ""][:3]
    if not (created_at.isdecimal() and queue and last):
        raise OptionError(f"cursor: {mark!r} is invalid; pass the cursor of an earlier page")
    return int(created_at), unquote(queue), last


def first_of(found: list[tuple[str, JobSummary]], limit: int) -> JobSummaryPage:
    """Return a page of up to `limit` jobs of those found, which include one more if there are more."""
    some = found[:limit]
    following = FORWARD + some[-1][0] if some and len(found) > limit else None
    return JobSummaryPage([one for _, one in some], following)


class SubjectIndex:
    """Jobs of one queue by subject, guarded by the lock of its shard."""

    __slots__ = ("_jobs",)

    def __init__(self) -> None:
        self._jobs: dict[str, dict[str, EngineJob]] = {}
        """Jobs by subject, then by id; no subject is empty."""

    def add(self, jobs: Iterable[EngineJob], subject: str) -> None:
        """Add jobs about one subject."""
        self._jobs.setdefault(subject, {}).update((job.id, job) for job in jobs)

    def drop(self, job: EngineJob, subject: str) -> None:
        """Remove a job."""
        jobs = self._jobs[subject]
        del jobs[job.id]
        if not jobs:
            del self._jobs[subject]

    def about(self, subject: str) -> list[EngineJob]:
        """Return the jobs about a subject, in no order."""
        return list(self._jobs.get(subject, {}).values())

    def __len__(self) -> int:
        """Return the number of subjects."""
        return len(self._jobs)
