"""The outbox, as lines of the page *Storage*."""

from django.utils.formats import number_format
from django.utils.translation import gettext as _

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.overview import OK, WARN, DiagnosticLine
from djqueue.core.units import to_milliseconds
from djqueue.models import OutboxJob

from . import spans
from .tables import rows_of

MAX_COUNTED = 10_000
"""Rows that are counted."""
LATE = 60_000
"""Milliseconds after which a job should have left the outbox."""


def lines(backend: str) -> list[DiagnosticLine]:
    """Return the number of jobs in the outbox and the age of the oldest."""
    rows = rows_of(OutboxJob).order_by("id")
    count = rows[: MAX_COUNTED + 1].count()
    value = number_format(min(count, MAX_COUNTED)) + ("+" if count > MAX_COUNTED else "")
    found = [DiagnosticLine("outbox.jobs", _("Outbox"), _("Jobs"), value)]
    oldest = rows.values_list("created_at", flat=True).first()
    if oldest is not None:
        age = max(0, SYSTEM_CLOCK.now() - to_milliseconds(oldest))
        level, note = OK, ""
        if age > LATE:
            level, note = WARN, _("Jobs are not reaching the scheduler: check that runworkers is running.")
            if backend == "redis":
                note = _(
                    "Jobs are not reaching Redis: check that Redis and a runworkers process are running."
                )
        found.append(
            DiagnosticLine("outbox.oldest", _("Outbox"), _("Oldest job"), spans.shown(age), level, note)
        )
    return found
