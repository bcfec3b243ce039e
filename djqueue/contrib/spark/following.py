"""What a stream of events does, on the driver and in its tasks: plain Python, without Spark."""

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


class Following:
    """One stream. Made, and checked, on the driver; its copies work in tasks."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.columns = options.schema()
        self._target: Places | None = None
        """Where a stream ends that reads what is there at its start."""

    def storage(self) -> Storage:
        """For the caller, who closes it."""
        return storage_at(self.options.url, self.options.prefix)

    def begin(self) -> dict[str, str]:
        """Where a stream starts that is started for the first time."""
        with closing(self.storage()) as storage:
            storage.connect()
            feed = feed_of(storage)
            is_early = self.options.starting == EARLIEST
            return dict((feed.first if is_early else feed.last)(self.options.queues))

    def stop_here(self) -> None:
        """Read nothing that comes later than now."""
        self._target = self._last()

    def ahead(self, start: Mapping[str, str], most: int | None) -> dict[str, str]:
        """Up to where the next batch goes. most: rows; None: as many as there are."""
        until = self._last() if self._target is None else self._target
        if most is None:
            return {**start, **until}
        with closing(self.storage()) as storage:
            return dict(feed_of(storage).ahead(start, until, most))

    def latest(self) -> dict[str, str]:
        """Behind all that has happened until now."""
        return dict(self._last())

    def _last(self) -> Places:
        with closing(self.storage()) as storage:
            return feed_of(storage).last(self.options.queues)

    def stretches(self, start: Mapping[str, str], end: Mapping[str, str]) -> list[FeedRange]:
        """What each task reads: one stream."""
        return [
            FeedRange(stream, start.get(stream, ""), place)
            for stream, place in sorted(end.items())
            if start.get(stream) != place
        ]

    def run_task(self, stretch: FeedRange) -> "Iterator[RecordBatch]":
        """The rows of a stretch. Raises EventsLostError if some are gone, unless that is accepted."""
        complete, size = self.options.fail_on_data_loss, self.options.batch_size
        with closing(self.storage()) as storage:
            for page in feed_of(storage).read(stretch, size, complete=complete):
                yield batch_of(self.columns, page)


def feed_of(storage: Storage) -> Feed:
    """What happens in a storage. Raises OptionError if that is not kept."""
    if storage.capabilities.feed is None:
        raise OptionError(
            f"table: {storage.describe()} stores no events; read its tables attempts and jobs instead"
        )
    return storage.capabilities.feed
