"""Hints at the end of errors: similar names, and the equivalents of names that other job queues use."""

from collections.abc import Iterable
from difflib import get_close_matches

FOREIGN_OPTIONS = {
    "actor_name": "name",
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
    "labels": "tags",
    "lock": "concurrency_key",
    "max_age": "ttl",
    "max_backoff": "backoff",
    "max_retries": "max_attempts",
    "max_tries": "max_attempts",
    "min_backoff": "backoff",
    "queue_name": "queue",
    "queueing_key": "unique_key",
    "queueing_lock": "unique_key",
    "result_expires": "result_ttl",
    "result_timeout": "result_ttl",
    "retries": "max_attempts",
    "retry": "max_attempts",
    "retry_backoff": "backoff",
    "retry_backoff_max": "backoff",
    "retry_count": "max_attempts",
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
    "store_results": "result_ttl",
    "task_id": "id",
    "time_limit": "timeout",
    "timeout_seconds": "timeout",
    "typing": "check_arguments",
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
    "connection": "set DJQUEUE['STORAGE']",
    "context": "the function gets its job from current_job()",
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
    "max_concurrency": "it belongs to queues: DJQUEUE['QUEUES'] = {'emails': {'CONCURRENCY': 10}}",
    "meta": "use headers, or current_job().progress() for values that change",
    "on_failure": "use signals such as job_failed",
    "on_stopped": "use signals such as job_cancelled",
    "on_success": "use signals such as job_completed",
    "pass_context": "the function gets its job from current_job()",
    "q_options": "pass the options to using()",
    "rate_limit": "rates belong to queues: DJQUEUE['QUEUES'] = {'emails': {'RATE': '10/m'}}",
    "reject_on_worker_lost": "a job whose worker dies always runs again, up to max_stalls times",
    "repeat": "use a schedule, such as @job(every=60, max_executions=3)",
    "retry_on_error": "every exception is retried; raise UnrecoverableError or Discard to prevent that",
    "retry_when": "every exception is retried; raise UnrecoverableError or Discard to prevent that",
    "shadow": "use tags or subject",
    "sync": "call the function, or use DJQUEUE['IMMEDIATE']",
    "task_name": "use tags or subject",
    "throws": "raise UnrecoverableError or Discard",
    "track_started": "the state of a job is always tracked",
    "webhooks": "use signals such as job_completed",
}
"""Options of other queues that have no equivalent here, and what to do instead."""
FOREIGN_TIMES = {
    "clocked": "start_at",
    "cron_string": "cron",
    "crontab": "cron",
    "day_of_week": "cron",
    "days": "every",
    "hour": "cron",
    "hours": "every",
    "interval": "every",
    "minute": "cron",
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
FOREIGN_SETTINGS = {
    "ALWAYS_EAGER": "IMMEDIATE",
    "ASYNC": "IMMEDIATE",
    "BACKEND": "STORAGE",
    "BROKER": "STORAGE",
    "BROKER_URL": "STORAGE",
    "CONNECTION": "STORAGE",
    "CONSUMER": "CONCURRENCY",
    "DATABASE": "STORAGE",
    "DEFAULT_QUEUE": "DEFAULTS",
    "DEFAULT_RESULT_TTL": "DEFAULTS",
    "DEFAULT_TIMEOUT": "DEFAULTS",
    "EAGER": "IMMEDIATE",
    "HOST": "STORAGE",
    "HUEY_CLASS": "STORAGE",
    "IMPORTS": "MODULES",
    "INCLUDE": "MODULES",
    "MAX_ATTEMPTS": "DEFAULTS",
    "MAX_RETRIES": "DEFAULTS",
    "ORM": "STORAGE",
    "PORT": "STORAGE",
    "REDIS": "STORAGE",
    "REDIS_URL": "STORAGE",
    "RESULT_BACKEND": "STORAGE",
    "RESULT_EXPIRES": "DEFAULTS",
    "RESULT_TTL": "DEFAULTS",
    "RETRIES": "DEFAULTS",
    "RETRY": "DEFAULTS",
    "SENTINELS": "STORAGE",
    "SERIALIZER": "CODEC",
    "SYNC": "IMMEDIATE",
    "TASK_ALWAYS_EAGER": "IMMEDIATE",
    "TASK_DEFAULT_QUEUE": "DEFAULTS",
    "TASK_QUEUES": "QUEUES",
    "TASK_SERIALIZER": "CODEC",
    "TASK_TIME_LIMIT": "DEFAULTS",
    "THREADS": "CONCURRENCY",
    "TIMEOUT": "DEFAULTS",
    "URL": "STORAGE",
    "WORKERS": "CONCURRENCY",
    "WORKER_CONCURRENCY": "CONCURRENCY",
}
"""Settings of Celery, RQ, Huey, Dramatiq, Django Q and others, and the keys of DJQUEUE that replace them."""
SETTING_NOTES = {
    "CONCURRENCY": " Processes are those of runworkers --processes",
    "DEFAULTS": " Its values are job options, such as {'timeout': 60, 'max_attempts': 3, 'result_ttl': 600}",
    "STORAGE": " For example {'BACKEND': 'djqueue.storage.redis.RedisStorage', 'OPTIONS': {'URL': "
    "'redis://localhost:6379/0'}}",
}
EXPLAINED_SETTINGS = {
    "BEAT_SCHEDULE": "declare schedules with @job(cron=...) or @job(every=...)",
    "CATCH_UP": "it is an option of each schedule: @job(cron=..., missed=...)",
    "MAX_TASKS_PER_CHILD": "use runworkers --max-jobs-per-process",
    "NAME": "set PREFIX in OPTIONS of STORAGE if projects share a Redis",
    "RECYCLE": "use runworkers --max-jobs-per-process",
    "SAVE_LIMIT": "set RETENTION of a queue in QUEUES",
    "SCHEDULE": "declare schedules with @job(cron=...) or @job(every=...)",
    "TASK_ROUTES": "set the queue of a job type with @job(queue=...)",
    "WORKER_MAX_TASKS_PER_CHILD": "use runworkers --max-jobs-per-process",
}
"""Settings of other queues that have no equivalent key, and what to use."""
PREFIXES = ("CELERY_", "RQ_", "HUEY_", "DRAMATIQ_", "Q_")
FOREIGN_EXPORTS = {
    "Celery": "job: djqueue has no application object",
    "Context": "current_job",
    "Huey": "job: djqueue has no application object",
    "InMemoryBroker": "job: djqueue has no application object",
    "RedisHuey": "job: djqueue has no application object",
    "Schedule": "job(cron=...) or job(every=...)",
    "Task": "job",
    "TaskiqDepends": "current_job",
    "TaskiqScheduler": "job(cron=...) or job(every=...)",
    "actor": "job",
    "app": "job: djqueue has no application object",
    "async_chain": "chain",
    "async_iter": "chord",
    "async_task": "job, and enqueue() of the function",
    "background": "job",
    "broker": "job: djqueue has no application object",
    "chunks": "enqueue_many() of a function under @job",
    "crontab": "job(cron=...)",
    "current_task": "current_job",
    "db_periodic_task": "job(cron=...)",
    "db_task": "job",
    "enqueue": "enqueue() of a function under @job, or Queue(name).enqueue(payload)",
    "enqueue_many": "enqueue_many() of a function under @job",
    "fetch": "Queue(name).get_job(id)",
    "get_broker": "job: djqueue has no application object",
    "get_current_job": "current_job",
    "get_queue": "Queue(name)",
    "get_result": "Queue(name).get_result(id)",
    "get_task_logger": "current_job().log(line), or logging",
    "lock_task": "job(concurrency_key=...)",
    "periodic_task": "job(cron=...) or job(every=...)",
    "pipeline": "chain",
    "result": "Queue(name).get_result(id)",
    "schedule": "job(cron=...) or job(every=...)",
    "set_broker": "job: djqueue has no application object",
    "shared_task": "job",
    "signature": "job, and node() of the function",
    "task": "job",
}
"""Exports of other packages, and what to import here."""
FOREIGN_RESULT_CALLS = {
    "abort": "Queue(result.queue).cancel(result.id)",
    "cancel": "Queue(result.queue).cancel(result.id)",
    "date_done": "result.job().timeline",
    "exc_info": "result.job().timeline",
    "failed": "result.job().state",
    "fetch": "result.job()",
    "get": "result.wait(timeout)",
    "get_id": "result.id",
    "get_progress": "result.job().progress",
    "get_result": "result.wait(timeout)",
    "get_status": "result.job().state",
    "info": "result.job()",
    "is_failed": "result.job().state",
    "is_finished": "result.job().state",
    "is_queued": "result.job().state",
    "is_ready": "result.job().state",
    "is_started": "result.job().state",
    "join": "result.wait(timeout)",
    "latest_result": "result.wait(timeout)",
    "meta": "result.job().progress",
    "ready": "result.job().state",
    "return_value": "result.wait(timeout)",
    "revoke": "Queue(result.queue).cancel(result.id)",
    "state": "result.job().state",
    "successful": "result.job().state",
    "task_id": "result.id",
    "traceback": "result.job().timeline",
    "wait_result": "result.wait(timeout)",
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
    "kiq": "{job}.enqueue(...)",
    "kicker": "{job}.using(...).enqueue(...)",
    "message_with_options": "{job}.using(...).node(...), a job of a workflow",
    "call_local": "{job}(...) to run it in this process",
    "retry": "djqueue.Retry(delay=60), which the function raises",
    "revoke": "Queue(name).cancel(id)",
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


def nearest_setting(name: str, known: Iterable[str]) -> str:
    """Like `nearest`, for keys of DJQUEUE: the names that other queues use are known, too."""
    word = name.upper()
    for prefix in PREFIXES:
        word = word.removeprefix(prefix)
    if name in known or word not in FOREIGN_SETTINGS | EXPLAINED_SETTINGS:
        return nearest(name, known)
    if word in EXPLAINED_SETTINGS:
        return f"; {EXPLAINED_SETTINGS[word]}"
    meant = FOREIGN_SETTINGS[word]
    return f"; did you mean {meant!r}?{SETTING_NOTES.get(meant, '')}"


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
