"""Rows and users for tests of the admin."""

import itertools
from datetime import UTC, datetime
from typing import Any

import msgpack
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from djqueue.codecs import MSGPACK, encode
from djqueue.models import DeadLetter, Job, JobAttempt, JobLog, JobResult, QueueTally

NOON = datetime(2026, 6, 1, 12, 0, 0, tzinfo=UTC)
TIMES = {"created_at": NOON, "run_at": NOON}
ENDED = {**TIMES, "started_at": NOON, "finished_at": NOON}
IN_STATE: dict[str, dict[str, Any]] = {
    "waiting": TIMES,
    "delayed": {**TIMES, "run_at": datetime(2096, 6, 1, tzinfo=UTC)},
    "blocked": TIMES,
    "active": {**TIMES, "started_at": NOON, "attempts": 1, "worker": "w1"},
    "completed": {**ENDED, "attempts": 1},
    "failed": {**ENDED, "attempts": 3, "failures": 3, "reason": "max_attempts_exceeded"},
    "cancelled": {**ENDED, "reason": "cancelled"},
}
_numbers = itertools.count(1)


def make_job(state: str = "waiting", *, payload: Any = None, **fields: Any) -> Job:
    """Create a job's row, count it, and create its dead letter if it failed."""
    fields.setdefault("job_id", f"job-{next(_numbers)}")
    fields.setdefault("queue", "emails")
    fields.setdefault("name", "shop.jobs.send_receipt")
    fields.setdefault("payload", encode(payload, MSGPACK))
    fields.setdefault("options", msgpack.packb({}))
    fields.setdefault("content_type", MSGPACK)
    job = Job.objects.create(state=state, **{**IN_STATE[state], **fields})
    QueueTally.objects.create(queue=job.queue, **{f"in_{state}": 1})
    if state == "failed":
        make_dead_letter(job)
    return job


def make_dead_letter(job: Job, **fields: Any) -> DeadLetter:
    about = {"queue": job.queue, "job_id": job.job_id, "name": job.name}
    said = {"error_type": job.error_type, "error_message": job.error_message}
    kept = {"entered_at": NOON, "expires_at": datetime(2096, 6, 1, tzinfo=UTC)}
    reason = {"reason": "max_attempts_exceeded"}
    return DeadLetter.objects.create(**{**about, **said, **kept, **reason, **fields})


def make_result(job: Job, value: Any) -> JobResult:
    return JobResult.objects.create(
        queue=job.queue,
        job_id=job.job_id,
        content_type=MSGPACK,
        result=encode(value, MSGPACK),
        completed_at=NOON,
    )


def make_attempt(job: Job, attempt: int = 1, **fields: Any) -> JobAttempt:
    about = {"queue": job.queue, "job_id": job.job_id, "attempt": attempt, "worker": "w1"}
    times = {"started_at": NOON, "finished_at": NOON}
    return JobAttempt.objects.create(**{**about, **times, "outcome": "retried", **fields})


def make_log(job: Job, line: str) -> JobLog:
    return JobLog.objects.create(queue=job.queue, job_id=job.job_id, at=NOON, line=line)


def make_user(*codenames: str) -> User:
    """Create a staff user with these permissions of djqueue."""
    user = User.objects.create_user(f"user-{next(_numbers)}", is_staff=True)
    found = Permission.objects.filter(content_type__app_label="djqueue", codename__in=codenames)
    assert found.count() == len(codenames)
    user.user_permissions.set(found)
    return user


def make_superuser() -> User:
    return User.objects.create_superuser(f"root-{next(_numbers)}")


def logged_in(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def list_url(model: str, **query: str) -> str:
    return reverse(f"admin:djqueue_{model}_changelist", query=query)


def change_url(row: Any) -> str:
    return reverse(f"admin:djqueue_{row._meta.model_name}_change", args=[row.pk])
