"""Totals of one queue of the engine."""

from .overview import NO_TOTALS, Totals


class Tally:
    """Counters for `Totals`, guarded by the lock of the queue's shard.

    Completions are counted by the finished records, because a plain job completes without that lock.
    """

    __slots__ = ("cancelled", "enqueued", "failed", "noted", "retried", "stalled", "started")

    def __init__(self) -> None:
        self.enqueued = 0
        self.started = 0
        self.retried = 0
        self.failed = 0
        self.cancelled = 0
        self.stalled = 0
        self.noted = NO_TOTALS
        """Totals that the metrics have."""

    def totals(self, completed: int) -> Totals:
        """Return the current totals."""
        return Totals(
            self.enqueued,
            self.started,
            completed,
            self.retried,
            self.failed,
            self.cancelled,
            self.stalled,
        )
