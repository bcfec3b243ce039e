"""Names of other job queues, for errors that name the equivalent here."""

PACKAGE_HERE = {
    "Celery": "job: djqueue has no application object",
    "actor": "job",
    "async_task": "job, and enqueue() of the function",
    "background": "job",
    "crontab": "job(cron=...)",
    "db_periodic_task": "job(cron=...)",
    "db_task": "job",
    "enqueue": "enqueue() of a function under @job, or Queue(name).enqueue(payload)",
    "get_current_job": "current_job",
    "get_queue": "Queue(name)",
    "periodic_task": "job(cron=...) or job(every=...)",
    "schedule": "job(cron=...) or job(every=...)",
    "shared_task": "job",
    "task": "job",
}
"""Exports of other packages, and what to import here."""
RESULT_HERE = {
    "abort": "Queue(result.queue).cancel(result.id)",
    "cancel": "Queue(result.queue).cancel(result.id)",
    "get": "result.wait(timeout)",
    "get_id": "result.id",
    "get_result": "result.wait(timeout)",
    "get_status": "result.job().state",
    "is_finished": "result.job().state",
    "ready": "result.job().state",
    "return_value": "result.wait(timeout)",
    "revoke": "Queue(result.queue).cancel(result.id)",
    "state": "result.job().state",
    "successful": "result.job().state",
    "task_id": "result.id",
}
"""Attributes of results in Celery, RQ, Huey and Dramatiq, and what to call here."""
