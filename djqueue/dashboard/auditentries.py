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
    "pause": gettext_lazy("Pause a queue"),
    "resume": gettext_lazy("Resume a queue"),
    "limits": gettext_lazy("Set limits of a queue"),
    "clean": gettext_lazy("Forget jobs of a queue"),
    "pause_group": gettext_lazy("Pause a group"),
    "resume_group": gettext_lazy("Resume a group"),
    "group_limits": gettext_lazy("Set limits of groups"),
    "limiter": gettext_lazy("Set limits of a limiter"),
    "ticked_retry": gettext_lazy("Retry ticked jobs"),
    "ticked_promote": gettext_lazy("Run ticked jobs now"),
    "ticked_cancel": gettext_lazy("Cancel ticked jobs"),
    "ticked_remove": gettext_lazy("Delete ticked jobs"),
    "all_promote_begin": gettext_lazy("Run all that match now"),
    "all_cancel_begin": gettext_lazy("Cancel all that match"),
    "all_delete_begin": gettext_lazy("Delete all that match"),
    "reveal": gettext_lazy("Reveal hidden values"),
    "retry": gettext_lazy("Retry a job"),
    "promote": gettext_lazy("Run a job now"),
    "cancel": gettext_lazy("Cancel a job"),
    "remove": gettext_lazy("Delete a job"),
    "edit_now": gettext_lazy("Edit a job's arguments"),
    "reschedule": gettext_lazy("Give a job another time"),
    "reprioritise": gettext_lazy("Give a job another priority"),
    "letters_begin": gettext_lazy("Retry or delete dead letters that match"),
    "letters_selected": gettext_lazy("Retry ticked dead letters"),
    "letters_delete": gettext_lazy("Delete ticked dead letters"),
    "cron_create": gettext_lazy("Add a schedule"),
    "cron_save": gettext_lazy("Change a schedule"),
    "cron_run": gettext_lazy("Run a schedule now"),
    "cron_switch": gettext_lazy("Switch a schedule on or off"),
    "cron_delete": gettext_lazy("Delete a schedule"),
    "flow_retry": gettext_lazy("Retry a flow"),
    "worker_quiet": gettext_lazy("Quiet a worker"),
    "worker_resume": gettext_lazy("Resume a worker"),
    "worker_stop": gettext_lazy("Stop a worker"),
    "worker_dump": gettext_lazy("Dump a worker's stacks"),
    "abort": gettext_lazy("Abort a retry or deletion of dead letters"),
    "abort_cancel": gettext_lazy("Abort a cancellation in bulk"),
    "abort_delete": gettext_lazy("Abort a deletion in bulk"),
    "abort_promote": gettext_lazy("Abort running delayed jobs in bulk"),
    "abort_clean": gettext_lazy("Abort forgetting jobs"),
    "import_cancel_begin": gettext_lazy("Cancel the rest of an import"),
    "import_replay_begin": gettext_lazy("Replay what failed of an import"),
    "undo": gettext_lazy("Undo a deletion"),
    "undo_clean": gettext_lazy("Undo forgetting jobs"),
    "enqueue_now": gettext_lazy("Enqueue a job"),
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
        "write": _("write"),
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
