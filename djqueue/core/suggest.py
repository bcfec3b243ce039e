"""Hints at the end of errors: similar names, and the equivalents of names that other job queues use."""

from collections.abc import Iterable
from difflib import get_close_matches

FOREIGN_OPTIONS = {
    "at_front": "lifo",
    "attempts": "max_attempts",
    "broker": "queue",
    "cached": "result_ttl",
    "cluster": "queue",
    "countdown": "delay",
    "default_retry_delay": "backoff",
    "delay_seconds": "delay",
    "depends": "depends_on",
    "eta": "run_at",
    "expires": "ttl",
    "group": "concurrency_key",
    "idempotency_key": "unique_key",
    "job_id": "id",
    "job_timeout": "timeout",
    "keep_result": "result_ttl",
    "max_age": "ttl",
    "max_backoff": "backoff",
    "max_retries": "max_attempts",
    "max_tries": "max_attempts",
    "min_backoff": "backoff",
    "queue_name": "queue",
    "queueing_lock": "unique_key",
    "result_expires": "result_ttl",
    "retries": "max_attempts",
    "retry": "max_attempts",
    "retry_backoff": "backoff",
    "retry_backoff_max": "backoff",
    "retry_delay": "backoff",
    "retry_jitter": "backoff",
    "retry_kwargs": "max_attempts",
    "retry_policy": "backoff",
    "routing_key": "queue",
    "run_after": "run_at",
    "save": "result_ttl",
    "schedule_at": "run_at",
    "schedule_in": "delay",
    "scheduled_at": "run_at",
    "serializer": "content_type",
    "soft_time_limit": "timeout",
    "task_id": "id",
    "time_limit": "timeout",
    "unique": "unique_key",
    "unique_for": "unique_ttl",
}
"""Options of Celery, RQ, Dramatiq, Huey, Procrastinate and others, and their equivalents here."""
NOTES = {
    "attempts": "max_attempts counts the first attempt, too",
    "group": "to label jobs, use tags",
    "max_retries": "max_attempts counts the first attempt, too",
    "retries": "max_attempts counts the first attempt, too",
    "retry": "max_attempts counts the first attempt, too",
}

