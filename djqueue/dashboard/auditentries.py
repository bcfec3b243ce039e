"""What is kept of actions, in words."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.models import AuditEvent

LONGEST = 200
"""Characters of a detail that a page shows."""

NAMES = {
    "pause": gettext_lazy("Pause queue"),
    "resume": gettext_lazy("Resume queue"),
    "limits": gettext_lazy("Change queue limits"),
    "clean": gettext_lazy("Clear queue"),
    "pause_group": gettext_lazy("Pause group"),
    "resume_group": gettext_lazy("Resume group"),
    "group_limits": gettext_lazy("Change group limits"),
    "limiter": gettext_lazy("Change limiter limits"),
    "ticked_retry": gettext_lazy("Retry selected jobs"),
    "ticked_promote": gettext_lazy("Run selected jobs now"),
    "ticked_cancel": gettext_lazy("Cancel selected jobs"),
    "ticked_remove": gettext_lazy("Delete selected jobs"),
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
    "letters_begin": gettext_lazy("Retry or delete matching dead letters"),
    "letters_selected": gettext_lazy("Retry selected dead letters"),
    "letters_delete": gettext_lazy("Delete selected dead letters"),
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
    "import_cancel_begin": gettext_lazy("Cancel remaining jobs of a bulk write"),
    "import_replay_begin": gettext_lazy("Retry failed jobs of a bulk write"),
    "undo": gettext_lazy("Undo deletion"),
    "undo_clean": gettext_lazy("Undo clearing a queue"),
    "enqueue_now": gettext_lazy("Enqueue job"),
}
"""By the page that does it."""


class AuditEntry(NamedTuple):
    """An action that was kept."""

    row: AuditEvent
    name: str
    operation: int | None
    """The bulk operation that it began, ended or undid."""
    detail: list[tuple[str, str]]
    """What else was kept, by its name."""


def named(action: str) -> str:
    """An action in words; one that this version does not know as it is."""
    return str(NAMES.get(action, action))


def told(row: AuditEvent) -> AuditEntry:
    """An action as a page shows it."""
    detail: dict[str, Any] = dict(row.detail)
    operation = detail.pop("operation", None)
    return AuditEntry(row, named(row.action), operation, list(_written(detail)))


def _written(detail: Mapping[str, Any]) -> list[tuple[str, str]]:
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
    # In this order, as not every database keeps that in which they were written.
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
    """A value on one line: a list's items, an object's pairs, else as JSON has it."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return json.dumps(value)
