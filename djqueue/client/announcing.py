"""Send Django's signals: at once in producers, from a separate thread elsewhere."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from logging import ERROR
from typing import Any

from asgiref.sync import sync_to_async
from django.db import close_old_connections, connections, transaction
from django.dispatch import Signal

from djqueue.conf import has_django
from djqueue.core.callqueue import CallQueue
from djqueue.core.errorgroups import tally
from djqueue.core.job import Batch, EnqueueResult, Incident
from djqueue.core.logs import Log, type_name
from djqueue.core.messages import ThrottledLog
from djqueue.signals import job_cancelled, job_enqueued, job_failed, job_stalled, schedule_fired
from djqueue.storage.base import Storage

from .declarations import registry

logger = Log("djqueue.jobs")
errors = ThrottledLog(logger, 60.0)

MAX_PENDING = 10_000
"""Pending signals after which a worker claims no more jobs until its receivers have caught up."""
MAX_WAITING = 20_000
"""Pending signals after which further ones are dropped: a web server, for example, cannot wait."""
WITHOUT_WORKER = {"attempt": 0, "worker": ""}
"""Arguments of `job_failed` for a job that no worker has reported as failed."""
INCIDENT_SIGNALS: dict[str, tuple[Signal, Callable[[Incident], dict[str, Any]]]] = {
    "stalled": (job_stalled, lambda _: {}),
    "failed": (
        job_failed,
        lambda one: {**WITHOUT_WORKER, "reason": one.reason, "error": one.error},
    ),
    "cancelled": (job_cancelled, lambda one: {"reason": one.reason}),
    "fired": (schedule_fired, lambda one: {"schedule": one.reason}),
}
"""The signal of each incident, and its arguments."""


def enqueued(storage: Storage, batch: Batch, answers: Sequence[EnqueueResult]) -> None:
    """Send `job_enqueued` for new jobs: at once, or when their transaction commits."""
    if storage.capabilities.relayed:
        return
    new = _new(answers)
    alias = storage.capabilities.transactions.alias_for(batch) if new else None
    if alias is None:
        _send_enqueued(batch, new)
    else:
        transaction.on_commit(partial(_send_enqueued, batch, new), using=alias, robust=True)


async def aenqueued(storage: Storage, batch: Batch, answers: Sequence[EnqueueResult]) -> None:
    """Async version of `enqueued`."""
    if storage.capabilities.relayed:
        return
    new = _new(answers)
    alias = await storage.capabilities.transactions.aalias_for(batch) if new else None
    if alias is None:
        for about in _about(batch, new):
            await job_enqueued.asend_robust(**about)
    else:
        send = partial(_send_enqueued, batch, new)
        await sync_to_async(transaction.on_commit)(send, using=alias, robust=True)


def _new(answers: Sequence[EnqueueResult]) -> list[EnqueueResult]:
    return [answer for answer in answers if answer.status == "queued"]


def _send_enqueued(batch: Batch, new: list[EnqueueResult]) -> None:
    for about in _about(batch, new):
        job_enqueued.send_robust(**about)


def _about(batch: Batch, new: list[EnqueueResult]) -> Iterable[dict[str, Any]]:
    sender = registry.find(batch.name)
    alike = {"sender": sender, "queue": batch.queue, "name": batch.name, "options": batch.options}
    return ({**alike, "job_id": answer.id} for answer in new)


class Announcer:
    """Sends signals one after the other, in the order of the events."""

    def __init__(self) -> None:
        self._calls = CallQueue("djqueue-signals", MAX_WAITING, on_error=_on_error, on_drop=_on_drop)
        self._calls.before, self._calls.idle = clean_thread, close_thread

    @property
    def is_behind(self) -> bool:
        """True if receivers are so slow that no more jobs should start."""
        return len(self._calls) >= MAX_PENDING

    def announce(self, signal: Signal, name: str, **about: Any) -> None:
        """Send a signal later, on the announcer's thread. May be called from any thread."""
        self._calls.put(partial(signal.send_robust, sender=registry.find(name), name=name, **about))

    def flush(self, timeout: float) -> bool:
        """Wait, up to `timeout` seconds, until all signals are sent; return whether they were."""
        return self._calls.flush(timeout)


def clean_thread() -> None:
    """Close broken and old database connections of a thread that calls the project's code."""
    if not has_django():
        return
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:
            connection.close()
            # It remembers the block, and would refuse to connect again.
            del connections[connection.alias]
            text = "Code that djqueue has called has left a transaction of %r open; it has been rolled back."
            errors.log(ERROR, connection.alias, text, connection.alias)
    close_old_connections()


def close_thread() -> None:
    """Close the database connections of a thread that has called the project's code."""
    if has_django():
        connections.close_all()


def _on_error(error: BaseException) -> None:
    errors.log(ERROR, type_name(error), "A receiver of signals raised an exception.", exc_info=error)


def _on_drop(number: int) -> None:
    logger.error("The receivers of signals are too slow: %d signals were not sent.", number)


announcer = Announcer()
"""The announcer of this process."""


def announce_incidents(incidents: Sequence[Incident]) -> None:
    """Announce incidents: what a storage did to jobs by itself, or because a user cancelled them."""
    for incident in incidents:
        if incident.event == "failed":
            queue, name = incident.queue, incident.name
            tally.add(queue, name, incident.error, reason=incident.reason, is_final=True)
            logger.error(
                "Job %s (%s) of queue %r failed permanently (%s).",
                incident.id,
                incident.name,
                incident.queue,
                incident.reason,
            )
        signal, arguments = INCIDENT_SIGNALS[incident.event]
        if signal.receivers:
            about = {"queue": incident.queue, "job_id": incident.id, **arguments(incident)}
            announcer.announce(signal, incident.name, **about)
