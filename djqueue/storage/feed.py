"""Read the changes of jobs in order, as a change feed whose readers remember their position.

A position is an opaque string, one for each stream of the storage. The rows between two positions are always
the same, until they expire.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from djqueue.core.errors import StorageError

from .export import Page

Places = Mapping[str, str]
"""Positions by stream name."""


class EventsLostError(StorageError):
    """Events expired before they were read."""


class FeedRange(NamedTuple):
    """The events after `start`, up to and including `end`."""

    stream: str
    start: str
    """The empty string is the beginning of the stream."""
    end: str


class Feed(ABC):
    """The change feed of a storage."""

    @abstractmethod
    def first(self, queues: tuple[str, ...] | None) -> Places:
        """Return the positions before the oldest stored events of these queues, or of all queues if None."""

    @abstractmethod
    def last(self, queues: tuple[str, ...] | None) -> Places:
        """Return the positions after the latest events."""

    @abstractmethod
    def ahead(self, places: Places, until: Places, limit: int) -> Places:
        """Return positions between `places` and `until` with at most `limit` rows, shared among the streams.

        They advance by at least one row, if there is one. A stream missing from `places` starts at its
        beginning.
        """

    @abstractmethod
    def read(self, stretch: FeedRange, size: int, *, complete: bool) -> Iterator[Page]:
        """Return the rows of a range, in pages of about `size` rows.

        Args:
            stretch: The range.
            size: Approximate number of rows in a page.
            complete: Whether to raise EventsLostError if some rows have expired; otherwise, they are skipped.
        """
