"""What has happened in one queue of the engine, as numbers that only rise."""

from .overview import NO_TOTALS, Totals


class Tally:
    """See `Totals`. Its shard's lock guards it; completions are counted by the finished records, as a plain
    job completes without that lock.
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
        """What metrics have been told of."""

    def totals(self, completed: int) -> Totals:
        """As they are now."""
        return Totals(
            self.enqueued,
            self.started,
            completed,
            self.retried,
            self.failed,
            self.cancelled,
            self.stalled,
        )
