"""Reports of bulk writes: what came of each, and how far it is, for people and for whoever goes on.

A report is written by the one that publishes, each time as a whole, and only over the one that it had seen:
of two who go on with the same write neither takes anything back that the other has reported. Saying something
again changes nothing. Of the reports the last 1,000 are kept, for 30 days.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from djqueue.core.clock import Clock

PUBLISHING, DONE, FAILED, UNFINISHED = "publishing", "done", "failed", "unfinished"
MOST = 1_000
"""Reports that are kept."""
AGE = 30 * 86_400_000
"""Milliseconds for which a report is kept after its last change."""
SILENCE = 900_000
"""Milliseconds after which nobody is thought to publish any more where nothing was reported."""
ERROR = 1_000
"""Characters of an error that are kept."""


class QueueShare(NamedTuple):
    """What a write brings to one queue."""

    chunks: int = 0
    published: int = 0
    """Of those chunks."""
    inserted: int = 0
    duplicates: int = 0
    """Rows whose jobs were there, or had completed."""
    ended: bool = False
    letters: int = 0
    """Rows that are dead letters."""

    def __add__(self, other: "QueueShare") -> "QueueShare":  # type: ignore[override]
        return QueueShare(
            self.chunks + other.chunks,
            self.published + other.published,
            self.inserted + other.inserted,
            self.duplicates + other.duplicates,
            other.ended,
            self.letters + other.letters,
        )


class BulkWriteReport(NamedTuple):
    """The report of a write, or of all writes of a streaming query: `rows` is the sum of `inserted`,
    `duplicates` and `rejected`.
    """

    write: str
    """Its name; each of its jobs has the tag `import:` and this."""
    app: str
    version: int
    """Of a streaming query: that of its last batch."""
    started_at: int
    """UTC milliseconds, like all times."""
    state: str = PUBLISHING
    """publishing | done | failed: nothing was published | unfinished: its publisher has died or given up; the
    next write of the same app goes on with it."""
    shares: Mapping[str, QueueShare] = {}
    """By queue."""
    names: tuple[str, ...] = ()
    """Of the jobs."""
    rows: int = 0
    rejected: Mapping[str, int] = {}
    """Rows that are no jobs, by reason."""
    parts: int = 0
    """Tasks that have put something aside, or enqueued it."""
    operation: str = "enqueue"
    """enqueue | retry | cancel | delete | update: what was done with the rows."""
    answers: Mapping[str, int] = {}
    """What became of jobs that were there, in the words of the storage."""
    skipped: bool = False
    """Whether its version had been published before, so that nothing was done."""
    resumed: str = ""
    """The write that had begun with this version, and was finished in place of this one: the jobs are its."""
    batches: int = 0
    """Of a streaming query: those that are in the sums; 0: it is none."""
    finished_at: int = 0
    spark: str = ""
    """The id of the Spark application."""
    user: str = ""
    """Whose it was."""
    error: str = ""
    updated_at: int = 0
    revision: int = 0
    """How often it was written."""

    @property
    def queues(self) -> tuple[str, ...]:
        """Those that it has jobs for."""
        return tuple(sorted(self.shares))

    @property
    def total(self) -> QueueShare:
        """What it brings to all queues."""
        return sum(self.shares.values(), QueueShare())

    @property
    def inserted(self) -> int:
        """New jobs, so far."""
        return self.total.inserted

    @property
    def duplicates(self) -> int:
        """Rows whose jobs were there, or had completed, so far."""
        return self.total.duplicates

    @property
    def tag(self) -> str:
        """What each of its jobs is tagged with."""
        return tag_of(self.write)

    def state_at(self, now: int) -> str:
        """The state, in which one of that nothing was heard for long is unfinished."""
        return UNFINISHED if self.state == PUBLISHING and self.updated_at + SILENCE < now else self.state

    def as_json(self) -> dict[str, Any]:
        """For a storage."""
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
        """From `as_json`; one of another version of this package may have said more."""
        known = {name: value for name, value in stored.items() if name in cls._fields}
        known["shares"] = {queue: QueueShare(*share) for queue, share in stored["shares"].items()}
        known["names"] = tuple(stored["names"])
        return cls(**known)


class BulkWriteReportPage(NamedTuple):
    """Some reports."""

    imports: list[BulkWriteReport]
    next: str | None
    """The write behind which the next ones come; None: these were the last."""


class BulkWriteReports(ABC):
    """Where a storage keeps reports.

    clock: whose time is noted.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def keep(self, report: BulkWriteReport) -> BulkWriteReport:
        """Note how a write stands now; answers what is known of it then.

        One that is done stays so, but for a streaming query's. What was said of a queue is not taken back.
        """
        while True:
            there = self.get(report.write)
            if there is not None and _is_final(there, report):
                return there
            found = report._replace(error=_short(report.error), revision=0, updated_at=self._clock.now())
            if there is not None:
                found = _further(there, found)
            if self._swap(found):
                return found._replace(revision=found.revision + 1)

    def add(self, report: BulkWriteReport) -> BulkWriteReport:
        """Note a batch of a streaming query, whose sums are kept; answers them.

        A version that was noted, or an earlier one, is in them already, and changes nothing.
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
        """The report of a write; None if there is none, or no more."""

    @abstractmethod
    def page(self, limit: int, after: str | None = None) -> BulkWriteReportPage:
        """Reports, the one that was changed last first.

        after: the write behind which they come: the `next` of the page before.
        """

    @abstractmethod
    def _swap(self, report: BulkWriteReport) -> bool:
        """Keep a report in place of the one of its revision, as the next one; of revision 0: as the first.

        Returns False if that one is there no more. Sees to it that there are not too many.
        """


def tag_of(write: str) -> str:
    """What the jobs of a write are tagged with."""
    return f"import:{write}"


def _is_final(there: BulkWriteReport, report: BulkWriteReport) -> bool:
    """Whether nothing that a report says is newer."""
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
    """An error in one line; no database keeps a text with a NUL in it."""
    return " ".join(error.replace("\0", " ").split())[:ERROR]
