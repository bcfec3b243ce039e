"""Record the progress and results of bulk writes, for the dashboard and for publishers that resume a write.

The publisher replaces the whole report, and only if it has seen the current revision, so two publishers of
the same write never undo each other's progress. Repeating an update changes nothing. The last 1,000 reports
are kept, for 30 days.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from djqueue.core.clock import Clock

PUBLISHING, DONE, FAILED, UNFINISHED = "publishing", "done", "failed", "unfinished"
MAX_REPORTS = 1_000
"""Maximum number of reports to keep."""
MAX_REPORT_AGE = 30 * 86_400_000
"""Milliseconds to keep a report after its last change."""
DEAD_PUBLISHER_AFTER = 900_000
"""Milliseconds without an update after which a publisher is considered dead."""
TAG = "import:"
"""Start of the tag of a write's jobs. It is the last of their tags."""
RUN = ":"
"""Separates the name of a report from that of a run."""
ERROR = 1_000
"""Maximum length of an error, in characters."""


class QueueShare(NamedTuple):
    """A write's results in one queue."""

    chunks: int = 0
    published: int = 0
    """Chunks already published."""
    inserted: int = 0
    duplicates: int = 0
    """Rows whose jobs existed or had completed."""
    ended: bool = False
    dead_letters: int = 0
    """Rows that became dead letters."""

    def __add__(self, other: "QueueShare") -> "QueueShare":  # type: ignore[override]
        return QueueShare(
            self.chunks + other.chunks,
            self.published + other.published,
            self.inserted + other.inserted,
            self.duplicates + other.duplicates,
            other.ended,
            self.dead_letters + other.dead_letters,
        )


