"""Wait for the jobs of a bulk write, at a cost that hardly depends on their number.

All jobs of the write's queues are read to count those of the write. Between two counts, only the states of a
random sample of its unfinished jobs are read. Once the sample has ended, few others are left.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from djqueue.core.errors import OptionError, ResultTimeoutError, StorageError
from djqueue.core.options import JobKey
from djqueue.core.states import TERMINAL
from djqueue.core.suggest import nearest
from djqueue.storage.base import Storage
from djqueue.storage.bulkwrites import DONE, FAILED, BulkWriteReport, BulkWriteReports, tag_of
from djqueue.storage.export import ExportFilter

from .locations import staging_of
from .options import ENQUEUE
from .throttling import StorageRetry

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
"""Seconds between two reads of the report or the sample; in between, a tenth of the time waited so far."""
SAMPLE = 100
"""Maximum number of unfinished jobs whose states are read between two counts."""
CLOCK_SKEW = 3_600_000
"""Milliseconds by which the clocks of the storage and the driver may differ."""
ENDED = frozenset(state.value for state in TERMINAL)
PAGE, RETRIES = 1_000, 5
LISTED = 50
"""Reports of one page."""


@dataclass(frozen=True, kw_only=True)
class WriteOutcome:
    """The jobs of a bulk write by outcome."""

    write: str
    """The write's name."""
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    removed: int = 0
    """Jobs that the storage no longer has: deleted, or ended longer ago than it keeps jobs."""
    unfinished: int = 0
    """Jobs that are waiting, delayed, blocked or active."""

    @property
    def total(self) -> int:
        """The number of jobs."""
        return self.completed + self.failed + self.cancelled + self.removed + self.unfinished

    def __str__(self) -> str:
        """Return a summary in one line."""
        counts = {name: getattr(self, name) for name in OUTCOMES}
        words = [f"{count:,} {name}" for name, count in counts.items() if count]
        return f"{self.write}: {', '.join(words) or 'no jobs'}"


OUTCOMES = ("completed", "failed", "cancelled", "removed", "unfinished")


class WriteTimeoutError(ResultTimeoutError):
    """The jobs of the bulk write did not end while the caller waited, and continue."""

    def __init__(self, message: str, outcome: WriteOutcome) -> None:
        super().__init__(message)
        self.outcome = outcome
        """The jobs by outcome so far."""


