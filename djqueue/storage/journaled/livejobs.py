"""Read the live jobs from the tables at the start of a scheduler."""

import logging
from collections.abc import Iterable, Sequence
from operator import attrgetter

from djqueue import models
from djqueue.core.enginejob import EngineJob, PayloadSource
from djqueue.core.states import LIVE, State
from djqueue.storage.tables import rows

logger = logging.getLogger("djqueue.scheduler")

PAGE = 5_000
"""Rows read at a time."""
TELL_EVERY = 100_000
"""Jobs between two log lines of a long recovery."""
NUMBERED = ("id", *rows.JOB_FIELDS)
FRESH = (
    "id",
    *("queue", "job_id", "name", "state", "options", "created_at", "run_at"),
    *("started_at", "error_type"),
)
"""Columns of a job that has never started; the last two show that it has not."""
STATES = {state.value: state for state in State}


class FreshJobs:
    """Makes jobs that have never started of a few columns.

    They share their names, options and times, and their payloads stay in the table, so that a million of
    them fit into memory.
    """

    def __init__(self, payloads: PayloadSource) -> None:
        self._payloads = payloads
        self._names: dict[str, str] = {}

    def job(self, row: rows.Row) -> EngineJob:
        """Return the job of a row that begins with the columns of `FRESH`."""
        _, queue, job_id, name, state, options, created_at, run_at, *_ = row
        shared = self._names.setdefault
        unpacked = rows.unpack_options(bytes(options))
        if run_at == created_at:
            run_at = created_at  # One object for both.
        queue, name = shared(queue, queue), shared(name, name)
        return EngineJob(job_id, queue, name, self._payloads, unpacked, STATES[state], created_at, run_at)


class LiveJobs:
    """The live jobs in the tables, except those in the inbox.

    Most jobs of a long queue have never started: see `FreshJobs`.
    """

    def __init__(self, alias: str, payloads: PayloadSource) -> None:
        self._alias = alias
        self._fresh = FreshJobs(payloads)
        states = [state.value for state in LIVE]
        self._rows = models.Job.objects.using(alias).filter(state__in=states, inbox=False)
        self.total = self._rows.count()

    def read(self) -> list[EngineJob]:
        """Return the jobs in the order of their turns, with their histories."""
        first: list[EngineJob] = []
        others: list[EngineJob] = []
        last = read = 0
        while page := list(rows.raw_values(self._rows.filter(id__gt=last).order_by("id")[:PAGE], FRESH)):
            last = page[-1][0]
            started = self._started([row for row in page if row[-2] is not None or row[-1]])
            for row in page:
                job = started.get(row[0]) or self._fresh.job(row)
                (first if job.started_at and _is_first(job) else others).append(job)
            before, read = read, read + len(page)
            if read // TELL_EVERY > before // TELL_EVERY:
                logger.info("Recovering jobs: %s of %s.", f"{read:,}", f"{max(read, self.total):,}")
        # Two lists and plain keys: a million tuples would take more memory than the jobs.
        first.sort(key=_turn)
        others.sort(key=attrgetter("run_at"))
        others[:0] = first
        return others

    def _started(self, found: Sequence[rows.Row]) -> dict[int, EngineJob]:
        """Return the jobs of rows that have started, or failed without a start, by number."""
        jobs: dict[int, EngineJob] = {}
        for chunk in rows.chunked([row[0] for row in found]):
            numbered = models.Job.objects.using(self._alias).filter(id__in=chunk)
            for row in rows.raw_values(numbered, NUMBERED):
                jobs[row[0]] = rows.job_from_row(row[1:])
        read_histories(self._alias, jobs.values())
        return jobs


def _is_first(job: EngineJob) -> bool:
    """Return whether a job comes before all that have not started or were retried."""
    last = job.history[-1].outcome if job.history else ""
    return job.state is State.ACTIVE or last in ("stalled", "released")


def _turn(job: EngineJob) -> int:
    """Return the position of a job that comes first: by its arrival or its return, not by its row."""
    last = job.history[-1].outcome if job.history else ""
    if job.state is State.ACTIVE or last == "stalled":
        return -job.started_at  # the last to be claimed is claimed first again
    return job.created_at


def read_histories(alias: str, jobs: Iterable[EngineJob]) -> None:
    """Read the ended attempts, log lines and results of the jobs that have started."""
    begun: dict[str, dict[str, EngineJob]] = {}
    for job in jobs:
        if job.started_at:
            begun.setdefault(job.queue, {})[job.id] = job
    for queue, mine in begun.items():
        rows.read_belongings(alias, queue, mine)
