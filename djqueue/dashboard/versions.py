"""The payloads that jobs had before somebody gave them others."""

from typing import Any

from django.db.models import Q
from django.http import HttpRequest

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.durations import to_datetime
from djqueue.core.job import JobRecord
from djqueue.models import PayloadVersion, Revision

from . import tables
from .tables import alias_of, rows_of

KEPT = 90 * 86_400_000
"""Milliseconds after which an old payload goes; looked at whenever another one is kept."""
SHOWN = 20
"""Versions of a job that its page shows: the newest."""
PARTS = """\
SELECT id, outcome FROM djqueue_payload_version
WHERE queue = %s AND (job_id = %s OR (copy_id = %s AND copy_id <> '')) ORDER BY id DESC LIMIT %s"""


def keep(request: HttpRequest, record: JobRecord, copy_id: str = "") -> PayloadVersion:
    """Keep the payload that a job has, before it is asked to have another one."""
    user: Any = request.user
    now = SYSTEM_CLOCK.now()
    rows_of(PayloadVersion).filter(at__lt=to_datetime(now - KEPT)).delete()
    version = PayloadVersion(
        queue=record.queue,
        job_id=record.id,
        at=to_datetime(now),
        user=user.get_username() or "-",
        payload=record.payload,
        content_type=record.options.content_type,
        copy_id=copy_id,
    )
    version.save(using=alias_of(PayloadVersion))
    return version


def done(version: PayloadVersion, outcome: Revision) -> None:
    """It has another one now."""
    version.outcome = outcome
    version.save(update_fields=["outcome"])


def drop(version: PayloadVersion) -> None:
    """It has the same as before: nothing was done."""
    version.delete()


def of_job(queue: str, job_id: str) -> list[PayloadVersion]:
    """Those of a job and the one that it was made from, newest first."""
    wanted = Q(job_id=job_id) | (Q(copy_id=job_id) & ~Q(copy_id=""))
    return list(rows_of(PayloadVersion).filter(wanted, queue=queue).order_by("-pk")[:SHOWN])


def parts(queue: str, job_id: str) -> tuple[tuple[Any, ...], ...]:
    """Return what a job's page shows of these versions: see `freshness.Parts`."""
    return tables.select(PayloadVersion, PARTS, (queue, job_id, job_id, SHOWN))


def latest(queue: str, job_id: str) -> int:
    """Return the key of the newest version that a job itself had; 0 if its payload was never edited."""
    rows = rows_of(PayloadVersion).filter(queue=queue, job_id=job_id, copy_id="")
    return rows.order_by("-pk").values_list("pk", flat=True).first() or 0


def as_it_was(record: JobRecord, version: PayloadVersion) -> JobRecord:
    """The job with an old payload."""
    return record._replace(payload=bytes(version.payload))
