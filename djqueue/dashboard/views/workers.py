"""Workers as a user sees them: their heartbeats, versions and jobs; and commands for them."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.core.metrics import MINUTE, NO_TIMES, Histogram, Percentile
from djqueue.core.workers import (
    ASKED,
    DUMP,
    NOT_FOUND,
    QUIET,
    RESUME,
    STOP,
    STOPPING,
    ProcessInfo,
    RunningJob,
    WorkerInfo,
)
from djqueue.dashboard import audit, boards, rights
from djqueue.dashboard.reading import CachedRead, read_cache
from djqueue.dashboard.site import Crumb, DashboardSite, Pages

pages = Pages()
DAY = 86_400_000
SHORT = 1_000
"""Milliseconds of a run that is never slow."""
RUNS_FRESH = 15_000
"""Milliseconds before the run times of job types are read again."""
LISTED = 3
"""Maximum jobs of a worker in the list, the slowest first."""
HEARTBEAT_SLACK = 1_000
"""Milliseconds by which a heartbeat may be late."""
MESSAGES = {
    QUIET: gettext_lazy("Asked worker %(worker)s to stop claiming jobs."),
    RESUME: gettext_lazy("Asked worker %(worker)s to resume claiming jobs."),
    STOP: gettext_lazy("Asked worker %(worker)s to stop."),
    DUMP: gettext_lazy("Requested a stack dump of worker %(worker)s. The dump appears on the worker's page."),
}
"""Messages after a command."""


class Version(NamedTuple):
    """The version that a worker runs."""

    project: str
    djqueue: str


class RunningRow(NamedTuple):
    """A job that a worker runs, beside the run times of its job type."""

    job: RunningJob
    length: int
    """Milliseconds since it started."""
    p95: Percentile | None
    """95th percentile of the run times of its job type in the last day; None if none ended."""

    @property
    def is_slow(self) -> bool:
        """Whether it runs for longer than nineteen of twenty others."""
        return (
            self.p95 is not None and not self.p95.is_floor and self.length > max(self.p95.milliseconds, SHORT)
        )


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
        return _version(self.info)

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
    cached = boards.board(request)
    sees_all = boards.sees_all(request)
    infos = sorted(cached.value.workers, key=lambda info: (info.host, info.pid, info.id))
    newest = max(infos, key=lambda info: info.started_at, default=None)
    workers = [_row_of(request, info, newest, cached.value.at, sees_all=sees_all) for info in infos]
    # A worker of hidden queues only is hidden, too.
    shown = tuple(one for one in workers if one.queues != ())
    return CachedRead(WorkerRows(shown), cached.value.at, cached.error)


def sees_worker(request: HttpRequest, worker: str) -> bool:
    """Return whether the user may know of a worker, which may have ended."""
    return worker_rows(request).value.find(worker) is not None or boards.sees_all(request)


def running(request: HttpRequest, worker: WorkerRow) -> list[RunningRow]:
    """Return the active jobs of a worker that the user can see, the longest running first."""
    if not worker.jobs:
        return []
    board = boards.board(request).value
    names = tuple(line.name for line in board.lines)
    times = read_cache.read(("run_times", names), lambda: _run_times(names, board.at), RUNS_FRESH).value
    rows = [RunningRow(job, max(0, board.at - job.started_at), times.get(job.name)) for job in worker.jobs]
    return sorted(rows, key=lambda row: row.job.started_at)


@pages.show("workers", "workers/", rights.VIEW, gettext_lazy("Workers"))
def workers(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List the workers with their latest heartbeats."""
    cached = worker_rows(request)
    rows = cached.value.rows
    context = {"workers": cached.value, "running": {row.id: running(request, row)[:LISTED] for row in rows}}
    return site.render(request, "workers.html", _("Workers"), context, tab="workers", read=cached)


