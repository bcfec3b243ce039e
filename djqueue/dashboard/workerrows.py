"""The workers as a viewer may see them: how long silent, of which version, with which jobs."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from django.http import HttpRequest

from djqueue.conf import get_settings
from djqueue.core.job import RunningJob, WorkerDump, WorkerInfo
from djqueue.core.workercontrol import STOPPING

from . import queries, rights
from .snapshot import CachedRead

LATE = 1_000
"""Milliseconds that a sign of life may take beyond its interval."""


class Version(NamedTuple):
    """What runs on a worker."""

    project: str
    djqueue: str


class WorkerRow(NamedTuple):
    """A worker."""

    info: WorkerInfo
    level: str
    """Of its silence: ok | warn (more than one interval) | bad (more than three)."""
    queues: tuple[str, ...] | None
    """Those that the viewer may see; None: all."""
    jobs: tuple[RunningJob, ...]
    """Of these queues."""
    others: int
    """Jobs that it runs beside them."""
    is_open: bool
    """Whether the viewer sees all that it serves, and so may steer it and read its dump."""
    is_old: bool
    """Whether the worker that started last has another version."""

    @property
    def id(self) -> str:
        """The worker's."""
        return self.info.id

    @property
    def version(self) -> Version:
        """What runs there."""
        return Version(self.info.project, self.info.version)

    @property
    def is_stopping(self) -> bool:
        """Whether it ends already."""
        return self.info.state == STOPPING

    @property
    def is_quiet(self) -> bool:
        """Whether it claims no more for now."""
        return self.info.state == "quiet"


class WorkerRows(NamedTuple):
    """All workers that a viewer may see."""

    rows: tuple[WorkerRow, ...]

    @property
    def slots(self) -> int:
        """Of all together."""
        return sum(one.info.concurrency for one in self.rows)

    @property
    def active(self) -> int:
        """Slots that are taken."""
        return sum(one.info.active for one in self.rows)

    @property
    def versions(self) -> list[tuple[Version, int]]:
        """What runs, on how many workers, the most frequent first; those that do not say are left out."""
        return Counter(one.version for one in self.rows if one.info.version).most_common()

    def find(self, worker_id: str) -> WorkerRow | None:
        """One of them."""
        return next((one for one in self.rows if one.id == worker_id), None)


def worker_rows(request: HttpRequest) -> CachedRead[WorkerRows]:
    """By host and process."""
    cached = queries.board(request)
    sees_all = queries.sees_all(request)
    infos = sorted(cached.value.workers, key=lambda info: (info.host, info.pid, info.id))
    newest = max(infos, key=lambda info: info.started_at, default=None)
    found = [_seen(request, info, newest, cached.value.at, sees_all=sees_all) for info in infos]
    # One whose queues are all somebody else's is not there.
    shown = tuple(one for one in found if one.queues != ())
    return CachedRead(WorkerRows(shown), cached.value.at, cached.error)


def dump_of(seen: WorkerRow) -> WorkerDump | None:
    """What a worker told when it was asked where it is, if that is still kept."""
    return queries.worker_dump(seen.id)


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
        max(0, info.active - len(jobs)),
        sees_all if queues is None else queues == info.queues,
        bool(newest and info.version) and _version(info) != _version(newest),
    )


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
