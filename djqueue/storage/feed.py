"""What has happened to jobs, to be read once and in order by somebody who remembers a place in it.

A place is a text in the storage's own words, one for each of its streams. Between two places there are the
same rows whenever they are read, as long as they are kept.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from djqueue.core.errors import StorageError

from .export import Page

Places = Mapping[str, str]
"""A place by the stream's name."""


class EventsLostError(StorageError):
    """Events that were to be read are not kept any more."""


class FeedRange(NamedTuple):
    """What one process reads: what is behind `start`, up to `end`."""

    stream: str
    start: str
    """"": its beginning."""
    end: str


class Feed(ABC):
    """What a storage offers that can be followed."""

    @abstractmethod
    def first(self, queues: tuple[str, ...] | None) -> Places:
        """The places before what is kept of these queues (None: of all)."""

    @abstractmethod
    def last(self, queues: tuple[str, ...] | None) -> Places:
        """The places behind all that has happened until now."""

    @abstractmethod
    def ahead(self, places: Places, until: Places, most: int) -> Places:
        """The places up to `until` behind which there are at most so many rows, shared among the streams; at
        least one row, if there is one.

        A stream that `places` does not name is read from its beginning.
        """

    @abstractmethod
    def read(self, stretch: FeedRange, size: int, *, complete: bool) -> Iterator[Page]:
        """The rows of a stretch, in pages of about so many.

        complete: whether to raise EventsLostError if some are not kept any more; else the others come.
        """
