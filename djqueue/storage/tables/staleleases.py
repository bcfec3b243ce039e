"""Leases of processes, such as the scheduler's, that were neither renewed nor released."""

from djqueue import models
from djqueue.core.units import to_milliseconds

from .holders import RELEASED, LeaseHolder


def stale_holder(alias: str, name: str, until: int) -> LeaseHolder | None:
    """Return the last holder of a lease that expired before a time without being released.

    Its process was killed or hangs, and no other one has taken over.

    Args:
        name: Name of the lease, such as "scheduler".
        until: UTC milliseconds.
    """
    rows = models.SchedulerLease.objects.using(alias).filter(name=name)
    row = rows.values_list(*LeaseHolder._fields).first()
    if row is None:
        return None
    holder = LeaseHolder(*row)
    return holder if RELEASED < to_milliseconds(holder.expires_at) < until else None
