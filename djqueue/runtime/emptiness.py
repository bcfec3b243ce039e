"""Whether there is nothing left to do: what ends a worker that runs until its queues are empty."""

from djqueue.core.states import State
from djqueue.storage.base import Storage

SOON = 60_000
"""Milliseconds: a job that is due by then is waited for."""


def is_empty(storage: Storage, queues: tuple[str, ...] | None, names: frozenset[str]) -> bool:
    """Whether no job of these queues (None: of all) waits for one of the names, and none is active.

    An active job, whoever runs it, may come back or bring others. What a pause holds back does not
    count: it could wait for ever. Delayed jobs are the claims' business, which say when one is due.
    """
    for queue in storage.queues.names() if queues is None else queues:
        if not storage.queues.is_paused(queue) and not names.isdisjoint(storage.reads.waiting_names(queue)):
            return False
        if storage.reads.counts(queue)[State.ACTIVE]:
            return False
    return True
