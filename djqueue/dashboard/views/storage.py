"""Diagnostics of the storage."""

from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.core.overview import DiagnosticLine
from djqueue.dashboard import diagnostics, outbox, rights
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import DashboardSite
from djqueue.dashboard.snapshot import snapshots

pages = Pages()


@pages.show("storage", "storage/", rights.STORAGE, gettext_lazy("Storage"))
def storage(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Show the storage's diagnostics."""
    cached = snapshots.read("diagnostics", lambda: get_storage().reads.diagnostics(), fresh=5_000)
    groups: dict[str, list[DiagnosticLine]] = {}
    for line in cached.value.lines:
        shown = diagnostics.translated(line)
        groups.setdefault(shown.group, []).append(shown)
    if get_storage().capabilities.has_outbox and (backlog := outbox.lines(cached.value.backend)):
        groups[_("Outbox")] = backlog
    context = {"groups": list(groups.items()), "about": get_storage().describe()}
    return site.render(request, "storage.html", _("Storage"), context, tab="storage", read=cached)
