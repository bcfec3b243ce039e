"""Results of tasks that were enqueued in a transaction that is still open."""

from collections.abc import Callable
from typing import Any

from django.db import connections, transaction

from .compat import AnyTaskResult


class PendingResult:
    """An on-commit callback with a result.

    Django drops it when the transaction or its savepoint rolls back.
    """

    def __init__(self, result: AnyTaskResult, then: Callable[[], Any] | None) -> None:
        self.result = result
        self._then = then
        self.__qualname__ = type(self).__qualname__  # Django logs it if the callback fails.

    def __call__(self) -> None:
        """Call the function registered for the commit."""
        if self._then is not None:
            self._then()


def add_pending(alias: str, result: AnyTaskResult, then: Callable[[], Any] | None = None) -> None:
    """Keep a result until the open transaction of a database ends, and call `then` after its commit."""
    # Without `then`, the job joins the transaction, and nothing can fail after the commit.
    transaction.on_commit(PendingResult(result, then), using=alias)


def find_pending(id: str) -> AnyTaskResult | None:
    """Return a result that this thread has enqueued in a transaction that is still open."""
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:
            for entry in connection.run_on_commit:
                if isinstance(entry[1], PendingResult) and entry[1].result.id == id:
                    return entry[1].result
    return None
