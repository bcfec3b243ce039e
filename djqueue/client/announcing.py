"""Telling Django's signals what has happened: at once in producers, from a thread of its own elsewhere."""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

from asgiref.sync import sync_to_async
from django.db import close_old_connections, connections, transaction
from django.dispatch import Signal

from djqueue.conf import has_django
from djqueue.core.job import Batch, EnqueueResult, Incident
from djqueue.signals import job_cancelled, job_dead, job_enqueued, job_stalled, schedule_fired
from djqueue.storage.base import Storage

from .registered import registry

MOST = 10_000
"""Signals that wait: a worker that has so many claims nothing more until its receivers have caught up."""
IDLE = 10.0
"""Seconds after which the thread ends, with its database connections."""


# Producers.


def enqueued(storage: Storage, batch: Batch, answers: Sequence[EnqueueResult]) -> None:
    """Send `job_enqueued` for the jobs that are new, when the transaction commits if they are part of one."""
    new = _new(answers)
    alias = storage.capabilities.transactions.alias_for(batch) if new else None
    if alias is None:
        _send_enqueued(batch, new)
    else:
        transaction.on_commit(partial(_send_enqueued, batch, new), using=alias, robust=True)


async def aenqueued(storage: Storage, batch: Batch, answers: Sequence[EnqueueResult]) -> None:
    """See `enqueued`."""
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


# Everything else.


class Announcer:
    """Sends signals one after the other, in the order in which things happened."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """With nothing to tell, and no thread; after a fork, what the parent had of both is its own."""
        self._waiting: SimpleQueue[Callable[[], object] | Event] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None

    @property
    def is_behind(self) -> bool:
        """Whether receivers are so slow that no more is to be begun."""
        return self._waiting.qsize() >= MOST

    def announce(self, signal: Signal, name: str, **about: Any) -> None:
        """Have a signal sent. From any thread; a receiver's code never runs on that."""
        self._put(partial(signal.send_robust, sender=registry.find(name), name=name, **about))

    def flush(self, timeout: float) -> bool:
        """Wait, up to `timeout` seconds, until all that was announced has been sent; whether it was."""
        done = Event()
        with self._lock:
            if self._thread is None:
                return True
            self._waiting.put(done)
        return done.wait(timeout)

    def _put(self, send: Callable[[], object]) -> None:
        with self._lock:
            self._waiting.put(send)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="djqueue-signals", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                found = self._waiting.get(timeout=IDLE)
            except Empty:
                found = None
            if found is None or isinstance(found, Event):
                if self._ends(found):
                    return
                continue
            if has_django():
                close_old_connections()
            found()

    def _ends(self, done: Event | None) -> bool:
        """Let the connections go, and the thread if nothing waits: the next signal starts another."""
        if has_django():
            connections.close_all()
        with self._lock:
            is_over = self._waiting.empty()
            if is_over:
                self._thread = None
        if done is not None:
            done.set()
        return is_over


announcer = Announcer()
"""The one of this process."""
os.register_at_fork(after_in_child=announcer.begin_anew)


def told(incidents: Sequence[Incident]) -> None:
    """What a storage calls with what it has done to jobs by itself, or because somebody cancelled them."""
    for incident in incidents:
        signal, words = OF_INCIDENTS[incident.event]
        if signal.receivers:
            about = {word: getattr(incident, field) for word, field in words.items()}
            announcer.announce(signal, incident.name, queue=incident.queue, job_id=incident.id, **about)


OF_INCIDENTS: dict[str, tuple[Signal, dict[str, str]]] = {
    "stalled": (job_stalled, {}),
    "failed": (job_dead, {"reason": "reason", "error": "error"}),
    "cancelled": (job_cancelled, {"reason": "reason"}),
    "fired": (schedule_fired, {"schedule": "reason"}),
}
"""The signal of each incident, and where the words that it says are found."""
