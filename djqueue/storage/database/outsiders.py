"""The mark of programs that write rows of jobs beside the storage and the mirror.

A page that shows mirrored rows is unchanged as long as their version is. The mirror changes that version with
each of its transactions; other programs change it with this mark.
"""

from secrets import token_hex

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.models import SchedulerLease

NAME = "mirror:outsiders"
"""The row whose holder is another one after each such transaction."""


def mark(alias: str) -> None:
    """Note that rows of jobs change. Call it in the transaction that changes them."""
    now = SYSTEM_CLOCK.now()
    values = {"host": "", "pid": 0, "address": "", "renewed_at": now, "expires_at": now}
    rows = SchedulerLease.objects.using(alias)
    rows.update_or_create(
        name=NAME, defaults={"holder": token_hex(8)}, create_defaults={"holder": token_hex(8), **values}
    )