class BulkWriteReport(NamedTuple):
    """The report of a write, or of all batches of a streaming query.

    `rows` is the sum of `inserted`, `duplicates` and `rejected`.
    """

    write: str
    """The write's name. Its jobs have the tag `import:` followed by this name."""
    app: str
    version: int
    """The version; for a streaming query, that of the last batch."""
    started_at: int
    """Start time in UTC milliseconds, like all times."""
    state: str = PUBLISHING
    """publishing | done | failed: nothing was published | unfinished: the publisher died or gave up; the next
    write of the same app resumes it."""
    shares: Mapping[str, QueueShare] = {}
    """Results by queue."""
    names: tuple[str, ...] = ()
    """Names of the jobs."""
    rows: int = 0
    rejected: Mapping[str, int] = {}
    """Invalid rows, by reason."""
    parts: int = 0
    """Tasks that staged or changed jobs."""
    operation: str = "enqueue"
    """The operation: enqueue | retry | cancel | delete | update."""
    answers: Mapping[str, int] = {}
    """Results of changes to existing jobs, as the storage returns them."""
    skipped: bool = False
    """Whether this version had already been published, so that nothing was done."""
    resumed: str = ""
    """An earlier write of this version, which was finished instead and whose tag the jobs have."""
    batches: int = 0
    """Batches in the totals of a streaming query; 0 for other writes."""
    finished_at: int = 0
    spark: str = ""
    """The id of the Spark application."""
    user: str = ""
    """The user who ran the write."""
    error: str = ""
    updated_at: int = 0
    revision: int = 0
    """Number of times the report was saved."""

    @property
    def queues(self) -> tuple[str, ...]:
        """Queues of the jobs."""
        return tuple(sorted(self.shares))

    @property
    def total(self) -> QueueShare:
        """Totals of all queues."""
        return sum(self.shares.values(), QueueShare())

    @property
    def inserted(self) -> int:
        """Number of new jobs so far."""
        return self.total.inserted

    @property
    def duplicates(self) -> int:
        """Number of rows so far whose jobs existed or had completed."""
        return self.total.duplicates

    @property
    def tag(self) -> str:
        """The tag of the write's jobs."""
        return tag_of(self.write)

    def state_at(self, now: int) -> str:
        """Return the state, which is unfinished if the publisher has been silent for too long."""
        return (
            UNFINISHED
            if self.state == PUBLISHING and self.updated_at + DEAD_PUBLISHER_AFTER < now
            else self.state
        )

    def as_json(self) -> dict[str, Any]:
        """Convert the report to JSON values."""
        shares = {queue: list(share) for queue, share in self.shares.items()}
        return {
            **self._asdict(),
            "shares": shares,
            "names": list(self.names),
            "rejected": dict(self.rejected),
            "answers": dict(self.answers),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "BulkWriteReport":
        """Convert the result of `as_json`, and ignore fields of newer versions of djqueue."""
        known = {name: value for name, value in stored.items() if name in cls._fields}
        known["shares"] = {queue: QueueShare(*share) for queue, share in stored["shares"].items()}
        known["names"] = tuple(stored["names"])
        return cls(**known)


class BulkWriteReportPage(NamedTuple):
    """A page of reports."""

    imports: list[BulkWriteReport]
    next: str | None
    """The write to pass as `after` for the next page; None on the last page."""


class BulkWriteReports(ABC):
    """The bulk write reports of a storage.

    Args:
        clock: The source of times.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def keep(self, report: BulkWriteReport) -> BulkWriteReport:
        """Save a write's progress, and return the merged report.

        A finished write stays finished, except that of a streaming query. Progress in a queue never
        decreases.
        """
        while True:
            there = self.get(report.write)
            if there is not None and _is_final(there, report):
                return there
            now = self._clock.now()
            found = report._replace(error=_short(report.error), revision=0, updated_at=now)
            if found.state == FAILED:
                found = found._replace(finished_at=found.finished_at or now)
            if there is not None:
                found = _further(there, found)
            if self._swap(found):
                return found._replace(revision=found.revision + 1)

    def add(self, report: BulkWriteReport) -> BulkWriteReport:
        """Add a batch to the totals of a streaming query, and return them.

        A version that was already added, or an earlier one, changes nothing.
        """
        while True:
            there = self.get(report.write)
            if there is not None and there.batches and there.version >= report.version:
                return there
            found = report._replace(batches=1, revision=0, updated_at=self._clock.now())
            if there is not None:
                found = _summed(there, found)
            if self._swap(found):
                return found._replace(revision=found.revision + 1)

    @abstractmethod
    def get(self, write: str) -> BulkWriteReport | None:
        """Return the report of a write, or None if it does not exist or has expired."""

    @abstractmethod
    def page(self, limit: int, after: str | None = None) -> BulkWriteReportPage:
        """Return a page of reports, the most recently changed first.

        Args:
            limit: Maximum number of reports.
            after: The `next` of the previous page.
        """

    @abstractmethod
    def _swap(self, report: BulkWriteReport) -> bool:
        """Replace the report of the given revision, or create the report if its revision is 0.

        Deletes the oldest reports if there are too many.

        Returns:
            False if the stored revision is another one.
        """


def run_of(report: str, run: str) -> str:
    """Return the name under which one run of a write stages jobs, if several runs share a report."""
    return f"{report}{RUN}{run}"


def report_of(write: str) -> str:
    """Return the name of the report of a staged write, which may be the result of `run_of`."""
    return write.rpartition(RUN)[0] or write


def tag_of(write: str) -> str:
    """Return the tag of a write's jobs."""
    return f"{TAG}{write}"


def write_of(tags: Sequence[str] | None) -> str | None:
    """Return the write that enqueued a job with these tags; None if none did."""
    own = [tag for tag in tags or () if tag.startswith(TAG)]
    return own[-1].removeprefix(TAG) if own else None


def _is_final(there: BulkWriteReport, report: BulkWriteReport) -> bool:
    """Return whether a report has nothing newer than the stored one."""
    return there.batches > report.batches if there.batches else there.state == DONE


def _further(there: BulkWriteReport, report: BulkWriteReport) -> BulkWriteReport:
    shares = dict(there.shares)
    for queue, share in report.shares.items():
        known = shares.get(queue, QueueShare())
        shares[queue] = max(known, share, key=lambda one: (one.ended, one.published))
    return report._replace(
        started_at=there.started_at,
        shares=shares,
        names=tuple(dict.fromkeys((*there.names, *report.names))),
        spark=report.spark or there.spark,
        user=report.user or there.user,
        revision=there.revision,
    )


def _summed(there: BulkWriteReport, batch: BulkWriteReport) -> BulkWriteReport:
    shares = dict(there.shares)
    for queue, share in batch.shares.items():
        shares[queue] = shares.get(queue, QueueShare()) + share
    return batch._replace(
        started_at=there.started_at,
        shares=shares,
        names=tuple(dict.fromkeys((*there.names, *batch.names))),
        rows=there.rows + batch.rows,
        rejected=dict(Counter(there.rejected) + Counter(batch.rejected)),
        answers=dict(Counter(there.answers) + Counter(batch.answers)),
        parts=there.parts + batch.parts,
        batches=there.batches + 1,
        revision=there.revision,
    )


def _short(error: str) -> str:
    """Shorten an error to one line without NULs, which databases cannot store."""
    return " ".join(error.replace("\0", " ").split())[:ERROR]
