"""Previous payloads of jobs that were edited."""

from typing import Any

from django.db.models import Q
from django.http import HttpRequest

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.job import JobRecord
from djqueue.core.units import to_datetime
from djqueue.models import PayloadVersion

from . import tables
from .tables import alias_of, rows_of

KEPT = 90 * 86_400_000
"""Retention of previous payloads, in milliseconds. Expired ones are deleted when another is stored."""
SHOWN = 20
"""Maximum previous payloads on a job's page, newest first."""
PARTS = """\
SELECT id, outcome FROM djqueue_payload_version
WHERE queue = %s AND (job_id = %s OR (copy_id = %s AND copy_id <> '')) ORDER BY id DESC LIMIT %s"""


def keep(request: HttpRequest, record: JobRecord, copy_id: str = "") -> PayloadVersion:
    """Store the payload of a job before it is replaced."""
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


def of_job(queue: str, job_id: str) -> list[PayloadVersion]:
    """Return the previous payloads of a job, and of the job that it was copied from, newest first."""
    wanted = Q(job_id=job_id) | (Q(copy_id=job_id) & ~Q(copy_id=""))
    return list(rows_of(PayloadVersion).filter(wanted, queue=queue).order_by("-pk")[:SHOWN])


def parts(queue: str, job_id: str) -> tuple[tuple[Any, ...], ...]:
    """Return what a job's page shows of previous payloads: see `freshness.Parts`."""
    return tables.select(PayloadVersion, PARTS, (queue, job_id, job_id, SHOWN))


def latest(queue: str, job_id: str) -> int:
    """Return the key of the latest previous payload; 0 if the job was never edited."""
    rows = rows_of(PayloadVersion).filter(queue=queue, job_id=job_id, copy_id="")
    return rows.order_by("-pk").values_list("pk", flat=True).first() or 0
