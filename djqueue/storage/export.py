"""Read a whole storage quickly, or follow its changes, in pages of columns.

An export has parts, for parallel readers. Each page shows one moment, so a job that changes during the export
has the state of the moment when its page was read. A job that exists in one of the requested states from the
first page to the last is returned once. A job that appears, disappears, or enters or leaves these states
meanwhile is returned at most once.

A change feed has the changes of jobs in order, and its readers remember their position: an opaque string for
each stream of the storage. The rows between two positions are always the same, until they expire.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from djqueue.core.errors import StorageError
from djqueue.core.job import JobRecord
from djqueue.core.states import TERMINAL, State

PAGE_BYTES = 1024 * 1024
"""Bytes of payloads or results after which a page ends, and, in Redis, bytes that one call looks at. A larger
value has a page of its own."""
Page = Mapping[str, Sequence[Any]]
"""Lists of values of equal length, by column name: strings, bytes, numbers, tuples of strings, and times in
UTC milliseconds. None means that the column does not apply to a row. Columns that a storage lacks are
omitted."""
T = TypeVar("T")


class CallRetry(Protocol):
    """Makes a call to a storage, perhaps repeatedly, and returns its result."""

    def __call__(self, call: Callable[..., T], /, *args: Any) -> T: ...


def once(call: Callable[..., T], /, *args: Any) -> T:
    """Make a call once."""
    return call(*args)


class ExportFilter(NamedTuple):
    """The rows and columns to read."""

    table: str
    """jobs | results | attempts | dead | cron | bulk; docs/spark-reference.md lists their columns."""
    columns: frozenset[str]
    """Columns that pages must contain; others may be omitted."""
    queues: tuple[str, ...] | None = None
    """Queues; None for all."""
    states: frozenset[State] | None = None
    """States of jobs and results; None for all."""
    since: int | None = None
    """Start of the time range, in UTC milliseconds; see `time` in the tables."""
    until: int | None = None
    """End of the time range, in UTC milliseconds; exclusive."""
    ids: tuple[str, ...] | None = None
    """Ids of jobs; None for all."""
    names: tuple[str, ...] | None = None
    """Names of jobs; None for all."""
    tags: tuple[str, ...] | None = None
    """Tags of jobs and results, of which a job has at least one; None for all jobs."""
    unique_keys: tuple[str, ...] | None = None
    """Unique keys of jobs and results; None for all."""
    subjects: tuple[str, ...] | None = None
    """Subjects of jobs and results; None for all."""

    def has_name(self, name: str | None) -> bool:
        """Return whether jobs with a name are wanted."""
        return self.names is None or name in self.names

    def has_tags(self, tags: Sequence[str]) -> bool:
        """Return whether jobs with these tags are wanted."""
        return self.tags is None or not set(self.tags).isdisjoint(tags)

    def has_time(self, at: int) -> bool:
        """Return whether a time is in the range."""
        return (self.since is None or at >= self.since) and (self.until is None or at < self.until)


class ExportPart(NamedTuple):
    """The rows that one reader reads."""

    place: str
    """The source of the rows; its format, and that of `first` and `last`, depends on the storage."""
    first: int
    last: int
    rows: int
    """Estimated number of rows."""


class Export(ABC):
    """The export of a storage."""

    tables: frozenset[str]
    """Tables that the storage has."""

    @abstractmethod
    def parts(self, wanted: ExportFilter, many: int) -> list[ExportPart]:
        """Divide the rows into about `many` parts of similar size."""

    @abstractmethod
    def pages(
        self, wanted: ExportFilter, part: ExportPart, size: int, retry: CallRetry = once
    ) -> Iterator[Page]:
        """Return a part in pages of at most about `size` rows and `PAGE_BYTES`. A page may be empty.

        Args:
            wanted: The rows and columns.
            part: The part.
            size: Maximum number of rows in a page.
            retry: Makes each call to the storage. A call may be repeated: its rows are returned once.
        """


def error_columns(record: JobRecord) -> tuple[str | None, str | None]:
    """Return type and message of a job's last error."""
    return (None, None) if record.error is None else (record.error.type, record.error.message)


JOB_COLUMNS = (
    "queue",
    "id",
    "name",
    "state",
    "priority",
    "attempts",
    "failures",
    "stalls",
    "enqueued_at",
    "run_at",
    "started_at",
    "finished_at",
    "concurrency_key",
    "unique_key",
    "subject",
    "tags",
    "headers",
    "worker",
    "reason",
    "error_type",
    "error_message",
    "content_type",
)
"""Columns of jobs; `payload` may follow them."""
DEAD_COLUMNS = (
    "queue",
    "id",
    "name",
    "reason",
    "died_at",
    "expires_at",
    "attempts",
    "retries",
    "next_retry_at",
    "error_type",
    "error_message",
)
RESULT_COLUMNS = (
    "queue",
    "id",
    "name",
    "state",
    "finished_at",
    "result",
    "content_type",
    "reason",
    "error_type",
    "error_message",
    "unique_key",
    "subject",
    "tags",
)
ATTEMPT_COLUMNS = (
    "queue",
    "id",
    "name",
    "number",
    "started_at",
    "finished_at",
    "wait_seconds",
    "run_seconds",
    "outcome",
    "error_type",
    "error_message",
    "worker",
)


def result_rows(record: JobRecord) -> Iterator[tuple[Any, ...]]:
    """Yield the result of a job as `RESULT_COLUMNS`, if the job has ended."""
    if record.state in TERMINAL:
        yield (
            record.queue,
            record.id,
            record.name,
            record.state.value,
            record.finished_at,
            record.result,
            record.options.content_type,
            record.reason or None,
            *error_columns(record),
            record.options.unique_key,
            record.options.subject,
            record.options.tags,
        )


def attempt_rows(record: JobRecord) -> Iterator[tuple[Any, ...]]:
    """Yield a job's ended attempts as `ATTEMPT_COLUMNS`."""
    for attempt in record.all_attempts():
        is_last = record.state in TERMINAL and attempt.started_at == record.started_at
        due_at = max(record.created_at, record.run_at)
        error = (None, None) if attempt.error is None else attempt.error[:2]
        yield (
            record.queue,
            record.id,
            record.name,
            attempt.attempt,
            attempt.started_at,
            attempt.finished_at,
            seconds(due_at, attempt.started_at) if is_last else None,
            seconds(attempt.started_at, attempt.finished_at),
            attempt.outcome,
            *error,
            attempt.worker,
        )


def seconds(start: int, end: int) -> float:
    """Return the seconds between two times in milliseconds; 0 if skewed clocks reverse them."""
    return max(0, end - start) / 1_000


def page_of(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Page:
    """Transpose rows to columns."""
    found = list(rows)
    turned = zip(*found, strict=True) if found else [()] * len(columns)
    return dict(zip(columns, turned, strict=True))


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
    def read(
        self, stretch: FeedRange, size: int, *, complete: bool, retry: CallRetry = once
    ) -> Iterator[Page]:
        """Return the rows of a range, in pages of about `size` rows.

        Args:
            stretch: The range.
            size: Approximate number of rows in a page.
            complete: Whether to raise EventsLostError if some rows have expired; otherwise, they are skipped.
            retry: Makes each call to the storage. A call may be repeated: its rows are returned once.
        """
