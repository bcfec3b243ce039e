"""Pass the jobs of schedules through the middleware."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from djqueue.client import envelope
from djqueue.core.job import Batch, EnqueueResult
from djqueue.middleware import Layer, through


class EnqueuedBatch(NamedTuple):
    """The storage's answers to a batch."""

    answers: list[tuple[Batch, EnqueueResult]]
    """Each with its batch, in order."""
    error: Exception | None
    """The exception that the middleware raised."""


def passed(
    layers: Iterable[Layer], batch: Batch, enqueue: Callable[[Batch], list[EnqueueResult]]
) -> EnqueuedBatch:
    """Enqueue a batch through the middleware.

    The storage's answers count, not those of the middleware. Raises the errors of `enqueue`, even if the
    middleware handles them.
    """
    answers: list[tuple[Batch, EnqueueResult]] = []
    failures: list[Exception] = []

    def take(given: Batch) -> list[EnqueueResult]:
        if given.options is not batch.options:
            envelope.check_size(given.options, given.name, given.payloads)
        try:
            found = enqueue(given)
        except Exception as error:
            failures.append(error)
            raise
        answers.extend((given, answer) for answer in found)
        return found

    raised = None
    try:
        through(layers, take)(batch)
    except Exception as error:
        raised = error
    if failures:
        raise failures[0] from raised if raised is not failures[0] else None
    return EnqueuedBatch(answers, raised)
