"""Reading a storage as a whole: in parts that processes of their own read, and in pages of columns, quickly.

A page is a look at one moment, several pages are several: a job that changes meanwhile is in the state of
the moment at which its page was read. A job that is there from the first to the last page, in one of the
states that are asked for, is told once; one that comes or goes meanwhile, or whose state is asked for only
for a part of that time, once or not at all.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from djqueue.core.job import JobRecord
from djqueue.core.states import TERMINAL, State

Page = Mapping[str, Sequence[Any]]
"""Values by the names of columns, each as long as the others: texts, bytes, numbers, tuples of texts, and
times in UTC milliseconds. None is what does not concern a row; a column that a storage does not know is left
out."""


class ExportFilter(NamedTuple):
    """What is to be read."""

    table: str
    """jobs | results | attempts | dead | cron | bulk: for their columns, see docs/spark.md."""
    columns: frozenset[str]
    """What may be left out of a page is left out, unless it is one of these."""
    queues: tuple[str, ...] | None = None
    """None: of all."""
    states: frozenset[State] | None = None
    """Of jobs and results; None: all."""
    since: int | None = None
    """UTC milliseconds: rows whose time is not before that; see `time` in the tables."""
    until: int | None = None
    """UTC milliseconds: rows whose time is before that."""

    def has_time(self, at: int) -> bool:
        """Whether a row of this time is wanted."""
        return (self.since is None or at >= self.since) and (self.until is None or at < self.until)


class ExportPart(NamedTuple):
    """What one process reads."""

    place: str
    """What it is a part of, in the storage's own words, as the next two."""
    first: int
    last: int
    rows: int
    """About how many rows there are."""


class Export(ABC):
    """What a storage offers that can be read as a whole."""

    tables: frozenset[str]
    """The tables that it has."""

    @abstractmethod
    def parts(self, wanted: ExportFilter, many: int) -> list[ExportPart]:
        """All that is wanted, in about so many parts that take about as long."""

    @abstractmethod
    def pages(self, wanted: ExportFilter, part: ExportPart, size: int) -> Iterator[Page]:
        """A part, in pages of about `size` rows at most; a page may be empty."""


def error_columns(record: JobRecord) -> tuple[str | None, str | None]:
    """Type and message of a job's last error."""
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
    "group",
    "unique_key",
    "subject",
    "tags",
    "worker",
    "reason",
    "error_type",
    "error_message",
    "content_type",
)
"""And, behind them, `payload`."""
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
    """What came of a job, as `RESULT_COLUMNS`; nothing if it has not ended."""
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
        )


def attempt_rows(record: JobRecord) -> Iterator[tuple[Any, ...]]:
    """A job's ended runs, as `ATTEMPT_COLUMNS`."""
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
    """From one time to another in milliseconds, by clocks that may differ a little."""
    return max(0, end - start) / 1_000


def page_of(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Page:
    """Rows as columns."""
    found = list(rows)
    turned = zip(*found, strict=True) if found else [()] * len(columns)
    return dict(zip(columns, turned, strict=True))
