"""Mark changes to job rows by programs other than the storage and the mirror.

A page of mirrored rows is cached until their version changes. Each transaction of the mirror changes the
version; other programs change it with this mark.
"""

from secrets import token_hex

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.models import SchedulerLease

NAME = "mirror:outsiders"
"""Name of the row whose holder changes with each such transaction."""


def mark(alias: str) -> None:
    """Record that job rows change. Call this in the transaction that changes them."""
    now = SYSTEM_CLOCK.now()
    values = {"host": "", "pid": 0, "address": "", "renewed_at": now, "expires_at": now}
    rows = SchedulerLease.objects.using(alias)
    rows.update_or_create(
        name=NAME, defaults={"holder": token_hex(8)}, create_defaults={"holder": token_hex(8), **values}
    )
