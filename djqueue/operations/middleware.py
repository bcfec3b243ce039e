"""Jobs of schedules on their way through the middleware."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from djqueue.core.job import Batch, EnqueueResult
from djqueue.middleware import Layer, through


class EnqueuedBatch(NamedTuple):
    """What the storage has taken of a batch."""

    answers: list[tuple[Batch, EnqueueResult]]
    """With the batch that it was given, in order."""
    error: Exception | None
    """What the middleware raised."""


def passed(
    layers: Iterable[Layer], batch: Batch, enqueue: Callable[[Batch], list[EnqueueResult]]
) -> EnqueuedBatch:
    """Have a batch go through the middleware to the storage.

    What the middleware answers is not asked for: what counts is what the storage has. Raises what `enqueue`
    raises, whatever the middleware makes of it.
    """
    answers: list[tuple[Batch, EnqueueResult]] = []
    failures: list[Exception] = []

    def take(given: Batch) -> list[EnqueueResult]:
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
