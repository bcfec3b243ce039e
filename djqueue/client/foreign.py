"""Calls of other job queues, for errors that name the call here."""

HERE = {
    "apply": "{job}(...) to run it in this process, or {job}.enqueue(...)",
    "apply_async": "{job}.using(delay=60, queue=...).enqueue(...)",
    "apply_async_on_commit": "{job}.enqueue(...), which joins the open transaction",
    "async_apply": "{job}.enqueue(...)",
    "configure": "{job}.using(...).enqueue(...)",
    "defer": "{job}.enqueue(...)",
    "defer_async": "await {job}.aenqueue(...)",
    "delay": "{job}.enqueue(...)",
    "delay_on_commit": "{job}.enqueue(...), which joins the open transaction",
    "message": "{job}.node(...), a job of a workflow",
    "perform_async": "{job}.enqueue(...)",
    "perform_in": "{job}.using(delay=60).enqueue(...)",
    "run": "{job}(...) to run it in this process, or {job}.enqueue(...)",
    "s": "{job}.node(...), a job of a workflow",
    "send": "{job}.enqueue(...)",
    "send_with_options": "{job}.using(delay=60, queue=...).enqueue(...)",
    "si": "{job}.node(...), a job of a workflow",
    "signature": "{job}.node(...), a job of a workflow",
    "starmap": "{job}.enqueue_many(((value,), {{}}) for value in values)",
    "map": "{job}.enqueue_many(((value,), {{}}) for value in values)",
    "chunks": "{job}.enqueue_many(((value,), {{}}) for value in values)",
    "submit": "{job}.enqueue(...)",
}
"""Attributes of the tasks of Celery, Dramatiq, Huey, Procrastinate and Sidekiq, and their equivalents."""


QUEUE_HERE = {
    "add": "enqueue(payload)",
    "async_task": "enqueue(payload)",
    "canceled_job_registry": "counts()",
    "count": "counts()",
    "deferred_job_registry": "counts()",
    "delay": "enqueue(payload)",
    "delete": "obliterate()",
    "empty": "drain()",
    "enqueue_at": "enqueue(payload, run_at=...)",
    "enqueue_call": "enqueue(payload)",
    "enqueue_in": "enqueue(payload, delay=60)",
    "failed_job_registry": "dead_letters()",
    "fetch_job": "get_job(id)",
    "finished_job_registry": "counts()",
    "get_job_ids": "dead_letters() or the admin, which list jobs",
    "get_jobs": "dead_letters() or the admin, which list jobs",
    "is_empty": "counts()",
    "job_ids": "dead_letters() or the admin, which list jobs",
    "jobs": "dead_letters() or the admin, which list jobs",
    "pending_count": "counts()",
    "publish": "enqueue(payload)",
    "purge": "drain()",
    "push": "enqueue(payload)",
    "put": "enqueue(payload)",
    "scheduled_job_registry": "counts()",
    "send": "enqueue(payload)",
    "send_task": "enqueue(payload, name=...)",
    "size": "counts()",
    "started_job_registry": "counts()",
}
"""Attributes of the queues of RQ, BullMQ, Celery, Huey and Django Q, and their equivalents."""


def explain_queue_attribute(name: str) -> str:
    """Return the text of an AttributeError for an attribute that a queue does not have."""
    here = QUEUE_HERE.get(name)
    if here is None:
        return f"'Queue' object has no attribute {name!r}"
    return f"Queue has no {name}. Use Queue.{here}."


def explain_attribute(kind: str, job: object, name: str) -> str:
    """Return the text of an AttributeError for an attribute that a job type does not have."""
    here = HERE.get(name)
    if here is None or not isinstance(job, str):
        return f"{kind!r} object has no attribute {name!r}"
    return f"A djqueue job has no {name}(). Use {here.format(job=job)}."
