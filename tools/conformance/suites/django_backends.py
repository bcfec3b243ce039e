"""`DjqueueBackend` in the places of Django's two backends, with the methods that Django's tests need."""

from collections.abc import Mapping, Sequence
from typing import Any

from djqueue.client.storages import forget_test_jobs
from djqueue.contrib.tasks import DjqueueBackend
from djqueue.testing.draining import drain


class DummyBackend(DjqueueBackend):
    """A backend whose tasks wait, and that lists the results of all tasks that were enqueued."""

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        self.results: list[Any] = []

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = super().enqueue(task, args, kwargs)
        self.results.append(result)
        return result

    def clear(self) -> None:
        self.results.clear()
        forget_test_jobs()


class ImmediateBackend(DjqueueBackend):
    """A backend whose tasks a worker has run when `enqueue` returns."""

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = super().enqueue(task, args, kwargs)
        drain()
        return super().get_result(result.id)
