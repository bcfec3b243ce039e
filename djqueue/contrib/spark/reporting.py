"""Save the report of a write with the storage. A write never fails because of its report."""

import getpass
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import StorageError
from djqueue.storage.base import Storage
from djqueue.storage.bulkwrites import DONE, FAILED, PUBLISHING, UNFINISHED, BulkWriteReport, QueueShare
from djqueue.storage.staging import ChunkMissingError, Counts, Manifest

logger = logging.getLogger("djqueue.spark")

TASKS_FAILED = "The tasks failed; see the Spark log for the reason."


def share(counts: Counts, chunks: int = 0, published: int = 0, *, ended: bool = False) -> QueueShare:
    """Return a queue's part of a report."""
    known = counts.duplicates + counts.completed
    return QueueShare(chunks, published, counts.queued, known, ended, counts.rejected)


def new_report(write: str, app: str, version: int, shares: Mapping[str, QueueShare]) -> BulkWriteReport:
    """Return the report of a write that the current user starts now."""
    return BulkWriteReport(write, app, version, SYSTEM_CLOCK.now(), shares=shares, user=_user())


class WriteReporter:
    """Save the progress of a write.

    Args:
        storage: The storage that keeps the report.
        own: The id of this write.
        report: The report when publishing starts.
        is_batch: Whether it is a batch of a streaming query, which has one report with totals.
    """

    def __init__(self, storage: Storage, own: str, report: BulkWriteReport, *, is_batch: bool) -> None:
        self._imports = storage.capabilities.bulk_writes
        self._own = own
        self._report = report
        self._is_batch = is_batch

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Save the report, and record an exception that the block raises."""
        if not self._is_batch:
            self._keep(self._report)
        try:
            yield
        except Exception as error:
            self._failed(error)
            raise

    def published(self, manifest: Manifest, share: QueueShare) -> None:
        """Record the progress of a manifest, of this write or an earlier one."""
        if manifest.write == self._own:
            self._update({manifest.queue: share})
        elif not self._is_batch:
            self._continue_report(manifest, share)

    def resumed(self, manifest: Manifest, share: QueueShare) -> None:
        """Record that an earlier write of the same version was finished instead of this one."""
        self._update({manifest.queue: share}, resumed=manifest.write)

    def skipped(self, manifest: Manifest, counts: Counts) -> None:
        """Record that an earlier write already published this version, perhaps without reporting it."""
        published = share(counts, ended=True)
        if not self._is_batch and manifest.version == self._report.version:
            self._continue_report(manifest, published, only_known=True)
        self._update({manifest.queue: published})

    def done(self, *, skipped: bool) -> None:
        """Record that everything is published. skipped: by an earlier write, in every queue."""
        self._report = self._report._replace(state=DONE, finished_at=SYSTEM_CLOCK.now(), skipped=skipped)
        if self._is_batch:
            with _log_errors(self._report.write):
                if self._imports is not None:
                    self._imports.add(self._report._replace(skipped=False, resumed=""))
        else:
            self._keep(self._report)

    def _update(self, shares: Mapping[str, QueueShare], **more: Any) -> None:
        self._report = self._report._replace(shares={**self._report.shares, **shares}, **more)
        if not self._is_batch:
            self._keep(self._report)

    def _continue_report(self, manifest: Manifest, share: QueueShare, *, only_known: bool = False) -> None:
        if self._imports is None:
            return
        with _log_errors(manifest.write):
            known = self._imports.get(manifest.write)
            if known is None and only_known:
                return
            if known is None:
                known = new_report(manifest.write, manifest.app, manifest.version, {})
            chunks = known.shares.get(manifest.queue, share).chunks
            if share.ended:
                share = share._replace(chunks=chunks, published=chunks)
            now = known._replace(state=PUBLISHING, error="", shares={**known.shares, manifest.queue: share})
            now = self._imports.keep(now)
            if all(one.ended for one in now.shares.values()):
                self._imports.keep(now._replace(state=DONE, finished_at=SYSTEM_CLOCK.now()))

    def _failed(self, error: Exception) -> None:
        published = any(share.published for share in self._report.shares.values())
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
                self._imports.keep(known._replace(state=state, error=message))

    def _keep(self, report: BulkWriteReport) -> None:
        if self._imports is not None:
            with _log_errors(report.write):
                self._imports.keep(report)


def aborted(storage: Storage, report: BulkWriteReport) -> None:
    """Record that a write's tasks failed, so that nothing was published."""
    if storage.capabilities.bulk_writes is None:
        return
    with _log_errors(report.write):
        known = storage.capabilities.bulk_writes.get(report.write)
        if known is None:
            storage.capabilities.bulk_writes.keep(report._replace(state=FAILED, error=TASKS_FAILED))
        elif known.batches and known.state == DONE:
            storage.capabilities.bulk_writes.keep(known._replace(state=UNFINISHED, error=TASKS_FAILED))


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
