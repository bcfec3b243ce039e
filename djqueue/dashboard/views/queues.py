"""The list of queues, and pausing them."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.core.states import State
from djqueue.dashboard import audit, freshness, queries, rights
from djqueue.dashboard.forecast import ESTIMATING, NEVER, STEADY
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.queries import QueueRow
from djqueue.dashboard.site import DashboardSite

pages = Pages()

ORDERS = {
    "name": lambda line: (line.name,),
    "waiting": lambda line: (-line.waiting, line.name),
    "active": lambda line: (-line.count(State.ACTIVE), line.name),
    "age": lambda line: (-line.age, line.name),
    "dead": lambda line: (-line.count(State.FAILED), line.name),
    "in": lambda line: (-line.arriving, line.name),
    "out": lambda line: (-line.leaving, line.name),
    "wait": lambda line: (-(line.wait_p95 or 0), line.name),
    "workers": lambda line: (line.workers, line.name),
    "drain": lambda line: (-_drain(line), line.name),
}
"""Sort keys of the list; most orders put the worst queues first."""
LONG = 1e15
"""Milliseconds longer than any estimate."""
TWIN = 5
"""Minutes per column of the table that accompanies the small charts."""


UNUSED = 50
"""Maximum configured queues without jobs that are named."""


class ChartNumbers(NamedTuple):
    """The small charts as a table."""

    starts: list[int]
    """Start of each column, in UTC milliseconds."""
    rows: list[tuple[str, list[int]]]


@pages.show("queues", "queues/", rights.VIEW, gettext_lazy("Queues"), freshness.no_parts)
def queues(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List all queues."""
    cached = queries.board(request)
    term = request.GET.get("q", "").strip().lower()
    chosen = request.GET.get("sort", "name")
    order = chosen if chosen in ORDERS else "name"
    lines = sorted((line for line in cached.value.lines if term in line.name.lower()), key=ORDERS[order])
    context = {
        "lines": lines,
        "term": term,
        "order": order,
        "all": len(cached.value.lines),
        "unused": _unused(request, cached.value.lines, term),
        "twin": _twin(lines),
    }
    return site.render(request, "queues.html", _("Queues"), context, tab="queues", read=cached)


def _unused(request: HttpRequest, lines: Sequence[QueueRow], term: str) -> list[str]:
    """Return the queues of the settings that have had no job: they, too, can be paused on their pages."""
    used = {line.name for line in lines}
    names = (name for name in sorted(get_settings().queues) if name not in used and term in name.lower())
    return [name for name in names if rights.sees(request, name)][:UNUSED]


def _drain(line: QueueRow) -> float:
    """Return the milliseconds until the queue drains; without an estimate, more than any estimate."""
    left = line.forecast.left
    if left is not None:
        return left
    return {NEVER: inf, STEADY: LONG, ESTIMATING: LONG / 2}.get(line.forecast.kind, 0.0)


def _twin(lines: Sequence[QueueRow]) -> ChartNumbers:
    if not lines:
        return ChartNumbers([], [])
    starts = [bucket.start for bucket in lines[0].buckets[::TWIN]]
    rows = [
        (line.name, [sum(line.history[at : at + TWIN]) for at in range(0, len(line.history), TWIN)])
        for line in lines
    ]
    return ChartNumbers(starts, rows)


@pages.act("pause", "queues/<djq:queue>/pause/", rights.PAUSE)
def pause(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Pause the queue. Active jobs go on."""
    return _set_paused(request, site, queue, paused=True)


@pages.act("resume", "queues/<djq:queue>/resume/", rights.PAUSE)
def resume(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Resume the queue."""
    return _set_paused(request, site, queue, paused=False)


def _set_paused(request: HttpRequest, site: DashboardSite, queue: str, *, paused: bool) -> HttpResponse:
    storage = get_storage()
    detail = {"old": {"paused": storage.queues.is_paused(queue)}, "new": {"paused": paused}}
    (storage.queues.pause if paused else storage.queues.resume)(queue)
    audit.note(request, "pause" if paused else "resume", queue=queue, detail=detail)
    message = _("Paused queue %(queue)s.") if paused else _("Resumed queue %(queue)s.")
    messages.success(request, message % {"queue": queue})
    return site.back(request, "queues")
