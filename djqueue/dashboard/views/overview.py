"""Is it healthy, what is stuck, and where to look."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from django.http import HttpRequest, HttpResponse
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.core.diagnostics import DiagnosticLine
from djqueue.core.errors import StorageError
from djqueue.core.job import WorkerInfo
from djqueue.core.metrics import Bucket
from djqueue.core.states import State
from djqueue.dashboard import (
    diagnoses,
    failures,
    freshness,
    marks,
    planning,
    queries,
    rights,
    spans,
    workerrows,
)
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import DashboardSite
from djqueue.dashboard.snapshot import snapshots

pages = Pages()

WORST = 5
"""Queues whose age is charted; groups of errors, schedules and workers that are named."""
AGES = 10_000
"""Milliseconds for which a chart may show the same ages of waiting jobs."""
SELDOM = 15_000
"""Milliseconds for which what takes longer to read is shown again: the scheduler, the groups of errors."""


class Fact(NamedTuple):
    """A number, or a word, with where it leads."""

    label: str
    value: int | str
    url: str = ""
    level: str = "ok"
    """ok | warn | bad"""
    at: int | None = None
    """UTC milliseconds since when it is so: shown as an age that the browser keeps up to date."""

    @property
    def shown(self) -> str:
        """The value for people."""
        value = self.value
        return value if isinstance(value, str) else str(number_format(value, force_grouping=True))


class Minute(NamedTuple):
    """How long jobs waited in the worst queues."""

    start: int
    """UTC milliseconds."""
    waits: list[tuple[float | None, str]]
    """Of each queue: milliseconds, and for the chart seconds."""


def _parts(request: HttpRequest) -> Hashable:
    return (planning.overdue_parts(request), marks.parts(request))


@pages.show("changelist", "", rights.VIEW, gettext_lazy("Overview"), _parts)
def overview(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """The first page."""
    cached = queries.board(request)
    board = cached.value
    hour = board.series()
    worst = sorted((line for line in board.lines if line.age), key=lambda line: -line.age)[:WORST]
    if worst:
        # The last point of the chart is how long the oldest job has waited so far.
        freshness.limit(request, board.at + AGES)
    overdue = planning.overdue(request)
    workers = [one.info for one in workerrows.worker_rows(request).value.workers]
    silent = _silent(board, workers)
    unhandled = sorted((one for line in board.lines for one in line.unhandled), key=lambda one: -one.jobs)
    context: dict[str, Any] = {
        "board": board,
        "facts": _facts(site, board, hour),
        "health": _health(request, site, board, workers, len(silent), len(overdue)),
        "series": hour,
        "marks": marks.within(hour),
        "worst": worst,
        "minutes": _minutes(worst),
        "groups": _groups(request, board),
        "overdue": overdue[:WORST],
        "silent": silent[:WORST],
        "unhandled": unhandled[:WORST],
        "unhandled_names": len(unhandled),
        "is_new": not board.lines and not workers,
    }
    return site.render(
        request,
        "overview.html",
        _("Dashboard"),
        context,
        tab="changelist",
        as_of=board.at,
        away=cached.away,
    )


def _facts(site: DashboardSite, board: queries.Board, hour: Sequence[Bucket]) -> list[Fact]:
    retried = sum(bucket.retried for bucket in hour)
    failed = sum(bucket.failed for bucket in hour)
    dead = board.total(State.FAILED)

    def of(state: State) -> str:
        return site.url("jobs", state=state.value)

    return [
        Fact(_("Waiting"), board.total(State.WAITING), of(State.WAITING)),
        Fact(_("Active"), board.total(State.ACTIVE), of(State.ACTIVE)),
        Fact(_("Delayed"), board.total(State.DELAYED), of(State.DELAYED)),
        Fact(_("Retried in the last hour"), retried, site.url("metrics"), "warn" if retried else "ok"),
        Fact(_("Failed in the last hour"), failed, site.url("metrics"), "bad" if failed else "ok"),
        Fact(_("Dead letters"), dead, site.url("letters"), "warn" if dead else "ok"),
    ]


def _health(
    request: HttpRequest,
    site: DashboardSite,
    board: queries.Board,
    seen: Sequence[WorkerInfo],
    silent: int,
    overdue: int,
) -> list[Fact]:
    alone = [line for line in board.lines if line.backlog and not line.workers and not line.row.paused]
    oldest = max((line.age for line in board.lines), default=0)
    waits = spans.shown(oldest) if oldest else _("none")
    since = min((line.row.oldest_at for line in board.lines if line.age and line.row.oldest_at), default=None)
    workers = site.url("workers")
    live, paused = len(seen) - silent, sum(line.row.paused for line in board.lines)
    stuck = sum(one.jobs for line in board.lines for one in line.unhandled)
    facts = [
        *_scheduler(request, site),
        Fact(_("Oldest waiting job"), waits, site.url("queues", sort="age"), at=since),
        Fact(_("Workers"), live, workers, "ok" if seen else "bad"),
        Fact(_("Silent workers"), silent, workers, "bad" if silent else "ok"),
        Fact(_("Queues without workers"), len(alone), "", "bad" if alone else "ok"),
        Fact(_("Unhandled jobs"), stuck, "", "bad" if stuck else "ok"),
        Fact(_("Paused queues"), paused),
        Fact(_("Overdue schedules"), overdue, site.url("cron"), "bad" if overdue else "ok"),
    ]
    if any(line.objective is not None for line in board.lines):
        late = sum(line.is_late for line in board.lines)
        facts.append(Fact(_("Queues over their objective"), late, "", "bad" if late else "ok"))
    return facts


def _scheduler(request: HttpRequest, site: DashboardSite) -> list[Fact]:
    """Whether the storage answers, and who looks after it where one process does: never where that is."""
    url = site.url("storage") if site.may_open(request, "storage") else ""
    try:
        cached = snapshots.read("diagnostics", lambda: get_storage().reads.diagnostics(), fresh=SELDOM)
    except StorageError:
        return [Fact(_("Storage"), _("unreachable"), url, "bad")]
    lines = {line.key: line for line in cached.value.lines}
    found = [
        Fact(_("Storage"), _("unreachable") if cached.away else _("reachable"), url, _level(cached.away))
    ]
    holder, tick = lines.get("scheduler.holder"), lines.get("scheduler.tick")
    if holder is not None:
        hangs = get_storage().outage is not None
        there = _("running") if holder.level == "ok" else _("not running")
        level = "bad" if hangs else holder.level
        found.append(Fact(_("Scheduler"), _("unreachable") if hangs else there, url, level))
    if tick is not None:
        found.append(_tick(tick, url))
    return found


def _tick(tick: DiagnosticLine, url: str) -> Fact:
    return Fact(_("Last sweep"), diagnoses.translated(tick).value, url, tick.level)


def _level(away: str) -> str:
    return "bad" if away else "ok"


def _silent(board: queries.Board, seen: Sequence[WorkerInfo]) -> list[WorkerInfo]:
    found = [worker for worker in seen if board.at - worker.seen_at > queries.SILENT]
    return sorted(found, key=lambda worker: worker.seen_at)


def _groups(request: HttpRequest, board: queries.Board) -> list[failures.FailureGroup]:
    """The errors that most dead letters have."""
    if not board.total(State.FAILED):
        return []
    found = failures.failures(request, fresh=SELDOM).value
    return failures.grouped(found.letters, found.at)[:WORST]


def _minutes(worst: list[queries.QueueRow]) -> list[Minute]:
    """What 95 of 100 jobs waited no longer than in each minute; last of all, what the oldest waits now."""
    if not worst:
        return []
    found = []
    for buckets in zip(*(line.buckets for line in worst), strict=True):
        waits = [bucket.wait.percentile(0.95) for bucket in buckets]
        found.append(Minute(buckets[0].start, [(wait, _seconds(wait)) for wait in waits]))
    ages = [float(line.age) for line in worst]
    return [*found[:-1], Minute(worst[0].at, [(age, _seconds(age)) for age in ages])]


def _seconds(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{max(1.0, milliseconds) / 1_000:.3f}"
