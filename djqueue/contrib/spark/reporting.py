"""Reports of writes: from a task to the driver, from a write to its caller, and as the storage saves them."""

import getpass
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import OptionError, StorageError
from djqueue.storage.base import Storage
from djqueue.storage.bulkwrites import (
    DONE,
    FAILED,
    PUBLISHING,
    UNFINISHED,
    BulkWriteReport,
    QueueShare,
    report_of,
)
from djqueue.storage.staging import ChunkMissingError, Counts, Manifest, Plan, QueueProgress, share_of

from .options import ENQUEUE

logger = logging.getLogger("djqueue.spark")

SAVE_EVERY = 1.0
"""Seconds between two saved reports of a write that is being published."""
TASKS_FAILED = "The tasks failed; see the Spark log for the reason."
NAMED_QUEUES = 10
"""Maximum number of queues that a report's summary names."""


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """The report of one task to the driver."""

    part: str
    """The partition's number, a dot, and an id of the task attempt."""
    chunks: dict[str, str] = field(default_factory=dict)
    """By queue, one character for each staged chunk."""
    rows: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    """Invalid rows, by reason."""
    changed: dict[str, dict[str, int]] = field(default_factory=dict)
    """Results of changes to existing jobs, by queue."""
    names: tuple[str, ...] = ()
    """Names of the jobs."""
    spark: str = ""
    """The id of the Spark application."""


@dataclass(frozen=True, kw_only=True)
class WriteReport:
    """The result of a write.

    `rows` is the sum of `inserted`, `duplicates` and `rejected`, or, if existing jobs were changed, of
    `answers` and `rejected`.
    """

    write: str
    app: str
    version: int
    queues: tuple[str, ...]
    rows: int
    counts: Counts
    rejected: dict[str, int]
    skipped: bool = False
    """Whether this version had already been published, so that nothing was done."""
    operation: str = ENQUEUE
    answers: dict[str, int] = field(default_factory=dict)
    """Results of changes to existing jobs, as the storage returns them, such as retried or not_failed."""

    @classmethod
    def of(cls, saved: BulkWriteReport) -> "WriteReport":
        """Convert the report that the storage saved."""
        total = saved.total
        return cls(
            write=saved.write,
            app=saved.app,
            version=saved.version,
            queues=saved.queues,
            rows=saved.rows,
            counts=Counts(total.inserted, total.duplicates, rejected=total.dead_letters),
            rejected=dict(saved.rejected),
            skipped=saved.skipped,
            operation=saved.operation,
            answers=dict(saved.answers),
        )

    @property
    def dead_letters(self) -> int:
        """Rejected rows that became dead letters."""
        return self.counts.rejected

    @property
    def inserted(self) -> int:
        """Number of new jobs."""
        return self.counts.queued

    @property
    def duplicates(self) -> int:
        """Number of rows whose jobs existed or had completed."""
        return self.counts.duplicates + self.counts.completed

    def __str__(self) -> str:
        """Return a summary in one line."""
        done = {} if self.skipped else {"inserted": self.inserted, "duplicates": self.duplicates}
        if self.operation != ENQUEUE:
            done = dict(sorted(self.answers.items()))
        words = [f"{self.rows:,} rows", *(f"{number:,} {word}" for word, number in done.items() if number)]
        if self.rejected:
            reasons = ", ".join(f"{reason}: {number:,}" for reason, number in sorted(self.rejected.items()))
            words.append(f"{sum(self.rejected.values()):,} rejected ({reasons})")
        if self.dead_letters:
            words.append(f"{self.dead_letters:,} of these are dead letters")
        if self.skipped:
            jobs = f" with {self.inserted:,} jobs" if self.inserted else ""
            words.append(
                f"nothing enqueued: version {self.version} of {self.app} had already been published{jobs}"
            )
        place = ", ".join(self.queues[:NAMED_QUEUES])
        if len(self.queues) > NAMED_QUEUES:
            place = f"{len(self.queues):,} queues ({place}, …)"
        place = place and f" in {place}"
        return f"{self.operation}{place}: {'; '.join(words)} (write {self.write})"


