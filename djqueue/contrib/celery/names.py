"""Names and job options that the transport and the result backend use in the storage."""

import hashlib

from djqueue.core.job import Batch
from djqueue.core.options import MAX_INTEGER, MAX_NAME, JobOptions

MESSAGE = "kombu.message"
"""Job name of messages."""
DECLARED_QUEUE, DECLARED_QUEUES = "kombu.queue", "kombu.queues"
"""Job name and queue of the records of declared queues."""
EXCHANGE, EXCHANGES = "kombu.exchange", "kombu.exchanges"
"""Job name and queue of the routing tables of exchanges."""
RESULT, RESULTS = "celery.result", "celery.results"
"""Job name and queue of Celery's results."""

JSON = "application/json"
FOREVER = 100 * 365 * 86_400_000
"""Milliseconds, for records that do not expire."""
AT_ONCE = 1
"""Milliseconds for which the record of a consumed message is kept by default."""


def record_id(key: str) -> str:
    """Return a job id for a key of any length."""
    if 1 <= len(key) <= MAX_NAME and "\0" not in key:
        return key
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def record(queue: str, name: str, id: str, value: bytes, expires: int, content_type: str = JSON) -> Batch:
    """Return a delayed job that keeps a value until it is due, and is never run.

    It is not written in a transaction of the caller: other processes must see it at once.
    """
    options = JobOptions(
        max_attempts=MAX_INTEGER,
        max_stalls=MAX_INTEGER,
        result_ttl=AT_ONCE,
        durable=False,
        content_type=content_type,
    )
    return Batch(queue, name, options, [value], [id], delay=expires)