EXPLAINED = {
    "ack_failure": "use max_attempts=1 to keep a job from being retried",
    "acks_late": "a job whose worker dies always runs again; see the docs on leases",
    "autoretry_for": "every exception is retried; raise UnrecoverableError or Discard to prevent that",
    "base": "a job is a function; use middleware for what all jobs have in common",
    "bind": "the function gets its job from current_job()",
    "chain": "use chain(), or depends_on",
    "description": "use tags or subject",
    "dont_autoretry_for": "raise UnrecoverableError or Discard",
    "exchange": "there are no exchanges; use queue",
    "executor": "set it on the job type, as @job(executor='isolated')",
    "failure_ttl": "it belongs to queues: DJQUEUE['QUEUES'] = {'emails': {'DEAD_LETTERS': {'TTL': 86_400}}}",
    "group_id": "use tags, or a workflow",
    "hook": "use signals such as job_completed",
    "ignore_result": "results are kept for result_ttl; result_ttl=1 keeps them for a second",
    "is_async": "use DJQUEUE['IMMEDIATE'], or the fixture djqueue_immediate",
    "link": "use chain, or depends_on",
    "link_error": "use signals such as job_failed",
    "meta": "use headers, or current_job().progress() for values that change",
    "on_failure": "use signals such as job_failed",
    "on_stopped": "use signals such as job_cancelled",
    "on_success": "use signals such as job_completed",
    "q_options": "pass the options to using()",
    "rate_limit": "rates belong to queues: DJQUEUE['QUEUES'] = {'emails': {'RATE': '10/m'}}",
    "reject_on_worker_lost": "a job whose worker dies always runs again, up to max_stalls times",
    "repeat": "use a schedule, such as @job(every=60, max_executions=3)",
    "sync": "call the function, or use DJQUEUE['IMMEDIATE']",
    "task_name": "use tags or subject",
    "throws": "raise UnrecoverableError or Discard",
    "track_started": "the state of a job is always tracked",
    "webhooks": "use signals such as job_completed",
}
"""Options of other queues that have no equivalent here, and what to do instead."""
FOREIGN_TIMES = {
    "cron_string": "cron",
    "crontab": "cron",
    "days": "every",
    "hours": "every",
    "interval": "every",
    "minutes": "every",
    "next_run": "start_at",
    "one_off": "max_executions",
    "repeat_every": "every",
    "repeats": "max_executions",
    "run_every": "every",
    "schedule": "cron",
    "schedule_type": "every",
    "seconds": "every",
    "start_time": "start_at",
}
"""Options of schedules in other projects, and their equivalents here."""
FOREIGN_EXPORTS = {
    "Celery": "job: djqueue has no application object",
    "Schedule": "job(cron=...) or job(every=...)",
    "actor": "job",
    "async_chain": "chain",
    "async_iter": "chord",
    "async_task": "job, and enqueue() of the function",
    "background": "job",
    "crontab": "job(cron=...)",
    "current_task": "current_job",
    "db_periodic_task": "job(cron=...)",
    "db_task": "job",
    "enqueue": "enqueue() of a function under @job, or Queue(name).enqueue(payload)",
    "fetch": "Queue(name).get_job(id)",
    "get_current_job": "current_job",
    "get_queue": "Queue(name)",
    "get_task_logger": "current_job().log(line), or logging",
    "periodic_task": "job(cron=...) or job(every=...)",
    "result": "Queue(name).get_result(id)",
    "schedule": "job(cron=...) or job(every=...)",
    "shared_task": "job",
    "task": "job",
}
"""Exports of other packages, and what to import here."""
FOREIGN_RESULT_CALLS = {
    "abort": "Queue(result.queue).cancel(result.id)",
    "cancel": "Queue(result.queue).cancel(result.id)",
    "exc_info": "result.job().timeline",
    "fetch": "result.job()",
    "get": "result.wait(timeout)",
    "get_id": "result.id",
    "get_result": "result.wait(timeout)",
    "get_status": "result.job().state",
    "is_failed": "result.job().state",
    "is_finished": "result.job().state",
    "is_queued": "result.job().state",
    "is_started": "result.job().state",
    "latest_result": "result.wait(timeout)",
    "meta": "result.job().progress",
    "ready": "result.job().state",
    "return_value": "result.wait(timeout)",
    "revoke": "Queue(result.queue).cancel(result.id)",
    "state": "result.job().state",
    "successful": "result.job().state",
    "task_id": "result.id",
    "traceback": "result.job().timeline",
}
"""Attributes of results in Celery, RQ, Huey and Dramatiq, and what to call here."""
FOREIGN_JOB_CALLS = {
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
FOREIGN_QUEUE_CALLS = {
    "add": "enqueue(payload)",
    "async_task": "enqueue(payload)",
    "canceled_job_registry": "counts()",
    "count": "counts()",
    "deferred_job_registry": "counts()",
    "delay": "enqueue(payload)",
    "delete": "obliterate()",
    "drain": "clear()",
    "empty": "clear()",
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
    "purge": "clear()",
    "push": "enqueue(payload)",
    "put": "enqueue(payload)",
    "scheduled_job_registry": "counts()",
    "send": "enqueue(payload)",
    "send_task": "enqueue(payload, name=...)",
    "size": "counts()",
    "started_job_registry": "counts()",
}
"""Attributes of the queues of RQ, BullMQ, Celery, Huey and Django Q, and their equivalents."""
FOREIGN_EVENTS = {
    "active": "started",
    "added": "enqueued",
    "canceled": "cancelled",
    "complete": "completed",
    "delayed": "enqueued",
    "done": "completed",
    "error": "failed",
    "executing": "started",
    "expired": "failed",
    "finished": "completed",
    "interrupted": "released",
    "queued": "enqueued",
    "retries-exhausted": "failed",
    "retry": "retried",
    "retrying": "retried",
    "revoked": "cancelled",
    "running": "started",
    "scheduled": "enqueued",
    "snoozed": "released",
    "succeeded": "completed",
    "success": "completed",
    "task-failed": "failed",
    "task-received": "started",
    "task-retried": "retried",
    "task-revoked": "cancelled",
    "task-sent": "enqueued",
    "task-started": "started",
    "task-succeeded": "completed",
    "waiting": "enqueued",
}
"""Events of BullMQ, Celery, Huey and River, and their equivalents here."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or nothing if no known name is close."""
    by_text = {other.casefold(): other for other in known}
    close = get_close_matches(name, list(by_text.values()), n=1) or get_close_matches(
        name.casefold(), by_text, n=1
    )
    return f"; did you mean {by_text[close[0].casefold()]!r}?" if close else ""


def nearest_option(name: str, known: Iterable[str]) -> str:
    """Like `nearest`, for options: the names that other queues use are known, too."""
    if name in EXPLAINED:
        return f"; {EXPLAINED[name]}"
    if name not in FOREIGN_OPTIONS:
        return nearest(name, known)
    note = f" ({NOTES[name]})" if name in NOTES else ""
    return f"; did you mean {FOREIGN_OPTIONS[name]!r}?{note}"


def nearest_event(name: str, known: Iterable[str]) -> str:
    """Like `nearest`, for events: the names that other queues use are known, too."""
    meant = FOREIGN_EVENTS.get(name)
    return f"; did you mean {meant!r}?" if meant else nearest(name, known)


def similar(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that this one may be a misspelling of.

    Names that differ only in digits, such as `shard-1` and `shard-2`, are different on purpose.
    """
    shape = _without_digits(name)
    candidates = [other for other in known if _without_digits(other) != shape]
    close = get_close_matches(name, candidates, n=1)
    return close[0] if close else None


def explain_queue_attribute(name: str) -> str:
    """Return the text of an AttributeError for an attribute that a queue does not have."""
    call = FOREIGN_QUEUE_CALLS.get(name)
    if call is None:
        return f"'Queue' object has no attribute {name!r}"
    return f"Queue has no {name}. Use Queue.{call}."


def explain_job_attribute(kind: str, job: object, name: str) -> str:
    """Return the text of an AttributeError for an attribute that a job type does not have."""
    call = FOREIGN_JOB_CALLS.get(name)
    if call is None or not isinstance(job, str):
        return f"{kind!r} object has no attribute {name!r}"
    return f"A djqueue job has no {name}(). Use {call.format(job=job)}."


def _without_digits(name: str) -> str:
    return "".join(character for character in name if not character.isdigit())