def new_report(write: str, app: str, version: int, shares: Mapping[str, QueueShare]) -> BulkWriteReport:
    """Return the report of a write that the current user starts now."""
    return BulkWriteReport(write, app, version, SYSTEM_CLOCK.now(), shares=shares, user=_user())


def refuse_used_name(storage: Storage, write: str, app: str | None, version: int) -> None:
    """Raise OptionError if another write has this name, unless it failed or is an earlier run of this one."""
    reports = storage.capabilities.bulk_writes
    known = None if reports is None else reports.get(write)
    if known is None or known.state == FAILED:
        return
    if app is None or (known.app, known.version) != (app, version):
        raise OptionError(
            f"writeId: {write!r} already names a write (txnAppId {known.app!r}, txnVersion {known.version}, "
            f"{known.state}): give each write a writeId of its own, or leave writeId out"
        )


class WriteReporter:
    """Save the progress of a write in its report. A write never fails because of its report.

    Args:
        storage: The storage that keeps the report.
        own: The id of this write.
        report: The report when publishing starts.
        is_batch: Whether it is a batch of a streaming query, which has one report with totals.
    """

    def __init__(self, storage: Storage, own: str, report: BulkWriteReport, *, is_batch: bool) -> None:
        self._imports = storage.capabilities.bulk_writes
        self._own = own
        self._initial = report
        self._is_batch = is_batch
        self._saved_at = monotonic()
        self.start_over()

    def start_over(self) -> None:
        """Record that nothing is published, as a failover has lost all of it."""
        self._shares = dict(self._initial.shares)
        self._report = self._initial._replace(shares=self._shares)
        self._earlier: dict[str, dict[str, QueueProgress]] = {}
        """Unsaved progress of earlier writes, by write and queue."""
        self._unsaved = False
        self._is_incomplete = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record an exception that the block raises."""
        try:
            yield
        except Exception as error:
            self._failed(error)
            raise

    def committed(self) -> None:
        """Record that the write is committed: a sweep ends its report if this process dies."""
        if not self._is_batch:
            self._keep(self._report)

    def progressed(self, steps: Iterable[QueueProgress]) -> None:
        """Record the progress of manifests, of this write or an earlier one, from time to time."""
        for progress in steps:
            manifest = progress.manifest
            is_own = manifest.write == self._own
            if is_own or progress.was_published:
                self._shares[manifest.queue] = progress.share
                self._unsaved = True
            if not is_own:
                self._earlier.setdefault(manifest.write, {})[manifest.queue] = progress
        if monotonic() - self._saved_at >= SAVE_EVERY:
            self._save()

    def published(self, counts: Mapping[str, Counts]) -> None:
        """Record that everything is published, by whomever."""
        self._set(counts)

    def left_incomplete(self) -> None:
        """Record that a part of this write is published, and the rest cannot be."""
        self._is_incomplete = True

    def save_earlier(self) -> None:
        """Save the progress of earlier writes."""
        earlier, self._earlier = self._earlier, {}
        if not self._is_batch:
            for write, progress in earlier.items():
                was_published = all(step.was_published for step in progress.values())
                self._continue_report(write, progress, only_known=was_published)

    def resumed(self, plan: Plan, counts: Mapping[str, Counts]) -> None:
        """Record that an earlier write of the same version was finished instead of this one."""
        self._set(counts)
        self._report = self._report._replace(resumed=report_of(plan.write))

    def skipped(self, plan: Plan, counts: Mapping[str, Counts]) -> None:
        """Record that an earlier write already published this version, perhaps without reporting it."""
        if not self._is_batch and plan.version == self._report.version:
            progress = {
                queue: QueueProgress(
                    Manifest(queue, plan.owner, plan.version, plan.write, {}), share_of(counted, ended=True)
                )
                for queue, counted in counts.items()
            }
            self._continue_report(plan.write, progress, only_known=True)
        self._set(counts)

    def _set(self, counts: Mapping[str, Counts]) -> None:
        chunks = {queue: share.chunks for queue, share in self._shares.items()}
        self._shares.clear()
        for queue, counted in counts.items():
            size = chunks.get(queue, 0)
            self._shares[queue] = share_of(counted, size, size, ended=True)

    def done(self, *, skipped: bool) -> None:
        """Record that everything is published. skipped: by an earlier write, in every queue."""
        self.save_earlier()
        self._report = self._report._replace(state=DONE, finished_at=SYSTEM_CLOCK.now(), skipped=skipped)
        if self._is_batch:
            with _log_errors(self._report.write):
                if self._imports is not None:
                    self._imports.add(self._report._replace(skipped=False, resumed=""))
        else:
            self._keep(self._report)

    def _save(self) -> None:
        self._saved_at = monotonic()
        self.save_earlier()
        if self._unsaved and not self._is_batch:
            self._keep(self._report)
        self._unsaved = False

    def _continue_report(
        self, write: str, progress: Mapping[str, QueueProgress], *, only_known: bool = False
    ) -> None:
        if self._imports is None or not progress:
            return
        name = report_of(write)
        with _log_errors(name):
            known = self._imports.get(name)
            if known is None and only_known:
                return
            if known is None and name == self._report.write:
                known = self._report._replace(shares={})  # All runs share one report.
            if known is None:
                version = next(iter(progress.values())).manifest.version
                known = new_report(name, self._report.app, version, {})
            shares = dict(known.shares)
            for queue, (_, share, _) in progress.items():
                if share.ended:
                    chunks = shares.get(queue, share).chunks
                    share = share._replace(chunks=chunks, published=chunks)
                shares[queue] = share
            saved = self._imports.keep(known._replace(state=PUBLISHING, error="", shares=shares))
            if all(share.ended for share in saved.shares.values()):
                # If a driver died before it saved a report, the number of rows that it rejected is not known.
                rows = saved.rows or saved.inserted + saved.duplicates
                self._imports.keep(saved._replace(state=DONE, rows=rows, finished_at=SYSTEM_CLOCK.now()))

    def _failed(self, error: Exception) -> None:
        self.save_earlier()
        published = self._is_incomplete or any(share.published for share in self._report.shares.values())
        # Rows were lost: the write is not committed any more, so no sweep will finish it.
        nothing = isinstance(error, ChunkMissingError) and not published
        state, message = FAILED if nothing else UNFINISHED, f"{type(error).__name__}: {error}"
        if not self._is_batch:
            self._keep(self._report._replace(state=state, error=message))
        elif self._imports is not None:
            with _log_errors(self._report.write):
                known = self._imports.get(self._report.write)
                if known is None:
                    report = self._report
                    none = dict.fromkeys(report.shares, QueueShare())
                    known = new_report(report.write, report.app, report.version, none)
                if known.batches:
                    state = UNFINISHED  # Earlier batches of the stream are published.
                self._imports.keep(known._replace(state=state, error=message))

    def _keep(self, report: BulkWriteReport) -> None:
        if self._imports is not None:
            with _log_errors(report.write):
                self._imports.keep(report)


def aborted(storage: Storage, report: BulkWriteReport, *, is_over: bool) -> None:
    """Record that a write was discarded, so that nothing was published.

    Args:
        storage: The storage.
        report: A report to save if there is none.
        is_over: Whether no publisher or sweep can finish the write.
    """
    if storage.capabilities.bulk_writes is None:
        return
    with _log_errors(report.write):
        known = storage.capabilities.bulk_writes.get(report.write)
        if known is None:
            storage.capabilities.bulk_writes.keep(report._replace(state=FAILED, error=TASKS_FAILED))
        elif known.batches and known.state == DONE:
            storage.capabilities.bulk_writes.keep(known._replace(state=UNFINISHED, error=TASKS_FAILED))
        elif is_over and not known.total.published:
            error = known.error or TASKS_FAILED
            storage.capabilities.bulk_writes.keep(known._replace(state=FAILED, error=error))


@contextmanager
def _log_errors(write: str) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        logger.warning(
            "Could not save the report of write %s; the write itself is not affected: %s", write, error
        )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # The user has no name, as in some containers.
        return ""