class WriteWait:
    """Wait for one bulk write.

    Args:
        storage: The storage.
        write: The `writeId` of the write, or its `txnAppId` for the last version.
        progress: Receives a line about each change.
        clock: Returns the time in seconds.
        sleep: Waits for seconds.

    Raises:
        OptionError: The storage has no such write.
    """

    def __init__(
        self,
        storage: Storage,
        write: str,
        progress: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._storage = storage
        self._progress = progress
        self._clock = clock
        self._sleep = sleep
        self._send = StorageRetry(RETRIES, sleep)
        self._last_line = ""
        self._random = random.Random()
        if storage.capabilities.bulk_writes is None:
            staging_of(storage)  # Raises the error that says what is missing.
            raise OptionError(f"url: {storage.describe()} has no reports of bulk writes")
        self._reports: BulkWriteReports = storage.capabilities.bulk_writes
        self._name = self._found(write).write

    def run(self, timeout: float | None = None) -> WriteOutcome:
        """Return the outcome once all jobs have ended.

        Raises:
            WriteTimeoutError: Some jobs have not ended within `timeout` seconds.
            StorageError: The write failed.
        """
        start = self._clock()
        for outcome in self._outcomes():
            if outcome is not None:
                return outcome
            waited = self._clock() - start
            pause = min(max(waited / 10, FIRST_PAUSE), LONGEST_PAUSE)
            if timeout is not None and waited >= timeout:
                report = self._report()
                outcome, _ = self._count(report)
                raise WriteTimeoutError(
                    f"The bulk write is {report.state}, and its jobs have not ended within {timeout:g} s: "
                    f"{outcome}",
                    outcome,
                )
            self._sleep(pause if timeout is None else min(pause, timeout - waited))
        raise AssertionError("unreachable: the last outcome is not None")

    def _outcomes(self) -> Iterator[WriteOutcome | None]:
        """Yield None until all jobs have ended, and then the outcome."""
        report = self._report()
        while report.state != DONE:
            total = report.total
            share = f", {min(1, total.published / total.chunks):.0%} published" if total.chunks else ""
            self._report_progress(f"{report.write}: {report.state}{share}")
            yield None
            report = self._report()
        while True:
            outcome, sample = self._count(report)
            self._report_progress(str(outcome))
            if not outcome.unfinished:
                yield outcome
            yield None
            while unfinished := self._send(self._unfinished, sample):
                if unfinished < len(sample):
                    left = round(outcome.unfinished * unfinished / len(sample))
                    self._report_progress(f"{report.write}: about {left:,} of {outcome.total:,} unfinished")
                yield None
            report = self._report()

    def _report_progress(self, line: str) -> None:
        if self._progress is not None and line != self._last_line:
            self._progress(line)
        self._last_line = line

    def _report(self) -> BulkWriteReport:
        report: BulkWriteReport | None = self._send(self._reports.get, self._name)
        if report is None:
            raise StorageError(
                f"The report of the bulk write {self._name!r} was deleted while it was waited for."
            )
        if report.operation != ENQUEUE:
            raise OptionError(
                f"write: {self._name!r} has changed existing jobs ({report.operation}), which lack its name: "
                "read the table jobs instead"
            )
        if report.state == FAILED:
            raise StorageError(f"The bulk write {self._name!r} failed: {report.error}")
        return report

    def _found(self, name: str) -> BulkWriteReport:
        report: BulkWriteReport | None = self._send(self._reports.get, name)
        if report is not None:
            return report
        known: dict[str, None] = {}
        for report in self._all():
            if report.app == name:
                return report
            known |= {report.write: None, report.app: None}
        raise OptionError(
            f"write: the storage has no report of a bulk write {name!r}{nearest(name, known) or '.'} Set its "
            "name with writeId, and pass the url that it was written to"
        )

    def _all(self) -> Iterator[BulkWriteReport]:
        """Yield all reports, the most recently changed first."""
        after: str | None = None
        while True:
            page = self._send(self._reports.page, LISTED, after)
            yield from page.imports
            after = page.next
            if after is None:
                return

    def _tags(self, report: BulkWriteReport) -> frozenset[str]:
        """Return the tags of the write's jobs, which another write of this version may have published."""
        writes = {report.write, report.resumed or report.write}
        if report.skipped:
            version = (report.app, report.version)
            writes |= {other.write for other in self._all() if (other.app, other.version) == version}
        return frozenset(map(tag_of, writes))

    def _count(self, report: BulkWriteReport) -> tuple[WriteOutcome, list[JobKey]]:
        """Return the write's jobs by outcome, and a sample of the unfinished ones."""
        export = self._storage.capabilities.export
        assert export is not None
        counts, sample = Counter[str](), list[JobKey]()
        since = None if report.skipped or report.resumed else report.started_at - CLOCK_SKEW
        wanted = ExportFilter(
            "jobs",
            frozenset({"queue", "id", "state"}),
            queues=report.queues,
            since=since,
            tags=tuple(self._tags(report)),
        )
        for part in self._send(export.parts, wanted, 1):
            for page in export.pages(wanted, part, PAGE, self._send):
                for queue, job_id, state in zip(page["queue"], page["id"], page["state"], strict=True):
                    counts[state if state in ENDED else "unfinished"] += 1
                    if state not in ENDED:
                        self._add(sample, (queue, job_id), counts["unfinished"])
        removed = max(0, report.inserted - counts.total())
        return WriteOutcome(write=report.write, removed=removed, **counts), sample

    def _add(self, sample: list[JobKey], key: JobKey, seen: int) -> None:
        """Add the job that was seen last to a sample, in which every job seen is as likely."""
        if len(sample) < SAMPLE:
            sample.append(key)
        elif (index := self._random.randrange(seen)) < SAMPLE:
            sample[index] = key

    def _unfinished(self, sample: list[JobKey]) -> int:
        """Return how many jobs of a sample are unfinished."""
        by_queue: dict[str, list[str]] = {}
        for queue, job_id in sample:
            by_queue.setdefault(queue, []).append(job_id)
        states = [
            state for queue, ids in by_queue.items() for state in self._storage.reads.states(queue, ids)
        ]
        return sum(state is not None and state not in TERMINAL for state in states)
