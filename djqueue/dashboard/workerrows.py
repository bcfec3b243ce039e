"""Workers as a user sees them: their heartbeats, versions and jobs."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from django.http import HttpRequest

from djqueue.conf import get_settings
from djqueue.core.workers import STOPPING, ProcessInfo, RunningJob, WorkerInfo

from . import queries, rights
from .snapshot import CachedRead

LATE = 1_000
"""Milliseconds by which a heartbeat may be late."""


class Version(NamedTuple):
    """The version that a worker runs."""

    project: str
    djqueue: str


class WorkerRow(NamedTuple):
    """A worker."""

    info: WorkerInfo
    level: str
    """Level of the last heartbeat: ok | warn (one interval overdue) | bad (three)."""
    queues: tuple[str, ...] | None
    """Queues that the user can see; None for all queues."""
    jobs: tuple[RunningJob, ...]
    """Active jobs of these queues."""
    processes: tuple[ProcessInfo, ...]
    """Processes of its jobs, without the ids of jobs that the user cannot see."""
    others: int
    """The number of other active jobs."""
    is_open: bool
    """Whether the user can see all of its queues, and so control the worker and read its dumps."""
    is_old: bool
    """Whether the most recently started worker has another version."""

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def version(self) -> Version:
        return Version(self.info.project, self.info.version)

    @property
    def is_stopping(self) -> bool:
        return self.info.state == STOPPING

    @property
    def is_quiet(self) -> bool:
        """Whether the worker claims no jobs for now."""
        return self.info.state == "quiet"


class WorkerRows(NamedTuple):
    """All workers that a user can see."""

    rows: tuple[WorkerRow, ...]

    @property
    def slots(self) -> int:
        return sum(one.info.concurrency for one in self.rows)

    @property
    def active(self) -> int:
        """The number of slots in use."""
        return sum(one.info.active for one in self.rows)

    @property
    def hosts(self) -> int:
        """The number of hosts that the workers run on."""
        return len({one.info.host for one in self.rows})

    @property
    def versions(self) -> list[tuple[Version, int]]:
        """Versions with their number of workers, most frequent first. Unknown versions are left out."""
        return Counter(one.version for one in self.rows if one.info.version).most_common()

    def find(self, worker_id: str) -> WorkerRow | None:
        return next((one for one in self.rows if one.id == worker_id), None)


def worker_rows(request: HttpRequest) -> CachedRead[WorkerRows]:
    """Return the workers that the user can see, by host and process."""
    cached = queries.board(request)
    sees_all = queries.sees_all(request)
    infos = sorted(cached.value.workers, key=lambda info: (info.host, info.pid, info.id))
    newest = max(infos, key=lambda info: info.started_at, default=None)
    found = [_seen(request, info, newest, cached.value.at, sees_all=sees_all) for info in infos]
    # A worker of hidden queues only is hidden, too.
    shown = tuple(one for one in found if one.queues != ())
    return CachedRead(WorkerRows(shown), cached.value.at, cached.error)


def _seen(
    request: HttpRequest, info: WorkerInfo, newest: WorkerInfo | None, now: int, *, sees_all: bool
) -> WorkerRow:
    queues = None if info.queues is None else _visible(request, info.queues)
    jobs = tuple(job for job in info.jobs if rights.sees(request, job.queue))
    return WorkerRow(
        info,
        _level(info, now),
        queues,
        jobs,
        tuple(_process(request, process) for process in info.processes),
        max(0, info.active - len(jobs)),
        sees_all if queues is None else queues == info.queues,
        bool(newest and info.version) and _version(info) != _version(newest),
    )


def _process(request: HttpRequest, process: ProcessInfo) -> ProcessInfo:
    return process if rights.sees(request, process.queue) else process._replace(queue="", job="")


def _version(info: WorkerInfo | None) -> tuple[str, str] | None:
    return None if info is None else (info.project, info.version)


def _visible(request: HttpRequest, queues: Sequence[str]) -> tuple[str, ...]:
    return tuple(queue for queue in queues if rights.sees(request, queue))


def _level(info: WorkerInfo, now: int) -> str:
    every = info.heartbeat or get_settings().heartbeat
    silent = now - info.seen_at
    if silent <= every + LATE:
        return "ok"
    return "warn" if silent <= 3 * every + LATE else "bad"
