"""The report of a write, which the storage keeps for the dashboard. A write does not fail for its report."""

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

TASKS_FAILED = "its tasks failed: the log of Spark says why"


def share(counts: Counts, chunks: int = 0, published: int = 0, *, ended: bool = False) -> QueueShare:
    """What came to one queue."""
    there = counts.duplicates + counts.completed
    return QueueShare(chunks, published, counts.queued, there, ended, counts.rejected)


def begun(write: str, app: str, version: int, shares: Mapping[str, QueueShare]) -> BulkWriteReport:
    """The report of a write that begins now, by whoever runs this."""
    return BulkWriteReport(write, app, version, SYSTEM_CLOCK.now(), shares=shares, user=_user())


class Reporting:
    """Tells how a write goes.

    report: as it is when publishing begins.
    is_batch: whether it is one of a streaming query's, of which the sums are kept.
    """

    def __init__(self, storage: Storage, own: str, report: BulkWriteReport, *, is_batch: bool) -> None:
        self._imports = storage.capabilities.bulk_writes
        self._own = own
        self._report = report
        self._is_batch = is_batch

    @contextmanager
    def of_write(self) -> Iterator[None]:
        """Around what is done: what fails is noted."""
        if not self._is_batch:
            self._keep(self._report)
        try:
            yield
        except Exception as error:
            self._failed(error)
            raise

    def published(self, manifest: Manifest, share: QueueShare) -> None:
        """So much of a manifest has been published: of this write's, or of an earlier one's."""
        if manifest.write == self._own:
            self._note({manifest.queue: share})
        elif not self._is_batch:
            self._gone_on_with(manifest, share)

    def resumed(self, manifest: Manifest, share: QueueShare) -> None:
        """An earlier try of the same version was finished in place of this one."""
        self._note({manifest.queue: share}, resumed=manifest.write)

    def skipped(self, manifest: Manifest, counts: Counts) -> None:
        """This version was published before, by the write of a manifest, which may not have reported it."""
        came = share(counts, ended=True)
        if not self._is_batch and manifest.version == self._report.version:
            self._gone_on_with(manifest, came, only_known=True)
        self._note({manifest.queue: came}, skipped=True)

    def done(self) -> None:
        """All of it is published."""
        self._report = self._report._replace(state=DONE, finished_at=SYSTEM_CLOCK.now())
        if self._is_batch:
            with _quiet(self._report.write):
                if self._imports is not None:
                    self._imports.add(self._report._replace(skipped=False, resumed=""))
        else:
            self._keep(self._report)

    def _note(self, shares: Mapping[str, QueueShare], **more: Any) -> None:
        self._report = self._report._replace(shares={**self._report.shares, **shares}, **more)
        if not self._is_batch:
            self._keep(self._report)

    def _gone_on_with(self, manifest: Manifest, share: QueueShare, *, only_known: bool = False) -> None:
        if self._imports is None:
            return
        with _quiet(manifest.write):
            there = self._imports.get(manifest.write)
            if there is None and only_known:
                return
            if there is None:
                there = begun(manifest.write, manifest.app, manifest.version, {})
            chunks = there.shares.get(manifest.queue, share).chunks
            if share.ended:
                share = share._replace(chunks=chunks, published=chunks)
            now = there._replace(state=PUBLISHING, error="", shares={**there.shares, manifest.queue: share})
            now = self._imports.keep(now)
            if all(one.ended for one in now.shares.values()):
                self._imports.keep(now._replace(state=DONE, finished_at=SYSTEM_CLOCK.now()))

    def _failed(self, error: Exception) -> None:
        came = any(share.published for share in self._report.shares.values())
        nothing = isinstance(error, ChunkMissingError) and not came
        state, said = FAILED if nothing else UNFINISHED, f"{type(error).__name__}: {error}"
        if not self._is_batch:
            self._keep(self._report._replace(state=state, error=said))
        elif self._imports is not None:
            with _quiet(self._report.write):
                there = self._imports.get(self._report.write)
                if there is None:
                    report = self._report
                    none = dict.fromkeys(report.shares, QueueShare())
                    there = begun(report.write, report.app, report.version, none)
                self._imports.keep(there._replace(state=state, error=said))

    def _keep(self, report: BulkWriteReport) -> None:
        if self._imports is not None:
            with _quiet(report.write):
                self._imports.keep(report)


def aborted(storage: Storage, report: BulkWriteReport) -> None:
    """The tasks of a write have failed, so that nothing is published; one that was begun says so itself."""
    if storage.capabilities.bulk_writes is None:
        return
    with _quiet(report.write):
        there = storage.capabilities.bulk_writes.get(report.write)
        if there is None:
            storage.capabilities.bulk_writes.keep(report._replace(state=FAILED, error=TASKS_FAILED))
        elif there.batches and there.state == DONE:
            storage.capabilities.bulk_writes.keep(there._replace(state=UNFINISHED, error=TASKS_FAILED))


@contextmanager
def _quiet(write: str) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        logger.warning("The report of write %s could not be saved: %s", write, error)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # One without a name, as in some containers.
        return ""