@pages.show("worker", "workers/<djq:worker>/", rights.VIEW)
def worker(request: HttpRequest, site: DashboardSite, worker: str) -> HttpResponse:
    """Show a worker, its jobs, and its stack dump if one was requested."""
    cached = worker_rows(request)
    row = cached.value.find(worker)
    if row is None:
        text = _("Worker %(worker)s was not found. The worker stopped or sent no heartbeat for a minute.") % {
            "worker": worker
        }
        link, crumbs = (_("Back to workers"), site.url("workers")), [site.crumb("workers")]
        title = _("Worker not found")
        return site.not_found(request, title, text, tab="workers", crumbs=crumbs, link=link)
    may_read = row.is_open and rights.may(request, rights.WORKERS)
    context = {
        "worker": row,
        "running": running(request, row),
        "dump": get_storage().workers.dump(worker) if may_read else None,
    }
    crumbs = [site.crumb("workers")]
    return site.render(request, "worker.html", worker, context, tab="workers", crumbs=crumbs, read=cached)


@pages.act("worker_stop", "workers/<djq:worker>/stop/", rights.WORKERS)
def stop(request: HttpRequest, site: DashboardSite, worker: str) -> HttpResponse:
    """Stop the worker like a signal does, after a confirmation."""
    row = _found(request, worker, STOP)
    if row is None or request.POST.get("confirm") == "1":
        return _command(request, site, worker, STOP)
    context = {"worker": row, "back": request.POST.get("djq_back", "")}
    crumbs = [site.crumb("workers"), Crumb(worker, site.url("worker", worker))]
    title = _("Stop worker")
    return site.render(request, "worker_stop.html", title, context, tab="workers", crumbs=crumbs)


def _register(command: str) -> None:
    @pages.act(f"worker_{command}", f"workers/<djq:worker>/{command}/", rights.WORKERS)
    def act(request: HttpRequest, site: DashboardSite, worker: str) -> HttpResponse:
        return _command(request, site, worker, command)


for _name in (QUIET, RESUME, DUMP):
    _register(_name)


def _run_times(queues: Sequence[str], at: int) -> dict[str, Percentile]:
    """Return the 95th percentile of the run times of each job type in the last day."""
    end = at // MINUTE * MINUTE + MINUTE
    found: dict[str, Histogram] = {}
    for bucket in get_storage().reads.series(queues, end - DAY, end, DAY, by_name=True):
        found[bucket.name] = found.get(bucket.name, NO_TIMES).merge(bucket.run)
    return {name: p95 for name, times in found.items() if (p95 := times.percentile(0.95)) is not None}


def _row_of(
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
        newest is not None and bool(info.version) and _version(info) != _version(newest),
    )


def _process(request: HttpRequest, process: ProcessInfo) -> ProcessInfo:
    return process if rights.sees(request, process.queue) else process._replace(queue="", job="")


def _version(info: WorkerInfo) -> Version:
    return Version(info.project, info.version)


def _visible(request: HttpRequest, queues: Sequence[str]) -> tuple[str, ...]:
    return tuple(queue for queue in queues if rights.sees(request, queue))


def _level(info: WorkerInfo, now: int) -> str:
    every = info.heartbeat or get_settings().heartbeat
    silent = now - info.seen_at
    if silent <= every + HEARTBEAT_SLACK:
        return "ok"
    return "warn" if silent <= 3 * every + HEARTBEAT_SLACK else "bad"


def _command(request: HttpRequest, site: DashboardSite, worker: str, command: str) -> HttpResponse:
    if _found(request, worker, command) is None:
        answer = NOT_FOUND
    else:
        answer = get_storage().workers.control(worker, command)
    if answer == ASKED:
        audit.note(request, f"worker_{command}", detail={"worker": worker})
        messages.success(request, str(MESSAGES[command]) % {"worker": worker})
    elif answer == STOPPING:
        messages.warning(request, _("Worker %(worker)s is already stopping.") % {"worker": worker})
    else:
        messages.warning(request, _("Worker %(worker)s no longer exists.") % {"worker": worker})
        return site.back(request, "workers")
    return site.back(request, "worker", worker)


def _found(request: HttpRequest, worker: str, command: str) -> WorkerRow | None:
    """Raises PermissionDenied if it also serves queues that the user is not to know of."""
    row = worker_rows(request).value.find(worker)
    if row is not None and not row.is_open:
        audit.note(request, f"worker_{command}", refused=True, detail={"worker": worker})
        raise PermissionDenied
    return row
