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
"""Options of Celery, RQ, Dramatiq, Huey, Procrastinate and others, and the option here that does the same."""
NOTES = {
    "attempts": "max_attempts counts the first attempt, too",
    "max_retries": "max_attempts counts the first attempt, too",
    "retries": "max_attempts counts the first attempt, too",
    "retry": "max_attempts counts the first attempt, too",
}


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing if no known name is close."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def nearest_option(name: str, known: Iterable[str]) -> str:
    """Like `nearest`, but for options, where the names that other queues use are known, too."""
    if name not in FOREIGN_OPTIONS:
        return nearest(name, known)
    note = f" ({NOTES[name]})" if name in NOTES else ""
    return f"; did you mean {FOREIGN_OPTIONS[name]!r}?{note}"


def similar(name: str, known: Iterable[str]) -> str | None:
    """The known name that this one may be a typing error of.

    Names that differ in their digits alone, as `shard-1` and `shard-2`, are different on purpose.
    """
    shape = _without_digits(name)
    candidates = [other for other in known if _without_digits(other) != shape]
    close = get_close_matches(name, candidates, n=1)
    return close[0] if close else None


def _without_digits(name: str) -> str:
    return "".join(character for character in name if not character.isdigit())
