"""Diagnostics of the storage and its outbox."""

from django.http import HttpRequest, HttpResponse
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.overview import OK, WARN, DiagnosticLine
from djqueue.core.units import to_milliseconds
from djqueue.dashboard import diagnostics, findings, rendering, rights
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.dashboard.tables import rows_of
from djqueue.models import OutboxJob
from djqueue.operations.doctor import configuration_problems

pages = Pages()
MAX_COUNTED = 10_000
"""Rows that are counted."""
CONFIGURATION_TTL = 60_000
"""Milliseconds before the system checks run again."""
OUTBOX_LATE = 60_000
"""Milliseconds after which a job should have left the outbox."""


@pages.show("storage", "storage/", rights.STORAGE, gettext_lazy("Storage"))
def storage(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Show problems, and the storage's diagnostics."""
    checks = findings.start_checks()
    cached = read_cache.read("diagnostics", lambda: get_storage().reads.diagnostics(), fresh=5_000)
    groups: dict[str, list[DiagnosticLine]] = {}
    for line in cached.value.lines:
        shown = diagnostics.translated(line)
        groups.setdefault(shown.group, []).append(shown)
    if get_storage().capabilities.has_outbox and (backlog := outbox_lines(cached.value.backend)):
        groups[_("Outbox")] = backlog
    found = findings.of_page(request, checks)[1]
    configured = read_cache.read("configuration", configuration_problems, fresh=CONFIGURATION_TTL)
    context = {
        "groups": list(groups.items()),
        "about": get_storage().describe(),
        "findings": [*found, *configured.value],
    }
    return site.render(request, "storage.html", _("Storage"), context, tab="storage", read=cached)


def outbox_lines(backend: str) -> list[DiagnosticLine]:
    """Return the number of jobs in the outbox and the age of the oldest."""
    rows = rows_of(OutboxJob).order_by("id")
    count = rows[: MAX_COUNTED + 1].count()
    value = number_format(min(count, MAX_COUNTED)) + ("+" if count > MAX_COUNTED else "")
    lines = [DiagnosticLine("outbox.jobs", _("Outbox"), _("Jobs"), value)]
    oldest = rows.values_list("created_at", flat=True).first()
    if oldest is not None:
        age = max(0, SYSTEM_CLOCK.now() - to_milliseconds(oldest))
        level, note = OK, ""
        if age > OUTBOX_LATE:
            level, note = WARN, _("Jobs are not reaching the scheduler: check that runworkers is running.")
            if backend == "redis":
                note = _(
                    "Jobs are not reaching Redis: check that Redis and a runworkers process are running."
                )
        lines.append(
            DiagnosticLine(
                "outbox.oldest", _("Outbox"), _("Oldest job"), rendering.duration(age), level, note
            )
        )
    return lines
