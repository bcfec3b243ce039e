"""Publish a write on the driver."""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from djqueue.core.errors import StorageError
from djqueue.storage.base import Storage
from djqueue.storage.staging import (
    TAKEOVER_AFTER,
    ChunkMissingError,
    Counts,
    Manifest,
    Plan,
    PlanPublisher,
    PlanState,
    step_size,
)

from .locations import staging_of
from .options import WriteOptions
from .reporting import WriteReporter
from .throttling import StorageRetry, WriteThrottle

TOUCH_EVERY = TAKEOVER_AFTER / 1_000 / 10
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
            ChunkMissingError: Some staged jobs expired or were lost.
        """
        finished: tuple[Counts, bool] | None = None
        while True:
            state = self._commit(plan)
            is_own = (state.plan.write, state.plan.version) == (plan.write, plan.version)
            if is_own and state.status != "done":
                self._reporter.committed()
            if state.status == "done" and finished is not None:
                if not is_own:
                    self._forget(plan)
                return finished  # It is there, or a later version has been published since.
            if state.status == "done" and is_own:
                # A sweep, or another driver, has finished this write.
                self._reporter.published(state.counts)
                self._reporter.done(skipped=False)
                return sum(state.counts.values(), Counts()), False
            if state.status == "done":
                self._forget(plan)
                counted = state.counts if state.plan.version == plan.version else {}
                self._reporter.skipped(state.plan, counted)
                self._reporter.done(skipped=True)
                return sum(counted.values(), Counts()), True
            publication = self._finish(state, plan, is_own=is_own)
            if publication is not None and state.status != "unfinished":
                finished = sum(publication.counts.values(), Counts()), _is_skipped(publication, plan)
                if self._send(self._staging.confirm, state.plan):
                    if not is_own:
                        self._forget(plan)
                    return finished
                self._reporter.start_over()

    def _commit(self, plan: Plan) -> PlanState:
        try:
            state: PlanState = self._send(self._staging.commit, plan)
        except StorageError as error:
            remedy = (
                "with the same txnVersion" if plan.lifetime is None else "only if it has no report by then"
            )
            error.add_note(
                f"The write may be committed all the same: then a worker's sweep publishes it after "
                f"{TAKEOVER_AFTER // 1_000} s. Run it again after a few minutes, {remedy}."
            )
            raise
        return state

    def _finish(self, state: PlanState, own: Plan, *, is_own: bool) -> PlanPublisher | None:
        """Publish a plan. Returns None if the own plan must be committed again."""
        plan = self._plan = state.plan
        size = step_size(self._options.max_queue_depth, self._options.batch_size)
        publication = PlanPublisher(self._staging, plan, self._publish_when_possible, self._wait, size)
        try:
            for progress in publication.steps():
                self._reporter.progressed(progress)
                self._touch()
            # Until the plan is closed, a sweep completes the reports, too, if this process dies.
            if state.status == "unfinished":
                self._reporter.save_earlier()
            else:
                if not is_own:
                    self._reporter.resumed(plan, publication.counts)
                self._reporter.done(skipped=_is_skipped(publication, own))
            if not publication.close():
                self._reporter.start_over()
                return None  # A failover has lost some of the steps.
        except ChunkMissingError as error:
            status = self._send(self._staging.state_of, plan)
            if status == "done":
                return None
            if status == "" and is_own and not self._was_lost:
                self._was_lost = True
                return None  # A later version was published meanwhile, or a failover has lost the plan.
            is_dropped = status != "" and self._staging.drop(plan)
            if status == "" or is_dropped:
                if is_dropped and is_own:
                    error.add_note("No row of this write was enqueued: write all of them again.")
                if is_own:
                    raise
                return None
            self._staging.leave(plan)
            if is_own:
                self._reporter.left_incomplete()
                raise
            raise ChunkMissingError(
                f"{error}. The rest of that write is lost: write the missing rows again with a "
                f"txnAppId other than {own.app!r}, or from another checkpoint"
            ) from None
        except StorageError as error:
            note = (
                "The write is committed: once the storage is available again, a worker's sweep publishes the "
                f"rest, after {TAKEOVER_AFTER // 1_000} s."
            )
            if plan.lifetime is not None:
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


def _is_skipped(publication: PlanPublisher, own: Plan) -> bool:
    """Return whether another write had published all queues, rather than a sweep that took over this one."""
    return publication.was_published and own.write not in publication.published_by
