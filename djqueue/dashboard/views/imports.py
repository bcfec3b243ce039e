"""Bulk imports: what became of each, cancelling the rest of its jobs, and replaying those that failed."""

from typing import Any, NamedTuple

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.core.states import State
from djqueue.dashboard import audit, imports, rights, verbs
from djqueue.dashboard.desk import Crumb, Desk
from djqueue.dashboard.imports import Shown
from djqueue.dashboard.inputs import check_hidden
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.tables import alias_of
from djqueue.models import BulkKind, BulkOperation
from djqueue.operations import bulk

from .bulkjobs import RateForm

pages = Pages()


class Kind(NamedTuple):
    """Something that can be done to the jobs of an import."""

    kind: BulkKind
    page: str
    route: str
    right: str
    title: Any
    button: Any
    nothing: Any


KINDS = (
    Kind(
        BulkKind.CANCEL,
        "import_cancel",
        "cancel",
        rights.CANCEL,
        gettext_lazy("Cancel the rest of an import"),
        gettext_lazy("Cancel them"),
        gettext_lazy("None of its jobs is pending."),
    ),
    Kind(
        BulkKind.RETRY,
        "import_replay",
        "replay",
        rights.LETTERS,
        gettext_lazy("Replay what failed of an import"),
        gettext_lazy("Retry them"),
        gettext_lazy("None of its jobs is a dead letter."),
    ),
)


@pages.show("imports", "imports/", rights.VIEW)
def listed(request: HttpRequest, desk: Desk) -> HttpResponse:
    """Those about queues that the user sees."""
    found = imports.listed(request, request.GET.get("after", ""))
    context = {"rows": found.shown, "older": found.older and desk.url("imports", after=found.older)}
    crumbs = [_operations(desk)]
    return desk.render(request, "imports.html", _("Bulk imports"), context, tab="operations", crumbs=crumbs)


@pages.show("import", "imports/<djq:write>/", rights.VIEW)
def one(request: HttpRequest, desk: Desk, write: str) -> HttpResponse:
    """One of them, and how its jobs stand."""
    shown = _found(request, write)
    if shown is None:
        return _none(request, desk)
    standing = imports.standing(request, shown.report)
    context = {
        "row": shown,
        "report": shown.report,
        "standing": standing,
        "states": _states(desk, shown, standing),
        "looked_at": imports.LOOKED_AT,
        "cancel_url": _url(request, desk, "import_cancel", write),
        "replay_url": _url(request, desk, "import_replay", write),
    }
    crumbs = [_operations(desk), _imports(desk)]
    return desk.render(request, "import.html", _("Bulk import"), context, tab="operations", crumbs=crumbs)


def _listed(kind: Kind) -> None:
    @pages.show(kind.page, f"imports/<djq:write>/{kind.route}/", kind.right)
    def preview(request: HttpRequest, desk: Desk, write: str) -> HttpResponse:
        """What would be done to how many, before it is done."""
        shown = _found(request, write)
        return _none(request, desk) if shown is None else _preview(request, desk, kind, shown, RateForm())

    @pages.act(f"{kind.page}_begin", f"imports/<djq:write>/{kind.route}/now/", kind.right)
    def begin(request: HttpRequest, desk: Desk, write: str) -> HttpResponse:
        """Have it done, part by part."""
        return _begin(request, desk, kind, write)


for _kind in KINDS:
    _listed(_kind)


def _preview(
    request: HttpRequest, desk: Desk, kind: Kind, shown: Shown, form: RateForm, status: int = 200
) -> HttpResponse:
    report = shown.report
    found = (
        bulk.preview(get_storage(), kind.kind, imports.selection(kind.kind, report))
        if report.shares
        else None
    )
    context = {
        "form": form,
        "kind": kind,
        "row": shown,
        "report": report,
        "found": found,
        "refused": [
            str(verbs.REFUSALS.get(word, f"%d {word}")) % count
            for word, count in (found.refused.items() if found else ())
        ],
        "looked_at": bulk.COUNTED,
        "begin_url": desk.url(f"{kind.page}_begin", report.write),
        "back_url": desk.url("import", report.write),
    }
    crumbs = [
        _operations(desk),
        _imports(desk),
        Crumb(str(_("Bulk import")), desk.url("import", report.write)),
    ]
    title = str(kind.title)
    return desk.render(
        request, "import_act.html", title, context, tab="operations", crumbs=crumbs, status=status
    )


def _begin(request: HttpRequest, desk: Desk, kind: Kind, write: str) -> HttpResponse:
    shown = imports.one(write)
    page = f"{kind.page}_begin"
    if shown is None:
        return _none(request, desk)
    if not imports.sees(request, shown.report):
        if shown.report.shares:  # without queues, the entry could not be hidden from this user
            hidden = {"write": write, "queues": sorted(shown.report.shares)}
            audit.note(request, page, refused=True, detail=hidden)
        return _none(request, desk)
    if not shown.report.shares:
        messages.warning(request, _("There is no such import."))
        return desk.back(request, "imports")
    form = RateForm(request.POST)
    if not form.is_valid():
        check_hidden(form)
        return _preview(request, desk, kind, shown, form, status=400)
    row = bulk.begin(
        alias_of(BulkOperation),
        kind.kind,
        imports.selection(kind.kind, shown.report),
        user=request.user.get_username(),
        rate=form.cleaned_data["rate"],
        expected=form.cleaned_data["expected"] or 0,
    )
    detail = {"operation": row.pk, "kind": kind.kind, "write": write, **row.filter}
    audit.note(request, page, count=row.expected, detail=detail)
    messages.success(request, _("It has begun, and is done by the workers."))
    return desk.back(request, "operation", row.pk)


def _found(request: HttpRequest, write: str) -> Shown | None:
    """A report that the user may see; of another one it is not said that it is there."""
    shown = imports.one(write)
    return shown if shown is not None and imports.sees(request, shown.report) else None


def _none(request: HttpRequest, desk: Desk) -> HttpResponse:
    crumbs = [_operations(desk), _imports(desk)]
    title = _("No such import")
    return desk.render(request, "no_import.html", title, {}, tab="operations", crumbs=crumbs, status=404)


def _states(desk: Desk, shown: Shown, standing: imports.Standing) -> list[tuple[str, int, str]]:
    """How many of its jobs are in each state, with the list of these where that can be asked for a tag."""
    return [
        (
            state.value,
            standing.counts.get(state, 0),
            desk.url("jobs", state=state.value, tag=shown.report.tag) if imports.has_rows(state) else "",
        )
        for state in State
    ]


def _url(request: HttpRequest, desk: Desk, page: str, write: str) -> str:
    return desk.url(page, write) if desk.may_open(request, page) else ""


def _operations(desk: Desk) -> Crumb:
    return Crumb(str(_("Bulk operations")), desk.url("operations"))


def _imports(desk: Desk) -> Crumb:
    return Crumb(str(_("Bulk imports")), desk.url("imports"))
