"""The overview: health, counts and problems."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from django.http import HttpRequest, HttpResponse
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.conf import get_settings
from djqueue.core.metrics import Bucket, Percentile
from djqueue.core.states import State
from djqueue.core.workers import RunningJob, WorkerInfo, unserved
from djqueue.dashboard import boards, charts, findings, reading, rendering, rights
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.dashboard.views import deadletters, schedules
from djqueue.dashboard.views.workers import worker_rows
from djqueue.operations.healthchecks import STORAGE, HealthReport

pages = Pages()

WORST = 5
"""Maximum queues charted, and maximum errors, schedules and workers listed."""
RECENT = 15
"""Minutes whose failure rate is compared with that of the rest of the hour."""
NOTABLE = 0.05
"""Smallest failure rate that counts as a problem."""
STUCK = 3_600_000
"""Shortest milliseconds after which a running job may count as stuck."""
AGES = 10_000
"""Milliseconds for which the chart may show the same ages of waiting jobs."""
SLOW_READ_TTL = 15_000
"""Milliseconds before the groups of errors are read again."""


class Fact(NamedTuple):
    """A labeled number or word, with a link."""

    label: str
    value: int | str
    url: str = ""
    level: str = "ok"
    """ok | warn | bad"""
    at: int | None = None
    """Time in UTC milliseconds, shown as an age that the browser updates."""

    @property
    def shown(self) -> str:
        value = self.value
        return value if isinstance(value, str) else str(number_format(value, force_grouping=True))


class StuckJob(NamedTuple):
    """A job that runs for much longer than others."""

    job: RunningJob
    worker: WorkerInfo
    length: int
    """Milliseconds."""


class Minute(NamedTuple):
    """Wait times of the worst queues in a minute."""

    start: int
    waits: list[tuple[Percentile | None, str]]
    """Wait of each queue, and its seconds for the chart."""


def _parts(request: HttpRequest) -> Hashable:
    return (schedules.overdue_parts(request), charts.annotation_parts(request))


@pages.show("changelist", "", rights.VIEW, gettext_lazy("Overview"), _parts)
def overview(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Show the overview."""
    checks = findings.start_checks()
    cached = boards.board(request)
    board = cached.value
    hour = board.series()
    worst = sorted((line for line in board.lines if line.age), key=lambda line: -line.age)[:WORST]
    if worst:
        # The last point of the chart is the current age of the oldest job, which grows.
        reading.expire_at(request, board.at + AGES)
    overdue = schedules.overdue(request)
    workers = [one.info for one in worker_rows(request).value.rows]
    silent = _silent(board, workers)
    annotations = charts.annotations_within(hour)
    unhandled = sorted((one for line in board.lines for one in line.unhandled), key=lambda one: -one.jobs)
    report, found = findings.of_page(request, checks)
    storage = _storage(request, site, cached, report)
    context: dict[str, Any] = {
        "findings": found,
        "board": board,
        "facts": _facts(site, board, hour),
        "health": _health(storage, site, board, workers, len(silent), len(overdue)),
        "series": hour,
        "annotations": annotations,
        "worst": worst,
        "minutes": _minutes(worst),
        "groups": _groups(request, board),
        "overdue": overdue[:WORST],
        "silent": silent[:WORST],
        "stuck": _stuck(board, workers)[:WORST],
        "deployed": max((one.at for one in annotations), default=None),
        "unhandled": unhandled[:WORST],
        "unhandled_names": len(unhandled),
        "is_new": not board.lines and not workers,
    }
    return site.render(request, "overview.html", _("Dashboard"), context, tab="changelist", read=cached)


def _facts(site: DashboardSite, board: boards.Board, hour: Sequence[Bucket]) -> list[Fact]:
    retried = sum(bucket.retried for bucket in hour)
    failed = sum(bucket.failed for bucket in hour)
    dead = board.total(State.FAILED)
    recent, before = _failing(hour[-RECENT:]), _failing(hour[:-RECENT])

    def of(state: State) -> str:
        return site.url("jobs", state=state.value)

    return [
        Fact(_("Waiting"), board.total(State.WAITING), of(State.WAITING)),
        Fact(_("Active"), board.total(State.ACTIVE), of(State.ACTIVE)),
        Fact(_("Delayed"), board.total(State.DELAYED), of(State.DELAYED)),
        Fact(_("Retried in the last hour"), retried, site.url("metrics"), "warn" if retried else "ok"),
        Fact(_("Failed in the last hour"), failed, site.url("metrics"), "bad" if failed else "ok"),
        Fact(
            _("Failed, last 15 min (before: %(rate)s)") % {"rate": rendering.percent(before * 100)},
            rendering.percent(recent * 100),
            site.url("metrics"),
            "bad" if recent >= max(NOTABLE, 2 * before) else "ok",
        ),
        Fact(_("Dead letters"), dead, site.url("dead_letters"), "warn" if dead else "ok"),
    ]


