"""Rows that differ in their payloads alone, as most do: many at a time."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import DjqueueError
from djqueue.core.job import Batch

from .columns import rows_of
from .rows import Chunk, JobColumns, Rows, States


def reader(
    plan: JobColumns, size: int, is_keyed: Callable[[str], bool], states: States | None = None
) -> Rows:
    """What reads the rows of a plan: see `Rows`."""
    queue = plan.options.queue
    are_alike = queue and plan.options.job and plan.id_column is None and not plan.per_row
    if are_alike and (plan.base.job.group is not None or not is_keyed(queue or "")):
        return AlikeRows(plan, size, is_keyed=is_keyed)
    return Rows(plan, size, is_keyed=is_keyed, states=states)


class AlikeRows(Rows):
    """Jobs of one queue and name, with the same options and new ids."""

    def chunks(self, batches: Iterable[Any]) -> Iterator[Chunk]:
        """See `Rows`."""
        payloads: list[bytes] = []
        for batch in batches:
            for first in range(0, batch.num_rows, self._size):
                part = batch.slice(first, self._size)
                try:
                    found = self._payloads(part)
                except DjqueueError:  # which row it is, and what becomes of it, is found one by one
                    if payloads:
                        yield self._alike(payloads)
                        payloads = []
                    yield from super().chunks([part])
                    continue
                self.read += len(found)
                payloads += found
                if len(payloads) >= self._size:
                    yield self._alike(payloads[: self._size])
                    payloads = payloads[self._size :]
        if payloads:
            yield self._alike(payloads)

    def _payloads(self, part: Any) -> list[bytes]:
        return list(map(self._payload, rows_of(part)))

    def _alike(self, payloads: list[bytes]) -> Chunk:
        queue, name, options = self._plan.options.queue, self._plan.options.job, self._plan.base
        assert queue is not None
        assert name is not None
        ids = self._ids.many(len(payloads), SYSTEM_CLOCK.now())
        batch = Batch(queue, name, options.job, payloads, ids, options.delay, options.run_at, True)
        return Chunk(queue, name, [batch], len(payloads))
