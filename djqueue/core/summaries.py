"""Jobs about a subject: what is told of them, and how they are found."""

from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import quote, unquote

from .enginejob import EngineJob
from .errors import OptionError
from .job import JobRecord
from .pages import FORWARD
from .states import State


class JobSummary(NamedTuple):
    """A job about a subject, in short: what a list of such jobs shows."""

    queue: str
    id: str
    name: str
    """The job's name."""
    state: State
    created_at: int
    """UTC milliseconds, as every `…_at`."""
    run_at: int
    started_at: int
    """0: it has not started."""
    finished_at: int
    """0: it has not ended."""
    reason: str = ""
    """Why it failed or was cancelled."""


class JobSummaryPage(NamedTuple):
    """Some jobs about a subject, newest first."""

    jobs: list[JobSummary]
    next: str | None
    """Where the next page begins, to be shown to the storage that said so; None: this is the last one."""


def mention(record: EngineJob | JobRecord) -> JobSummary:
    """Return a job in short."""
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
    """Return the mark of the job before a page. Raises OptionError for what is no cursor of `about`."""
    if cursor is None:
        return None
    if cursor[:1] != FORWARD:
        raise OptionError(f"cursor: {cursor!r} is invalid; pass the cursor of an earlier page")
    return cursor[1:]


def mark_at(created_at: int, queue: str, last: str) -> str:
    """Return a job's position in the order of all queues: by time, queue and position in the queue."""
    return f"{created_at}:{quote(queue, safe='')}:{last}"


def mark_before(mark: str) -> tuple[int, str, str]:
    """Return the three that a mark is made of. Raises OptionError."""
    created_at, queue, last = [*mark.split(":", 2), "", ""][:3]
    if not (created_at.isdecimal() and queue and last):
        raise OptionError(f"cursor: {mark!r} is invalid; pass the cursor of an earlier page")
    return int(created_at), unquote(queue), last


def first_of(found: list[tuple[str, JobSummary]], limit: int) -> JobSummaryPage:
    """Return a page of up to `limit` jobs; found: their marks and they, and one more if there are more."""
    some = found[:limit]
    following = FORWARD + some[-1][0] if some and len(found) > limit else None
    return JobSummaryPage([one for _, one in some], following)


class SubjectIndex:
    """The jobs of one queue by what they are about. Its shard's lock guards it."""

    __slots__ = ("_jobs",)

    def __init__(self) -> None:
        self._jobs: dict[str, dict[str, EngineJob]] = {}
        """By subject, then by id; none is empty."""

    def add(self, jobs: Iterable[EngineJob], subject: str) -> None:
        """Jobs about one subject have come."""
        self._jobs.setdefault(subject, {}).update((job.id, job) for job in jobs)

    def drop(self, job: EngineJob, subject: str) -> None:
        """The record of a job is forgotten."""
        jobs = self._jobs[subject]
        del jobs[job.id]
        if not jobs:
            del self._jobs[subject]

    def about(self, subject: str) -> list[EngineJob]:
        """Return the jobs about a subject, in no order."""
        return list(self._jobs.get(subject, {}).values())

    def __len__(self) -> int:
        """Return how many subjects there are."""
        return len(self._jobs)
