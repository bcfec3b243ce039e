"""Records actions and refused attempts: a row, an entry in the admin's log, a log line and a signal."""

import logging
from typing import Any

from django.http import HttpRequest

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.units import to_datetime
from djqueue.models import AuditEvent, Dashboard
from djqueue.signals import dashboard_action

from .tables import alias_of

logger = logging.getLogger("djqueue.audit")


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