def _failing(buckets: Sequence[Bucket]) -> float:
    """Return the share of attempts that failed, with those that are retried."""
    failed = sum(bucket.failed + bucket.retried for bucket in buckets)
    ended = failed + sum(bucket.completed for bucket in buckets)
    return failed / ended if ended else 0.0


def _stuck(board: boards.Board, workers: Sequence[WorkerInfo]) -> list[StuckJob]:
    """Return the jobs that run for longest: over an hour, and over twice as long as others of their queue."""
    stuck = []
    for worker in workers:
        for job in worker.jobs:
            line = board.line(job.queue)
            usual = line and line.run_p99
            length = board.at - job.started_at
            if line and length > max(STUCK, 2 * usual.milliseconds if usual else 0):
                stuck.append(StuckJob(job, worker, length))
    return sorted(stuck, key=lambda one: -one.length)


def _health(
    storage: Fact,
    site: DashboardSite,
    board: boards.Board,
    seen: Sequence[WorkerInfo],
    silent: int,
    overdue: int,
) -> list[Fact]:
    alone = [row.name for row in unserved([line.row for line in board.lines], board.workers)]
    oldest = max((line.age for line in board.lines), default=0)
    waits = rendering.duration(oldest) if oldest else _("none")
    since = min((line.row.oldest_at for line in board.lines if line.age and line.row.oldest_at), default=None)
    workers = site.url("workers")
    live, paused = len(seen) - silent, [line.name for line in board.lines if line.row.paused]
    stuck = sum(one.jobs for line in board.lines for one in line.unhandled)
    late = [line.name for line in board.lines if line.is_late]
    lost = sum(bucket.stalled for bucket in board.series())
    slow = "bad" if late else "warn" if oldest >= get_settings().health.max_wait else "ok"
    facts = [
        storage,
        Fact(_("Oldest waiting job"), waits, site.url("queues", sort="age"), slow, at=since),
        Fact(_("Workers"), live, workers, "ok" if seen else "bad"),
        Fact(_("Silent workers"), silent, workers, "bad" if silent else "ok"),
        Fact(
            _("Attempts lost with their worker, last hour"),
            lost,
            site.url("workers"),
            "warn" if lost else "ok",
        ),
        Fact(
            _("Queues without workers"),
            len(alone),
            _queues(site, alone),
            "bad" if alone else "ok",
        ),
        Fact(_("Jobs without a handler"), stuck, "#djq-unhandled" if stuck else "", "bad" if stuck else "ok"),
        Fact(_("Paused queues"), len(paused), _queues(site, paused), "warn" if paused else "ok"),
        Fact(_("Overdue schedules"), overdue, site.url("cron"), "bad" if overdue else "ok"),
    ]
    if any(line.objective is not None for line in board.lines):
        url = _queues(site, late)
        facts.append(Fact(_("Queues over their objective"), len(late), url, "bad" if late else "ok"))
    return facts


def _queues(site: DashboardSite, names: Sequence[str]) -> str:
    """Return the URL of the queue, or of all queues if there are several."""
    return site.url("queue", names[0]) if len(names) == 1 else site.url("queues", sort="age")


def _storage(
    request: HttpRequest, site: DashboardSite, read: reading.CachedRead[boards.Board], report: HealthReport
) -> Fact:
    """Return whether the storage answers, and accepts jobs."""
    url = site.url("storage") if site.may_open(request, "storage") else ""
    if read.error:
        return Fact(_("Storage"), _("unreachable"), url, "bad")
    if report.status(STORAGE) != "ok":
        return Fact(_("Storage"), _("has problems"), url, "bad")
    return Fact(_("Storage"), _("reachable"), url, "ok")


def _silent(board: boards.Board, seen: Sequence[WorkerInfo]) -> list[WorkerInfo]:
    silent = [worker for worker in seen if board.is_silent(worker)]
    return sorted(silent, key=lambda worker: worker.seen_at)


def _groups(request: HttpRequest, board: boards.Board) -> list[deadletters.FailureGroup]:
    """Return the errors with most dead letters."""
    if not board.total(State.FAILED):
        return []
    sample = deadletters.read_dead_letters(request, fresh=SLOW_READ_TTL).value
    return deadletters.grouped(sample.dead_letters, sample.at)[:WORST]


def _minutes(worst: list[boards.QueueRow]) -> list[Minute]:
    """Return the 95th percentile of wait times per minute; the last point is the age of the oldest job."""
    if not worst:
        return []
    minutes = []
    for buckets in zip(*(line.buckets for line in worst), strict=True):
        waits = [bucket.wait.percentile(0.95) for bucket in buckets]
        minutes.append(Minute(buckets[0].start, [(wait, _seconds(wait)) for wait in waits]))
    ages = [Percentile(line.age, is_floor=False) for line in worst]
    return [*minutes[:-1], Minute(worst[0].at, [(age, _seconds(age)) for age in ages])]


def _seconds(wait: Percentile | None) -> str:
    return "" if wait is None else f"{max(1.0, wait.milliseconds) / 1_000:.3f}"
