"""The capacity of a queue, and the order in which jobs are dropped above it."""

import heapq
from collections.abc import Callable
from itertools import count

from .enginejob import EngineJob
from .errors import QueueFullError
from .states import PENDING

WHEN_FULL = ("reject", "block", "drop_oldest", "drop_lowest")
DROPPED = "dropped"
"""Reason of a cancelled job that was dropped for a new one."""
COMPACT_FROM = 64


def full_error(queue: str, limit: int | None, count: int) -> QueueFullError:
    """Return the error for jobs that the queue has no room for."""
    return QueueFullError(
        f"queue {queue!r} is full: its MAX_SIZE allows {limit} pending jobs, and {count} more do not fit; "
        "none of them was enqueued"
    )


class DropOrder:
    """Pending jobs of one queue that have never run, in the order in which they are dropped.

    The oldest is dropped first, or the oldest of those with the lowest priority.

    Args:
        is_there: returns whether a job still has its id.
    """

    __slots__ = ("_by_priority", "_heap", "_is_there", "_numbers")

    def __init__(self, is_there: Callable[[EngineJob], bool], *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._is_there = is_there
        self._heap: list[tuple[int, int, int, EngineJob]] = []
        self._numbers = count()

    def push(self, job: EngineJob, pending: int) -> None:
        """Add a job, or one whose priority has changed; `pending` is the number of pending jobs."""
        if len(self._heap) > COMPACT_FROM + 2 * pending:
            # Jobs that have started, or are gone, leave stale entries behind.
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, self._entry(job))

    def first(self, priority: int) -> EngineJob | None:
        """Return the job to drop for a new one with this priority; None if none may be dropped."""
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._heap or (self._by_priority and self._heap[0][0] > priority):
            return None
        return self._heap[0][3]

    def _entry(self, job: EngineJob) -> tuple[int, int, int, EngineJob]:
        rank = job.options.priority if self._by_priority else 0
        return rank, job.created_at, next(self._numbers), job

    def _counts(self, entry: tuple[int, int, int, EngineJob]) -> bool:
        job = entry[3]
        is_current = not self._by_priority or entry[0] == job.options.priority
        return is_current and job.state in PENDING and not job.started_at and self._is_there(job)

    def __len__(self) -> int:
        return len(self._heap)
