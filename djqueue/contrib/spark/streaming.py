"""Read job events as a stream, on the driver and in tasks, without depending on Spark."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING

from djqueue.core.errors import OptionError
from djqueue.storage.base import Storage
from djqueue.storage.feed import Feed, FeedRange, Places

from .locations import storage_at
from .read_options import EARLIEST, ReadOptions
from .reading import batch_of

if TYPE_CHECKING:
    from pyarrow import RecordBatch


class JobEventStream:
    """One stream of events, created and checked on the driver and copied to tasks."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.columns = options.schema()
        self._target: Places | None = None
        """End of a stream with the trigger `availableNow`."""

    def storage(self) -> Storage:
        """Return a new storage, which the caller must close."""
        return storage_at(self.options.url, self.options.prefix)

    def start(self) -> dict[str, str]:
        """Return the offsets where a new stream starts."""
        with closing(self.storage()) as storage:
            storage.connect()
            feed = feed_of(storage)
            is_early = self.options.starting == EARLIEST
            return dict((feed.first if is_early else feed.last)(self.options.queues))

    def stop_at_current_end(self) -> None:
        """Ignore events that happen from now on."""
        self._target = self._last()

    def next_end(self, start: Mapping[str, str], limit: int | None) -> dict[str, str]:
        """Return the offsets where the next batch ends, after at most `limit` rows."""
        until = self._last() if self._target is None else self._target
        if limit is None:
            return {**start, **until}
        with closing(self.storage()) as storage:
            return dict(feed_of(storage).ahead(start, until, limit))

    def latest(self) -> dict[str, str]:
        """Return the offsets after the latest events."""
        return dict(self._last())

    def _last(self) -> Places:
        with closing(self.storage()) as storage:
            return feed_of(storage).last(self.options.queues)

    def ranges(self, start: Mapping[str, str], end: Mapping[str, str]) -> list[FeedRange]:
        """Return the range that each task reads, one for each queue."""
        return [
            FeedRange(stream, start.get(stream, ""), position)
            for stream, position in sorted(end.items())
            if start.get(stream) != position
        ]

    def run_task(self, part: FeedRange) -> "Iterator[RecordBatch]":
        """Return the rows of a range. Raises EventsLostError if some have expired."""
        complete, size = self.options.fail_on_data_loss, self.options.batch_size
        with closing(self.storage()) as storage:
            for page in feed_of(storage).read(part, size, complete=complete):
                yield batch_of(self.columns, page)


def feed_of(storage: Storage) -> Feed:
    """Return the events of a storage. Raises OptionError if it stores none."""
    if storage.capabilities.feed is None:
        raise OptionError(
            f"table: {storage.describe()} stores no events: read the tables attempts and jobs instead"
        )
    return storage.capabilities.feed
