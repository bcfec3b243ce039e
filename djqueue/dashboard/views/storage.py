"""Where the jobs are, and how that does."""

from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.core.diagnostics import Line
from djqueue.dashboard import diagnoses, rights
from djqueue.dashboard.desk import Desk
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.snapshot import snapshots

pages = Pages()


@pages.show("storage", "storage/", rights.STORAGE, gettext_lazy("Storage"))
def storage(request: HttpRequest, desk: Desk) -> HttpResponse:
    """Its own numbers."""
    shot = snapshots.read("diagnostics", lambda: get_storage().diagnostics(), fresh=5_000)
    groups: dict[str, list[Line]] = {}
    for line in shot.value.lines:
        said = diagnoses.translated(line)
        groups.setdefault(said.group, []).append(said)
    context = {"groups": list(groups.items()), "about": get_storage().describe()}
    return desk.render(
        request, "storage.html", _("Storage"), context, tab="storage", as_of=shot.at, away=shot.away
    )
