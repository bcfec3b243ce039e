"""Status: whether anything is wrong, since when, and what to do."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.metrics import Bucket, Percentile
from djqueue.core.states import PENDING, State
from djqueue.core.units import to_datetime
from djqueue.dashboard import boards, charts, incidents, problemcards, problems, reading, rendering, rights
from djqueue.dashboard.problemcards import ProblemCard
from djqueue.dashboard.reading import CachedRead, read_cache
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.dashboard.tables import alias_of
from djqueue.dashboard.views import errors
from djqueue.dashboard.views.workers import worker_rows
from djqueue.models import Annotation, CronJob, ErrorGroup
from djqueue.operations import annotations, cronjobs, errorgroups
from djqueue.operations.problems import MAX_ERRORS, RECENT, failing

pages = Pages()

WORST = 5
"""Maximum queues charted, and maximum errors listed."""
AGES = 10_000
"""Milliseconds for which the chart may show the same ages of waiting jobs."""
SLOW_READ_TTL = 15_000
"""Milliseconds before the groups of errors and the last deploy are read again."""
OVERDUE_TTL = 5_000
"""Milliseconds before overdue schedules are read again."""


class Fact(NamedTuple):
    """A labeled number or word, with a link."""

    label: str
    value: int | str
    url: str = ""
    at: int | None = None
    """Time in UTC milliseconds, shown as an age that the browser updates."""

    @property
    def shown(self) -> str:
        value = self.value
        return value if isinstance(value, str) else rendering.number(value)


class StatusVerdict(NamedTuple):
    """The answer to the question of the page."""

    text: str
    level: str
    """ok | warn | bad"""
    since: int | None = None


class Minute(NamedTuple):
    """Wait times of the worst queues in a minute."""

    start: int
    waits: list[tuple[Percentile | None, str]]
    """Wait of each queue, and its seconds for the chart."""


class FailureShare(NamedTuple):
    """The attempts that failed in a minute."""

    start: int
    share: float
    """Percentage."""


def _parts(request: HttpRequest) -> Hashable:
    rows = ((row.pk, row.name, row.next_run_at, queue) for row, queue in _overdue())
    return (tuple(rows), charts.annotation_parts(request), incidents.parts(request))


@pages.show("status", "", rights.VIEW, gettext_lazy("Status"), _parts)
def status(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Show the problems, the last hour and the numbers of the storage."""
    checks = problems.start_checks()
    cached = boards.board(request)
    board = cached.value
    hour = board.series()
    worst = sorted((line for line in board.lines if line.age), key=lambda line: -line.age)[:WORST]
    if worst:
        # The last point of the chart is the current age of the oldest job, which grows.
        reading.expire_at(request, board.at + AGES)
    workers = worker_rows(request).value
    report, _found = problems.of_page(request, checks)
    deploy = read_cache.read(
        "deploy", lambda: annotations.last_deploy(alias_of(Annotation)), fresh=SLOW_READ_TTL
    ).value
    changes = incidents.changes(request)
    situation = problems.situation_of(
        boards.whole().value,
        overdue=_overdue(),
        errors=read_cache.read("errors", _read_errors, fresh=SLOW_READ_TTL).value,
        deploy=deploy,
    )
    cards = problemcards.cards(
        request, site, situation, report, [one.id for one in workers.rows], incidents.pauses(changes)
    )
    marks = charts.annotations_within(hour)
    pending = sum(board.total(state) for state in (*PENDING, State.ACTIVE))
    context: dict[str, Any] = {
        "verdict": _verdict(cards, cached, board, len(workers.rows)),
        "cards": cards,
        "board": board,
        "facts": _facts(site, board, hour, len(workers.rows)),
        "strip": incidents.strip(site, changes, incidents.operations(request), hour, marks, pending),
        "series": hour,
        "shares": [FailureShare(one.start, failing([one]) * 100) for one in hour],
        "annotations": marks,
        "worst": worst,
        "targets": [line for line in worst if line.objective is not None],
        "minutes": _minutes(worst),
        "groups": _top_errors(request),
        "deployed": None if deploy is None else to_datetime(deploy[0]),
        "is_new": not board.lines and not workers.rows,
    }
    return site.render(request, "status.html", _("Status"), context, tab="status", read=cached)


def _verdict(
    cards: Sequence[ProblemCard], cached: CachedRead[boards.Board], board: boards.Board, workers: int
) -> StatusVerdict:
    if cached.error:
        return StatusVerdict(_("Unknown: the storage is unreachable."), "bad", cached.at)
    bad = [card for card in cards if card.is_bad]
    if bad:
        text = ngettext("%(count)d problem", "%(count)d problems", len(bad)) % {"count": len(bad)}
        return StatusVerdict(text, "bad", min((one.since for one in bad if one.since), default=None))
    if cards:
        text = ngettext("Running, with %(count)d warning", "Running, with %(count)d warnings", len(cards))
        return StatusVerdict(text % {"count": len(cards)}, "warn")
    names = ngettext("%(count)d queue", "%(count)d queues", len(board.lines)) % {"count": len(board.lines)}
    ready = ngettext("%(count)d worker", "%(count)d workers", workers) % {"count": workers}
    return StatusVerdict(
        _("Nothing is wrong: %(queues)s, %(workers)s") % {"queues": names, "workers": ready}, "ok"
    )


def _facts(site: DashboardSite, board: boards.Board, hour: Sequence[Bucket], workers: int) -> list[Fact]:
    recent, before = failing(hour[-RECENT:]), failing(hour[:-RECENT])
    oldest = min(
        (line.row.oldest_at for line in board.lines if line.age and line.row.oldest_at), default=None
    )

    def of(state: State) -> str:
        return site.url("jobs", state=state.value)

    return [
        Fact(_("Waiting"), board.total(State.WAITING), of(State.WAITING)),
        Fact(_("Oldest waiting job"), _("none"), site.url("queues", sort="age"), oldest),
        Fact(_("Active"), board.total(State.ACTIVE), of(State.ACTIVE)),
        Fact(_("Delayed"), board.total(State.DELAYED), of(State.DELAYED)),
        Fact(_("Retried in the last hour"), sum(bucket.retried for bucket in hour), site.url("job_types")),
        Fact(_("Failed in the last hour"), sum(bucket.failed for bucket in hour), site.url("errors")),
        Fact(
            _("Failed, last 15 min (before: %(rate)s)") % {"rate": rendering.percent(before * 100)},
            rendering.percent(recent * 100),
            site.url("errors"),
        ),
        Fact(_("Dead letters"), board.total(State.FAILED), site.url("errors")),
        Fact(_("Workers"), workers, site.url("workers")),
    ]


def _overdue() -> list[tuple[CronJob, str]]:
    """Return the overdue schedules, each with its queue."""

    return read_cache.read(
        "overdue", lambda: cronjobs.overdue(alias_of(CronJob), SYSTEM_CLOCK.now()), fresh=OVERDUE_TTL
    ).value


def _read_errors() -> list[ErrorGroup]:
    return errorgroups.newest(alias_of(ErrorGroup), MAX_ERRORS)


def _top_errors(request: HttpRequest) -> list[errors.ErrorRow]:
    """Return the open errors with most failed attempts in a day."""
    rows = [row for row in errors.error_rows(request, fresh=SLOW_READ_TTL) if row.is_open and row.today]
    return sorted(rows, key=lambda row: -row.today)[:WORST]


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
