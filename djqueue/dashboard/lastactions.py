"""Who has done last what to a job, as far as the activity knows: for one who comes too late."""

from django.utils.translation import gettext_lazy

from djqueue.models import AuditEvent

from . import rendering
from .tables import rows_of

SENTENCES = {
    "retry": gettext_lazy("Already retried by %(user)s at %(at)s."),
    "letters_selected": gettext_lazy("Already retried by %(user)s at %(at)s."),
    "edit_now": gettext_lazy("Arguments edited by %(user)s at %(at)s."),
    "ticked_retry": gettext_lazy("Already retried by %(user)s at %(at)s."),
    "ticked_promote": gettext_lazy("Run immediately by %(user)s at %(at)s."),
    "ticked_cancel": gettext_lazy("Cancelled by %(user)s at %(at)s."),
    "promote": gettext_lazy("Run immediately by %(user)s at %(at)s."),
    "reschedule": gettext_lazy("Rescheduled by %(user)s at %(at)s."),
    "reprioritise": gettext_lazy("Priority changed by %(user)s at %(at)s."),
    "cancel": gettext_lazy("Cancelled by %(user)s at %(at)s."),
}
"""By the action."""
AT_ONCE = ("letters_selected", "ticked_retry", "ticked_promote", "ticked_cancel")
"""Those that are done to jobs that are ticked."""
TICKED = 20
"""Actions on ticked jobs that are looked through: the last."""


def by(queue: str, job_id: str) -> str:
    """A sentence about the last thing that somebody did to a job; empty if nobody did."""
    rows = rows_of(AuditEvent).filter(refused=False)
    found = rows.filter(queue=queue, job_id=job_id, action__in=SENTENCES).order_by("-pk").first()
    ticked = rows.filter(action__in=AT_ONCE, job_id="").order_by("-pk")[:TICKED]
    for event in ticked:
        if found is not None and found.pk > event.pk:
            break
        if [queue, job_id] in event.detail.get("jobs", []):
            found = event
            break
    if found is None:
        return ""
    said = SENTENCES[found.action] % {"user": found.user, "at": rendering.local(found.at)}
    return str(said)
