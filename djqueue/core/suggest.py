"""The hint at the end of an error about an unknown name."""

from collections.abc import Iterable
from difflib import get_close_matches

FOREIGN_OPTIONS = {
    "at_front": "lifo",
    "attempts": "max_attempts",
    "countdown": "delay",
    "default_retry_delay": "backoff",
    "delay_seconds": "delay",
    "depends": "depends_on",
    "eta": "run_at",
    "expires": "ttl",
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
    "retry_delay": "backoff",
    "routing_key": "queue",
    "run_after": "run_at",
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
    "max_retries": "max_attempts counts the first attempt, too",
    "retries": "max_attempts counts the first attempt, too",
    "retry": "max_attempts counts the first attempt, too",
}


EXPLAINED = {
    "acks_late": "a job whose worker dies always runs again; see the docs on leases",
    "autoretry_for": "every exception is retried; raise UnrecoverableError or Discard to prevent that",
    "base": "a job is a function; use middleware for what all jobs have in common",
    "bind": "the function gets its job from current_job()",
    "description": "use tags or subject",
    "executor": "set it on the job type, as @job(executor='isolated')",
    "hook": "use signals such as job_completed",
    "ignore_result": "results are kept for result_ttl; result_ttl=1 keeps them for a second",
    "link": "use chain, or depends_on",
    "link_error": "use signals such as job_failed",
    "on_failure": "use signals such as job_failed",
    "on_success": "use signals such as job_completed",
    "rate_limit": "rates belong to queues: DJQUEUE['QUEUES'] = {'emails': {'RATE': '10/m'}}",
    "throws": "raise UnrecoverableError or Discard",
    "track_started": "the state of a job is always tracked",
}
"""Options of other queues that have no equivalent here, and what to do instead."""
FOREIGN_TIMES = {
    "crontab": "cron",
    "cron_string": "cron",
    "days": "every",
    "hours": "every",
    "interval": "every",
    "minutes": "every",
    "repeat_every": "every",
    "run_every": "every",
    "schedule": "cron",
    "seconds": "every",
}
"""Options of schedules in other projects, and their equivalents here."""


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


def similar(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that this one may be a misspelling of.

    Names that differ only in digits, such as `shard-1` and `shard-2`, are different on purpose.
    """
    shape = _without_digits(name)
    candidates = [other for other in known if _without_digits(other) != shape]
    close = get_close_matches(name, candidates, n=1)
    return close[0] if close else None


def _without_digits(name: str) -> str:
    return "".join(character for character in name if not character.isdigit())
