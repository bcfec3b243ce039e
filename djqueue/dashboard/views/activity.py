"""The activity log."""

from functools import partial

from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.dashboard import auditlog, keyset, queries, rights, workerrows
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import DashboardSite
from djqueue.dashboard.tables import rows_of
from djqueue.models import AuditEvent

pages = Pages()

FILTERS = ("user", "action", "queue", "job_id")


@pages.show("activity", "activity/", rights.VIEW, gettext_lazy("Activity"))
def activity(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List actions and refused attempts, newest first."""
    query = {name: request.GET[name] for name in FILTERS if request.GET.get(name)}
    rows = rows_of(AuditEvent).filter(**query)
    sees = None
    if rights.hides_queues():
        sees = partial(_sees, request)
        if query.get("queue") and not rights.sees(request, query["queue"]):
            rows = rows.none()
    found = keyset.page(rows, request.GET.get("at", ""), sees=sees)
    names = {action: str(name) for action, name in auditlog.NAMES.items()}
    if query.get("action"):
        names.setdefault(query["action"], query["action"])
    context = {
        "entries": [auditlog.entry(row) for row in found.rows],
        "names": sorted(names.items(), key=lambda item: item[1]),
        "query": query,
        **keyset.links(site, "activity", found, **query),
    }
    return site.render(request, "activity.html", _("Activity"), context, tab="activity")


def _sees(request: HttpRequest, row: AuditEvent) -> bool:
    """Return whether the user may know of every queue, and of the worker, that an event names."""
    worker = row.detail.get("worker")
    if (
        worker
        and workerrows.worker_rows(request).value.find(worker) is None
        and not queries.sees_all(request)
    ):
        return False
    return rights.sees_each(request, _queues(row))


def _queues(row: AuditEvent) -> set[str]:
    """Return the queues that an event names."""
    found = {row.queue, *row.detail.get("queues", ()), *(queue for queue, _id in row.detail.get("jobs", ()))}
    return found - {""}
