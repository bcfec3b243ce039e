"""Publish a write on the driver, and refuse two writes under one name."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from time import monotonic
from typing import Any
from zlib import crc32

from djqueue.core.errors import OptionError, StorageError
from djqueue.storage.base import Storage
from djqueue.storage.publishing import SILENCE, PlanPublisher, step_size
from djqueue.storage.staging import ChunkMissingError, Counts, Manifest, Plan, PlanState

from .locations import staging_of
from .options import WriteOptions
from .reporting import WriteReporter
from .rows import Chunk
from .throttling import StorageRetry, WriteThrottle

TOUCH_EVERY = SILENCE / 1_000 / 10
"""Seconds between two signs of life of a driver that publishes."""


class DriverPublisher:
    """Commits a plan, and publishes it with every write of the application that must come before.

    Args:
        storage: The storage.
        options: The options of the write.
        reporter: Receives the progress.
    """

    def __init__(self, storage: Storage, options: WriteOptions, reporter: WriteReporter) -> None:
        self._staging = staging_of(storage)
        self._options = options
        self._reporter = reporter
        self._send = StorageRetry(options.max_retries)
        self._plan: Plan | None = None
        self._was_lost = False
        """Whether the plan of this write was not stored any more."""
        self._touched_at = monotonic()
        self._throttle = WriteThrottle(options, storage, on_wait=self._touch)

    def publish(self, plan: Plan) -> tuple[Counts, bool]:
        """Publish a plan and complete the report.

        Returns:
            The counts of the plan, and whether its version had already been published.

        Raises:
            OptionError: The name of the write belongs to a write of other rows.
            ChunkMissingError: Some staged jobs expired or were lost.
        """
        while True:
            found: PlanState = self._send(self._staging.commit, plan)
            is_own = (found.plan.write, found.plan.version) == (plan.write, plan.version)
            if not is_own:
                refuse_other_frame(found, plan)
            elif found.status != "done":
                self._reporter.committed()
            if found.status == "done" and is_own:
                # A sweep, or another driver, has finished this write.
                self._reporter.published(found.counts)
                self._reporter.done(skipped=False)
                return sum(found.counts.values(), Counts()), False
            if found.status == "done":
                self._forget(plan)
                counted = found.counts if found.plan.version == plan.version else {}
                self._reporter.skipped(found.plan, counted)
                self._reporter.done(skipped=True)
                return sum(counted.values(), Counts()), True
            publication = self._finish(found, plan.app, is_own=is_own)
            if publication is not None and found.status != "unfinished":
                if not is_own:
                    self._forget(plan)
                total = sum(publication.counts.values(), Counts())
                return total, publication.was_published

    def _finish(self, state: PlanState, app: str, *, is_own: bool) -> PlanPublisher | None:
        """Publish a plan. Returns None if the own plan must be committed again."""
        found = self._plan = state.plan
        size = step_size(self._options.max_queue_depth, self._options.batch_size)
        publication = PlanPublisher(self._staging, found, self._publish_when_possible, self._wait, size)
        try:
            for progress in publication.steps():
                self._reporter.progressed(progress)
                self._touch()
            # Until the plan is closed, a sweep completes the reports, too, if this process dies.
            if state.status == "unfinished":
                self._reporter.save_earlier()
            else:
                if not is_own:
                    self._reporter.resumed(found, publication.counts)
                self._reporter.done(skipped=publication.was_published)
            publication.close()
        except ChunkMissingError as error:
            now = self._send(self._staging.state_of, found)
            if now == "done":
                return None
            if now == "" and is_own and not self._was_lost:
                self._was_lost = True
                return None  # A later version was published meanwhile, or a failover has lost the plan.
            if now == "" or self._staging.drop(found):
                if is_own:
                    raise
                return None
            self._staging.leave(found)
            if is_own:
                self._reporter.left_incomplete()
                raise
            raise ChunkMissingError(
                f"{error}. The rest of that write is lost: write the missing rows again with a "
                f"txnAppId other than {app!r}, or from another checkpoint"
            ) from None
        except StorageError as error:
            note = (
                "The write is committed: once the storage is available again, a worker's sweep publishes the "
                f"rest, after {SILENCE // 1_000} s."
            )
            if found.lifetime is not None:
                note += " But if none of its jobs is published yet, Spark withdraws it now: run it again."
            error.add_note(note)
            raise
        finally:
            self._plan = None
        return publication

    def _wait(self, chunks: Sequence[tuple[Manifest, str, int]]) -> None:
        for queue in dict.fromkeys(manifest.queue for manifest, _, _ in chunks):
            self._throttle.wait(queue, 0)

    def _publish_when_possible(self, call: Callable[..., Any], *args: Any) -> Any:
        answer = self._throttle.publish_when_possible(lambda: self._send(call, *args))
        if call == self._staging.publish_all:
            # Chunks are closed by their bytes, too, so only now it is known how many jobs they have.
            self._throttle.spend(sum(sum(counts) for counts in answer))
        return answer

    def _touch(self) -> None:
        """Keep sweeps from taking over, unless this happened a moment ago."""
        if self._plan is not None and monotonic() - self._touched_at > TOUCH_EVERY:
            self._send(self._staging.touch, self._plan)
            self._touched_at = monotonic()

    def _forget(self, plan: Plan) -> None:
        self._send(self._staging.forget_all, sorted(plan.queues), plan.owner, plan.write)


class Checksum:
    """Passes chunks through, and sums checksums of their jobs: the order of jobs does not matter."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self.value = 0
        self._chunks = chunks

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self._chunks:
            for batch in chunk.batches:
                self.value += sum(map(crc32, batch.payloads))
                if not batch.fresh:
                    self.value += sum(crc32(job_id.encode()) for job_id in batch.ids or ())
            yield chunk


def frame_of(options: WriteOptions, columns: Sequence[str]) -> str:
    """Return a fingerprint of what turns rows into jobs: columns, and options that choose them."""
    chosen = [
        list(columns),
        [options.queue, options.queue_column, options.job, options.job_column],
        [options.payload_column, options.payload_format, options.args_column, options.kwargs_column],
        [options.include, options.exclude, sorted(options.columns.items())],
    ]
    return blake2b(json.dumps(chosen).encode(), digest_size=16).hexdigest()


def refuse_other_frame(found: PlanState, own: Plan) -> None:
    """Raise OptionError if the name of a write belongs to a write of another DataFrame.

    A repeated write has the same columns and options. Its rows may differ, if they are computed anew, except
    in the run that has published the version: there, the name was used for two DataFrames.
    """
    first = found.plan
    if first.version != own.version or not first.frame or not own.frame:
        return
    is_other = first.frame != own.frame
    if found.status == "done" and first.run and first.run == own.run:
        is_other = is_other or first.content != own.content
    if is_other:
        raise OptionError(
            f"txnAppId: {own.app!r} with txnVersion {own.version} already names a write of other rows "
            f"({first.write}), so these rows were not enqueued: give each DataFrame a txnAppId of its own, "
            "or a higher txnVersion"
        )
