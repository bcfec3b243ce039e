"""The activity log: actions and refused attempts."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from django.http import HttpRequest, HttpResponse
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.dashboard import boards, rights, tables
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.dashboard.tables import rows_of
from djqueue.dashboard.views.workers import worker_rows
from djqueue.models import AuditEvent
from djqueue.operations.alerts import BEGAN, OVER

pages = Pages()
MAX_DETAIL = 200
"""Maximum characters shown of one detail."""
ACTION_LABELS = {
    "pause": gettext_lazy("Pause queue"),
    "resume": gettext_lazy("Resume queue"),
    "hold": gettext_lazy("Hold job type"),
    "release": gettext_lazy("Release job type"),
    "limits": gettext_lazy("Change queue limits"),
    "clean": gettext_lazy("Delete jobs of queue"),
    "pause_key": gettext_lazy("Pause concurrency key"),
    "resume_key": gettext_lazy("Resume concurrency key"),
    "key_limits": gettext_lazy("Change concurrency key limits"),
    "limiter": gettext_lazy("Change limiter limits"),
    "selected_retry": gettext_lazy("Retry selected jobs"),
    "selected_promote": gettext_lazy("Run selected jobs now"),
    "selected_cancel": gettext_lazy("Cancel selected jobs"),
    "selected_remove": gettext_lazy("Delete selected jobs"),
    "all_promote_begin": gettext_lazy("Run all matching jobs now"),
    "all_cancel_begin": gettext_lazy("Cancel all matching jobs"),
    "all_delete_begin": gettext_lazy("Delete all matching jobs"),
    "reveal": gettext_lazy("Reveal hidden values"),
    "retry": gettext_lazy("Retry job"),
    "promote": gettext_lazy("Run job now"),
    "cancel": gettext_lazy("Cancel job"),
    "remove": gettext_lazy("Delete job"),
    "edit_now": gettext_lazy("Edit job arguments"),
    "reschedule": gettext_lazy("Reschedule job"),
    "reprioritise": gettext_lazy("Change job priority"),
    "errors_begin": gettext_lazy("Retry or delete matching dead letters"),
    "errors_retry": gettext_lazy("Retry selected dead letters"),
    "errors_delete": gettext_lazy("Delete selected dead letters"),
    BEGAN: gettext_lazy("Problem began"),
    OVER: gettext_lazy("Problem over"),
    "error_resolve": gettext_lazy("Resolve error"),
    "error_ignore": gettext_lazy("Ignore error"),
    "error_reopen": gettext_lazy("Reopen error"),
    "schedule_create": gettext_lazy("Add schedule"),
    "schedule_save": gettext_lazy("Edit schedule"),
    "schedule_run": gettext_lazy("Run schedule now"),
    "schedule_switch": gettext_lazy("Enable or disable schedule"),
    "schedule_delete": gettext_lazy("Delete schedule"),
    "workflow_retry": gettext_lazy("Retry workflow"),
    "worker_quiet": gettext_lazy("Quiet worker"),
    "worker_resume": gettext_lazy("Resume worker"),
    "worker_stop": gettext_lazy("Stop worker"),
    "worker_dump": gettext_lazy("Dump worker stacks"),
    "abort": gettext_lazy("Abort retry or deletion of dead letters"),
    "abort_cancel": gettext_lazy("Abort bulk cancellation"),
    "abort_delete": gettext_lazy("Abort bulk deletion"),
    "abort_promote": gettext_lazy("Abort bulk run of delayed jobs"),
    "abort_clean": gettext_lazy("Abort deleting jobs of a queue"),
    "bulk_write_cancel_begin": gettext_lazy("Cancel remaining jobs of a bulk write"),
    "bulk_write_retry_begin": gettext_lazy("Retry failed jobs of a bulk write"),
    "undo": gettext_lazy("Undo deletion"),
    "undo_clean": gettext_lazy("Undo deleting jobs of a queue"),
    "enqueue_now": gettext_lazy("Enqueue job"),
}
"""Labels of actions, by the name of the page that performs them."""
FILTERS = ("user", "action", "queue", "job_id")


class AuditEntry(NamedTuple):
    """A row of the audit log."""

    row: AuditEvent
    name: str
    operation: int | None
    """Key of the bulk operation that the action started, aborted or undid."""
    detail: list[tuple[str, str]]
    """Names and values of the other details."""


def entry(row: AuditEvent) -> AuditEntry:
    """Return a row as a page shows it. An unknown action keeps its name."""
    detail: dict[str, Any] = dict(row.detail)
    operation = detail.pop("operation", None)
    return AuditEntry(row, str(ACTION_LABELS.get(row.action, row.action)), operation, _details(detail))


@pages.show("history", "history/", rights.VIEW, gettext_lazy("History"))
def activity(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List actions and refused attempts, newest first."""
    query = {name: request.GET[name] for name in FILTERS if request.GET.get(name)}
    rows = rows_of(AuditEvent).filter(**query)
    sees = None
    if rights.hides_queues():
        sees = partial(_sees, request)
        if query.get("queue") and not rights.sees(request, query["queue"]):
            rows = rows.none()
    page = tables.page(rows, request.GET.get("at", ""), sees=sees)
    names = {action: str(name) for action, name in ACTION_LABELS.items()}
    if query.get("action"):
        names.setdefault(query["action"], query["action"])
    context = {
        "entries": [entry(row) for row in page.rows],
        "names": sorted(names.items(), key=lambda item: item[1]),
        "query": query,
        **site.page_links("history", page, **query),
    }
    return site.render(request, "history.html", _("History"), context, tab="history")


def _details(detail: Mapping[str, Any]) -> list[tuple[str, str]]:
    labels = {
        "old": _("old"),
        "new": _("new"),
        "kind": _("kind"),
        "name": _("name"),
        "jobs": _("jobs"),
        "queues": _("queues"),
        "error": _("error"),
        "version": _("version"),
        "hours": _("hours"),
        "worker": _("worker"),
        "tag": _("tag"),
        "write": _("bulk write"),
        "states": _("states"),
    }
    # Not every database keeps the order of keys.
    names = [name for name in labels if name in detail] + sorted(detail.keys() - labels.keys())
    details = []
    for name in names:
        value = detail[name]
        if value in (None, "", [], {}):
            continue
        if name == "jobs":
            value = [job_id for _queue, job_id in value]
        details.append((labels.get(name, name), Truncator(_text(value)).chars(MAX_DETAIL)))
    return details


def _text(value: Any) -> str:
    """Return a value on one line: the items of a list, the pairs of an object, else JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return json.dumps(value)


def _sees(request: HttpRequest, row: AuditEvent) -> bool:
    """Return whether the user may know of every queue, and of the worker, that an event names."""
    worker = row.detail.get("worker")
    if row.action in (BEGAN, OVER) and not worker and not row.queue:
        return boards.sees_all(request)
    if worker and worker_rows(request).value.find(worker) is None and not boards.sees_all(request):
        return False
    return rights.sees_each(request, _queues(row))


def _queues(row: AuditEvent) -> set[str]:
    """Return the queues that an event names."""
    queues = {row.queue, *row.detail.get("queues", ()), *(queue for queue, _id in row.detail.get("jobs", ()))}
    return queues - {""}
