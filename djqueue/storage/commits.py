"""Jobs that were enqueued in an open transaction, known for as long as it is open."""

from collections.abc import Callable, Sequence

from django.db import connections, transaction

from djqueue.core.job import EnqueueResult


class AfterCommit:
    """A callback for after the commit. Django drops it when the transaction, or its savepoint, rolls back."""

    def __init__(self, results: Sequence[EnqueueResult], then: Callable[[], object] | None) -> None:
        self._results = results
        self._then = then
        self.__qualname__ = type(self).__qualname__  # Django logs it if the callback fails.

    def __call__(self) -> None:
        """Call what was to follow the commit."""
        if self._then is not None:
            self._then()

    def has(self, queue: str, id: str) -> bool:
        """Whether the job is one of those."""
        return any(result.id == id and result.queue == queue for result in self._results)


def note(alias: str, results: Sequence[EnqueueResult], then: Callable[[], object] | None = None) -> None:
    """Remember jobs until the current transaction ends, and call `then` after its commit."""
    # What goes wrong with the callback is no failure of the enqueue, which is committed by then.
    transaction.on_commit(AfterCommit(results, then), using=alias, robust=True)


def has_uncommitted(alias: str, queue: str, id: str) -> bool:
    """Whether the caller enqueued the job in a transaction of this database that is still open."""
    connection = connections[alias]
    if not connection.in_atomic_block:
        return False
    callbacks = (entry[1] for entry in connection.run_on_commit)
    return any(isinstance(callback, AfterCommit) and callback.has(queue, id) for callback in callbacks)
