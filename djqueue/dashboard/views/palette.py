"""The palette: finds pages, queues, job types, jobs, schedules, workers and actions by a part of their names.

Ctrl-K opens it on every page; without JavaScript, it is a page. It names only what the user may open and see.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from djqueue.client import get_storage, registry
from djqueue.core.states import State
from djqueue.dashboard import boards, rights
from djqueue.dashboard.boards import QueueRow
from djqueue.dashboard.site import PARTS, SECTIONS, DashboardSite, Pages
from djqueue.dashboard.views import jobtypes, savedviews, schedules
from djqueue.dashboard.views.job import OFFERS
from djqueue.dashboard.views.workers import worker_rows
from djqueue.models import JobState

pages = Pages()
LISTED = 6
"""Maximum entries of a group."""
SHORTEST_ID = 3
"""Minimum characters of the ID of a job that is looked for while a user types."""


class PaletteEntry(NamedTuple):
    """A link, or the button of an action."""

    label: str
    url: str
    note: str = ""
    is_post: bool = False


class PaletteGroup(NamedTuple):
    """The entries of one kind."""

    label: str
    entries: list[PaletteEntry]


@pages.show("palette", "palette/", rights.VIEW)
def palette(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List what has all words of a text in its name, of each kind the best."""
    term = request.GET.get("q", "").strip()
    context = {"term": term, "groups": [group for group in _groups(request, site, term) if group.entries]}
    return site.render(request, "palette.html", _("Search"), context)


def _groups(request: HttpRequest, site: DashboardSite, term: str) -> Iterator[PaletteGroup]:
    yield PaletteGroup(_("Pages"), _matching(term, _sections(request, site)))
    if not term:
        return
    lines = boards.board(request).value.lines
    jobs = _jobs(term, [line.name for line in lines])
    yield PaletteGroup(
        _("Jobs"),
        [
            PaletteEntry(term, site.url("job", queue, term), f"{queue}, {JobState(state.value).label}")
            for queue, state in jobs
        ],
    )
    yield PaletteGroup(
        _("Queues"),
        _matching(term, (PaletteEntry(line.name, site.url("queue", line.name)) for line in lines)),
    )
    names = {*jobtypes.visible_names(request), *(name for line in lines for name in line.row.names)}
    yield PaletteGroup(
        _("Job types"),
        _matching(term, (PaletteEntry(name, site.url("job_type", name)) for name in sorted(names))),
    )
    rows = schedules.visible(request)
    yield PaletteGroup(
        _("Schedules"),
        _matching(term, (PaletteEntry(row.name, site.url("schedule", row.pk), row.job_name) for row in rows)),
    )
    views = savedviews.links(request, site)
    yield PaletteGroup(
        _("Saved views"), _matching(term, (PaletteEntry(one.view.name, one.url) for one in views))
    )
    workers = worker_rows(request).value.rows
    yield PaletteGroup(
        _("Workers"),
        _matching(term, (PaletteEntry(one.id, site.url("worker", one.id), one.info.host) for one in workers)),
    )

    def act(page: str, label: str, name: str, *key: object, queue: str = "") -> Iterator[PaletteEntry]:
        if site.may_open(request, page):
            yield PaletteEntry(label % {"name": name, "queue": queue}, site.url(page, *key), is_post=True)

    def actions() -> Iterator[PaletteEntry]:
        for queue, state in jobs:
            for action, label, _kind in OFFERS:
                if state in action.states:
                    yield from act(action.name, f"{label} %(name)s", term, queue, term)
        for line in lines:
            if line.row.paused:
                yield from act("resume", _("Resume queue %(name)s"), line.name, line.name)
            else:
                yield from act("pause", _("Pause queue %(name)s"), line.name, line.name)
        for queue, name, is_held in _job_types(request, lines):
            page = "release" if is_held else "hold"
            label = _("Release %(name)s in %(queue)s") if is_held else _("Hold %(name)s in %(queue)s")
            yield from act(page, label, name, queue, name, queue=queue)
        for row in rows:
            yield from act("schedule_run", _("Run schedule %(name)s now"), row.name, row.pk)
        for one in workers:
            if one.is_open and not one.is_stopping:
                yield from act("worker_dump", _("Dump stacks of worker %(name)s"), one.id, one.id)
        if site.may_open(request, "schedule_new"):
            yield PaletteEntry(_("Add schedule"), site.url("schedule_new"))

    yield PaletteGroup(_("Actions"), _matching(term, actions()))


def _job_types(request: HttpRequest, lines: Sequence[QueueRow]) -> Iterator[tuple[str, str, bool]]:
    """Yield queue and name of the job types that are registered, wait or are held, and whether they are."""
    held = {(line.name, hold.name) for line in lines for hold in line.row.holds}
    registered = {(jobtypes.queue_of(registry.get(name)), name) for name in jobtypes.visible_names(request)}
    waiting = {(line.name, name) for line in lines for name in line.row.names}
    for queue, name in sorted(held | waiting | registered):
        if queue:
            yield queue, name, (queue, name) in held


def _sections(request: HttpRequest, site: DashboardSite) -> Iterator[PaletteEntry]:
    for name in dict.fromkeys((*SECTIONS, *(part for parts in PARTS.values() for part in parts))):
        if name in site.pages and site.may_open(request, name):
            yield PaletteEntry(str(site.pages[name].label), site.url(name))


def _jobs(term: str, queues: list[str]) -> list[tuple[str, State]]:
    """Return queue and state of the jobs with this ID, in queues that the user can see."""
    is_id = len(term) >= SHORTEST_ID and queues
    return get_storage().reads.find(term, queues)[:LISTED] if is_id else []


def _matching(term: str, entries: Iterable[PaletteEntry]) -> list[PaletteEntry]:
    """Return the entries with all words of a text in their label: those that begin with it first."""
    text = term.casefold()
    words = text.split()
    found = [one for one in entries if all(word in one.label.casefold() for word in words)]
    return found if not term else sorted(found, key=lambda one: _rank(one.label.casefold(), text))[:LISTED]


def _rank(label: str, text: str) -> tuple[bool, bool, int]:
    return not label.startswith(text), f".{text}" not in label and f" {text}" not in label, len(label)
