"""The audit log as pages show it, and the last recorded action on a job."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.models import AuditEvent

from . import rendering
from .tables import rows_of

LONGEST = 200
"""Maximum characters shown of one detail."""

NAMES = {
    "pause": gettext_lazy("Pause queue"),
    "resume": gettext_lazy("Resume queue"),
    "limits": gettext_lazy("Change queue limits"),
    "clean": gettext_lazy("Clear queue"),
    "pause_group": gettext_lazy("Pause group"),
    "resume_group": gettext_lazy("Resume group"),
    "group_limits": gettext_lazy("Change group limits"),
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
    "dead_letters_begin": gettext_lazy("Retry or delete matching dead letters"),
    "dead_letters_retry": gettext_lazy("Retry selected dead letters"),
    "dead_letters_delete": gettext_lazy("Delete selected dead letters"),
    "cron_create": gettext_lazy("Add schedule"),
    "cron_save": gettext_lazy("Edit schedule"),
    "cron_run": gettext_lazy("Run schedule now"),
    "cron_switch": gettext_lazy("Enable or disable schedule"),
    "cron_delete": gettext_lazy("Delete schedule"),
    "flow_retry": gettext_lazy("Retry workflow"),
    "worker_quiet": gettext_lazy("Quiet worker"),
    "worker_resume": gettext_lazy("Resume worker"),
    "worker_stop": gettext_lazy("Stop worker"),
    "worker_dump": gettext_lazy("Dump worker stacks"),
    "abort": gettext_lazy("Abort retry or deletion of dead letters"),
    "abort_cancel": gettext_lazy("Abort bulk cancellation"),
    "abort_delete": gettext_lazy("Abort bulk deletion"),
    "abort_promote": gettext_lazy("Abort bulk run of delayed jobs"),
    "abort_clean": gettext_lazy("Abort clearing a queue"),
    "bulk_write_cancel_begin": gettext_lazy("Cancel remaining jobs of a bulk write"),
    "bulk_write_retry_begin": gettext_lazy("Retry failed jobs of a bulk write"),
    "undo": gettext_lazy("Undo deletion"),
    "undo_clean": gettext_lazy("Undo clearing a queue"),
    "enqueue_now": gettext_lazy("Enqueue job"),
}
"""Labels of actions, by the name of the page that performs them."""
LAST_ACTIONS = {
    "retry": gettext_lazy("Already retried by %(user)s at %(at)s."),
    "dead_letters_retry": gettext_lazy("Already retried by %(user)s at %(at)s."),
    "edit_now": gettext_lazy("Arguments edited by %(user)s at %(at)s."),
    "selected_retry": gettext_lazy("Already retried by %(user)s at %(at)s."),
    "selected_promote": gettext_lazy("Run immediately by %(user)s at %(at)s."),
    "selected_cancel": gettext_lazy("Cancelled by %(user)s at %(at)s."),
    "promote": gettext_lazy("Run immediately by %(user)s at %(at)s."),
    "reschedule": gettext_lazy("Rescheduled by %(user)s at %(at)s."),
    "reprioritise": gettext_lazy("Priority changed by %(user)s at %(at)s."),
    "cancel": gettext_lazy("Cancelled by %(user)s at %(at)s."),
}
"""Sentences about the last action on a job."""
SELECTED = ("dead_letters_retry", "selected_retry", "selected_promote", "selected_cancel")
"""Actions on selected jobs: one row of the log covers several."""
SELECTED_READ = 20
"""Latest rows of these actions that are searched for a job."""


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
    return AuditEntry(row, str(NAMES.get(row.action, row.action)), operation, _details(detail))


def last_action(queue: str, job_id: str) -> str:
    """Return a sentence about the last recorded action on a job; empty if no action is recorded."""
    rows = rows_of(AuditEvent).filter(refused=False)
    last = rows.filter(queue=queue, job_id=job_id, action__in=LAST_ACTIONS).order_by("-pk").first()
    for event in rows.filter(action__in=SELECTED, job_id="").order_by("-pk")[:SELECTED_READ]:
        if last is not None and last.pk > event.pk:
            break
        if [queue, job_id] in event.detail.get("jobs", []):
            last = event
            break
    if last is None:
        return ""
    return str(LAST_ACTIONS[last.action] % {"user": last.user, "at": rendering.local(last.at)})


def _details(detail: Mapping[str, Any]) -> list[tuple[str, str]]:
    labels = {
        "old": _("old"),
        "new": _("new"),
        "kind": _("kind"),
        "name": _("name"),
        "jobs": _("jobs"),
        "queues": _("queues"),
        "worker": _("worker"),
        "tag": _("tag"),
        "write": _("bulk write"),
        "states": _("states"),
    }
    # Not every database keeps the order of keys.
    names = [name for name in labels if name in detail] + sorted(detail.keys() - labels.keys())
    found = []
    for name in names:
        value = detail[name]
        if value in (None, "", [], {}):
            continue
        if name == "jobs":
            value = [job_id for _queue, job_id in value]
        found.append((labels.get(name, name), Truncator(_text(value)).chars(LONGEST)))
    return found


def _text(value: Any) -> str:
    """Return a value on one line: the items of a list, the pairs of an object, else JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return json.dumps(value)
