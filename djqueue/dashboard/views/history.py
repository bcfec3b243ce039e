"""The activity log: actions and refused attempts."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from django.http import HttpRequest, HttpResponse
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.core.overview import Finding
from djqueue.dashboard import jsontext, problemcards, rendering, rights, tables
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.dashboard.tables import rows_of
from djqueue.dashboard.views import savedviews
from djqueue.dashboard.views.queues import CLEANED
from djqueue.dashboard.views.workers import sees_worker
from djqueue.models import AuditEvent, BulkKind, CronJob, JobState, Revision
from djqueue.operations.alerts import BEGAN, OVER, object_of

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
    savedviews.SAVE: gettext_lazy("Save view"),
    savedviews.SHARE: gettext_lazy("Share view"),
    savedviews.DELETE: gettext_lazy("Delete view"),
}
"""Labels of actions, by the name of the page that performs them."""
FILTERS = ("user", "action", "queue", "job_id")
DETAIL_LABELS = {
    "old": gettext_lazy("old"),
    "new": gettext_lazy("new"),
    "kind": gettext_lazy("kind"),
    "name": gettext_lazy("name"),
    "view": gettext_lazy("name"),
    "job": gettext_lazy("job"),
    "jobs": gettext_lazy("jobs"),
    "queues": gettext_lazy("queues"),
    "limiter": gettext_lazy("limiter"),
    "concurrency_key": gettext_lazy("concurrency key"),
    "error": gettext_lazy("error"),
    "version": gettext_lazy("version"),
    "hours": gettext_lazy("hours"),
    "worker": gettext_lazy("worker"),
    "tag": gettext_lazy("tag"),
    "write": gettext_lazy("bulk write"),
    "state": gettext_lazy("state"),
    "states": gettext_lazy("states"),
    "concurrency": gettext_lazy("concurrency"),
    "rate": gettext_lazy("rate"),
    "paused": gettext_lazy("paused"),
    "changed": gettext_lazy("changed"),
    "refused": gettext_lazy("skipped"),
    "dead_letters": gettext_lazy("filter"),
    "what": gettext_lazy("Jobs to delete"),
    "how": gettext_lazy("outcome"),
}
"""Labels of details, in the order in which they are shown. Filters of dead letters have their own."""
SCHEDULE_FIELDS = {field.name: field.verbose_name for field in CronJob._meta.fields}
CHOICES: dict[str, dict[Any, Any]] = {
    "kind": dict(BulkKind.choices),
    "state": dict(JobState.choices),
    "states": dict(JobState.choices),
    "what": CLEANED,
    "how": dict(Revision.choices),
    **{name: {"changed": gettext_lazy("changed")} for name in jsontext.ARGUMENTS},
}
"""Labels of values by the name of the detail."""
KEYS = ("owner", "copy", "key")
"""Details that only other code reads."""


class AuditEntry(NamedTuple):
    """A row of the audit log."""

    row: AuditEvent
    name: str
    links: list[tuple[str, str]]
    """Texts and URLs of what the action was about: a bulk operation, a problem or a saved view."""
    detail: list[tuple[str, str]]
    """Names and values of the other details."""


def entry(site: DashboardSite, row: AuditEvent) -> AuditEntry:
    """Return a row as a page shows it. An unknown action keeps its name."""
    detail: dict[str, Any] = dict(row.detail)
    links = []
    if (operation := detail.pop("operation", None)) is not None:
        text = _("operation %(number)s") % {"number": rendering.number(operation)}
        links.append((text, site.url("operation", operation)))
    if row.action in (BEGAN, OVER) and (one := object_of(detail)) is not None:
        finding = Finding(detail["key"][0], "error", "", "", (one,))
        links.append((problemcards.sentence_of(finding), problemcards.link_of(site, one)))
        detail = {}
    if "query" in detail:
        links.append((detail.pop("view"), savedviews.url_of(site, detail.pop("query"))))
    return AuditEntry(row, str(ACTION_LABELS.get(row.action, row.action)), links, _details(detail))


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
        "entries": [entry(site, row) for row in page.rows],
        "names": sorted(names.items(), key=lambda item: item[1]),
        "query": query,
        **site.page_links("history", page, **query),
    }
    return site.render(request, "history.html", _("History"), context, tab="history")


def _details(detail: Mapping[str, Any]) -> list[tuple[str, str]]:
    # Not every database keeps the order of keys.
    names = [name for name in DETAIL_LABELS if name in detail] + sorted(detail.keys() - DETAIL_LABELS.keys())
    details = []
    for name in names:
        value = detail[name]
        if value in (None, "", [], {}) or name in KEYS:
            continue
        if name == "jobs":
            value = [job_id for _queue, job_id in value]
        details.append((_label(name), Truncator(_text(value, name)).chars(MAX_DETAIL)))
    return details


def _label(name: str) -> str:
    return str(DETAIL_LABELS.get(name) or SCHEDULE_FIELDS.get(name) or rendering.criterion(name))


def _text(value: Any, name: str = "") -> str:
    """Return a value on one line: the items of a list, the pairs of an object, else its word or number."""
    if isinstance(value, dict):
        return ", ".join(f"{_label(key)} {_text(one, key)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(_text(one, name) for one in value)
    if isinstance(value, bool):
        return _("yes") if value else _("no")
    if value is None:
        return rendering.NOTHING
    if isinstance(value, int):
        return rendering.number(value)
    return str(CHOICES.get(name, {}).get(value, value))


def _sees(request: HttpRequest, row: AuditEvent) -> bool:
    """Return whether the user may know of every queue, and of the worker, that an event names."""
    worker = row.detail.get("worker") or row.detail.get("query", {}).get("worker")
    if worker and not sees_worker(request, worker):
        return False
    if row.action in savedviews.ACTIONS or (row.action in (BEGAN, OVER) and not worker):
        return savedviews.sees(request, row.queue, row.user_pk)
    return rights.sees_each(request, _queues(row))


def _queues(row: AuditEvent) -> set[str]:
    """Return the queues that an event names."""
    queues = {row.queue, *row.detail.get("queues", ()), *(queue for queue, _id in row.detail.get("jobs", ()))}
    return queues - {""}
