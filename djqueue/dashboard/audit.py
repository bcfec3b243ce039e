"""Records actions and refused attempts: a row, an entry in the admin's log, a log line and a signal."""

from typing import Any

from django.http import HttpRequest
from django.utils.translation import gettext_lazy

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.logs import Log
from djqueue.core.units import to_datetime
from djqueue.dashboard import rendering
from djqueue.dashboard.tables import alias_of, rows_of
from djqueue.models import AuditEvent, Dashboard
from djqueue.signals import dashboard_action

logger = Log("djqueue.audit")
LAST_ACTIONS = {
    "retry": gettext_lazy("Already retried by %(user)s at %(at)s."),
    "errors_retry": gettext_lazy("Already retried by %(user)s at %(at)s."),
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
SELECTED = ("errors_retry", "selected_retry", "selected_promote", "selected_cancel")
"""Actions on selected jobs: one row of the log covers several."""
SELECTED_READ = 20
"""Latest rows of these actions that are searched for a job."""


def note(
    request: HttpRequest,
    action: str,
    *,
    queue: str = "",
    job_id: str = "",
    count: int = 0,
    refused: bool = False,
    detail: dict[str, Any] | None = None,
) -> AuditEvent:
    """Record an action of the user.

    Args:
        action: Name of the page that performs it.
        count: Number of jobs affected.
        refused: Whether the user lacked permission.
        detail: Further details as JSON; never a payload.
    """
    # The command line uses `record` in projects without the admin, too.
    from django.contrib.admin.models import CHANGE, LogEntry
    from django.contrib.contenttypes.models import ContentType

    user: Any = request.user
    event = record(
        user=user.get_username() or "-",
        user_pk="" if user.pk is None else str(user.pk),
        action=action,
        queue=queue,
        job_id=job_id,
        count=count,
        refused=refused,
        detail=detail or {},
    )
    if user.pk is not None and not refused:
        LogEntry.objects.create(
            user_id=user.pk,
            content_type_id=ContentType.objects.get_for_model(Dashboard, for_concrete_model=False).pk,
            object_id=None,
            object_repr=" ".join(filter(None, (queue, job_id)))[:200],
            action_flag=CHANGE,
            change_message=action,
        )
    dashboard_action.send_robust(sender=Dashboard, event=event)
    return event


def record(**values: Any) -> AuditEvent:
    """Write a row and a log line about an action; `values` are the fields of the row without its time."""
    event = AuditEvent(at=to_datetime(SYSTEM_CLOCK.now()), **values)
    event.save(using=alias_of(AuditEvent))
    logger.info(
        "User %s %s %s: queue %r, job %r, %d jobs.",
        event.user,
        "was refused" if event.refused else "performed",
        event.action,
        event.queue,
        event.job_id,
        event.count,
    )
    return event


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
