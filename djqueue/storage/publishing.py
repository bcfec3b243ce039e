"""Publish the plans of bulk writes: by the process that committed them, or by a sweep if it falls silent.

All steps can be repeated by any number of processes at once, so a publisher that was only slow does no harm.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import QueueFullError
from djqueue.core.states import PENDING, State

from .bulkwrites import DONE, FAILED, UNFINISHED, BulkWriteReport, BulkWriteReports, QueueShare, report_of
from .staging import (
    CHUNK,
    RESUMABLE,
    ChunkMissingError,
    Counts,
    Manifest,
    Plan,
    PublicationState,
    Staging,
    chunks_of,
)

logger = logging.getLogger("djqueue.storage")

CHUNKS_PER_STEP = 64
"""Chunks to publish in one step."""
QUEUES_PER_STEP = 200
"""Manifests to store or end in one step."""
SILENCE = 60_000
"""Milliseconds without progress after which a sweep takes over a plan."""
RENEW_EVERY = RESUMABLE // 7
"""Milliseconds between two renewals of the staged jobs of a plan, whose queues may be full for long."""
STEPS_PER_SWEEP = 50
"""Steps of all adopted plans in one sweep."""
PLANS_PER_SWEEP = 10
"""Plans that one sweep takes over."""


class QueueProgress(NamedTuple):
    """The progress of one queue's manifest."""

    manifest: Manifest
    """The published manifest, which may be that of an earlier write."""
    share: QueueShare
    was_published: bool = False
    """Whether the manifest had already been published."""


Steps = Iterator[list[QueueProgress]]


class PlanPublisher:
    """Publishes a plan, step by step.

    Args:
        staging: The staging area.
        plan: A committed plan.
        send: Makes a call to the staging area, and repeats it if necessary.
        wait: Called before chunks are published; while it returns True, steps make no progress.
        size: Maximum number of chunks in a step.
    """

    def __init__(
        self,
        staging: Staging,
        plan: Plan,
        send: Callable[..., Any] = lambda call, *args: call(*args),
        wait: Callable[[Sequence[tuple[Manifest, str, int]]], object] = lambda _: None,
        size: int = CHUNKS_PER_STEP,
    ) -> None:
        self.plan = plan
        self.counts: dict[str, Counts] = {}
        """Counts of the queues that are published."""
        self.was_published = False
        """Whether all queues had already been published."""
        self.published_by: frozenset[str] = frozenset()
        """The writes that had already published queues: this one, if a sweep has published its plan."""
        self._staging = staging
        self._send = send
        self._wait = wait
        self._size = size
        self._renewed_at = SYSTEM_CLOCK.monotonic()

    def steps(self) -> Steps:
        """Publish the plan, and yield the progress after each step.

        Raises:
            ChunkMissingError: Some staged jobs expired or were lost.
            QueueFullError: A queue has no room.
        """
        try:
            yield from self._all_steps()
        except ChunkMissingError:
            # A failover may have lost the latest changes: then all steps, repeated, publish the rest.
            if self._send(self._staging.state_of, self.plan) != "open":
                raise
            yield from self._all_steps()

    def _all_steps(self) -> Steps:
        manifests = self.plan.manifests()
        # Store all manifests before any job is published: then all staged jobs are present, and are kept.
        begun: list[PublicationState] = []
        for first in range(0, len(manifests), QUEUES_PER_STEP):
            begun += self._begin(manifests[first : first + QUEUES_PER_STEP])
            yield []
        mine: list[PublicationState] = []
        for state in begun:
            found = state
            while found.status == "unfinished":
                # Another write of the application, to this queue, has priority.
                yield from self._publish([found.manifest])
                [found] = self._begin([self.plan.manifest(found.manifest.queue)])
            mine.append(found)
        finished = [state for state in mine if state.status == "done"]
        self.was_published = len(finished) == len(manifests)
        self.published_by = frozenset(state.manifest.write for state in finished)
        for state in finished:
            is_same = state.manifest.version == self.plan.version
            self.counts[state.manifest.queue] = state.counts if is_same else Counts()
        if finished:
            yield [
                QueueProgress(state.manifest, share_of(self.counts[state.manifest.queue], ended=True), True)
                for state in finished
            ]
        yield from self._publish([state.manifest for state in mine if state.status != "done"])

    def _begin(self, manifests: Sequence[Manifest]) -> list[PublicationState]:
        found: list[PublicationState] = self._send(self._staging.begin_all, manifests, self.plan.lifetime)
        return found

    def _publish(self, manifests: Sequence[Manifest]) -> Steps:
        chunks = [(manifest, *chunk) for manifest in manifests for chunk in chunks_of(manifest)]
        sizes = {manifest.queue: len(chunks_of(manifest)) for manifest in manifests}
        left = dict(sizes)
        counts = {manifest.queue: Counts() for manifest in manifests}
        for first in range(0, len(chunks), self._size):
            some = chunks[first : first + self._size]
            while self._wait(some):
                yield []
                self._renew(manifests)
            self._renew(manifests)
            answers = self._send(self._staging.publish_all, some)
            touched = {}
            for (manifest, _, _), answer in zip(some, answers, strict=True):
                counts[manifest.queue] += answer
                left[manifest.queue] -= 1
                touched[manifest.queue] = manifest
            yield [
                QueueProgress(manifest, share_of(counts[queue], sizes[queue], sizes[queue] - left[queue]))
                for queue, manifest in touched.items()
            ]
        for first in range(0, len(manifests), QUEUES_PER_STEP):
            ended = manifests[first : first + QUEUES_PER_STEP]
            totals = self._send(self._staging.end_all, ended)
            for manifest, total in zip(ended, totals, strict=True):
                self.counts[manifest.queue] = total
            yield [
                QueueProgress(one, share_of(total, sizes[one.queue], sizes[one.queue], ended=True))
                for one, total in zip(ended, totals, strict=True)
            ]

    def _renew(self, manifests: Sequence[Manifest]) -> None:
        """Keep what is staged from expiring, unless this happened lately."""
        if SYSTEM_CLOCK.monotonic() - self._renewed_at > RENEW_EVERY:
            self._renewed_at = SYSTEM_CLOCK.monotonic()
            for first in range(0, len(manifests), QUEUES_PER_STEP):
                self._begin(manifests[first : first + QUEUES_PER_STEP])

    def close(self) -> bool:
        """Delete what its failed tasks staged, and record that the plan is published.

        In this order, a sweep does both if this process dies in between.

        Returns:
            False if the server has lost some of the steps, in a failover for example: repeat them.
        """
        mark = token_hex(8)
        self._send(self._staging.mark, self.plan, mark)
        # What is published now was published before the mark, so a server that has the mark has all of it.
        return self._is_published() and self._close(mark)

    def _is_published(self) -> bool:
        manifests = self.plan.manifests()
        try:
            return all(
                state.status == "done"
                for first in range(0, len(manifests), QUEUES_PER_STEP)
                for state in self._begin(manifests[first : first + QUEUES_PER_STEP])
            )
        except ChunkMissingError:
            return False

    def _close(self, mark: str = "") -> bool:
        self._send(self._staging.forget_all, sorted(self.plan.queues), self.plan.owner, self.plan.write)
        is_closed: bool = self._send(self._staging.close, self.plan, self.counts, mark)
        return is_closed

    def give_up(self) -> None:
        """Close an incomplete plan with what is published of it. Its version is never published again."""
        for manifest in self.plan.manifests():
            try:
                [self.counts[manifest.queue]] = self._staging.end_all([manifest], partial=True)
            except ChunkMissingError:
                self.counts[manifest.queue] = Counts()  # Its publication never began.
        self._close()


def step_size(limit: int | None, jobs: int = CHUNK) -> int:
    """Return the maximum number of chunks in a step.

    Args:
        limit: Maximum number of pending jobs in a queue, or None.
        jobs: Maximum number of jobs in a chunk.
    """
    return CHUNKS_PER_STEP if limit is None else max(1, min(CHUNKS_PER_STEP, limit // jobs))


def share_of(counts: Counts, chunks: int = 0, published: int = 0, *, ended: bool = False) -> QueueShare:
    """Return a queue's part of a report."""
    known = counts.duplicates + counts.completed
    return QueueShare(chunks, published, counts.queued, known, ended, counts.rejected)


class AbandonedPlans:
    """Publishes the rest of plans whose publishers have fallen silent, some steps in each sweep.

    Args:
        staging: The staging area.
        reports: The reports of bulk writes.
        counts: Returns the number of jobs of a queue by state.
    """

    def __init__(
        self, staging: Staging, reports: BulkWriteReports, counts: Callable[[str], Mapping[State, int]]
    ) -> None:
        self._staging = staging
        self._reports = reports
        self._counts = counts
        self._adopted: dict[tuple[str, str], tuple[PlanPublisher, Steps]] = {}
        self._sent: Counter[str] = Counter()
        """Chunks of a plan published in this sweep, by queue; the counts of jobs may lag behind."""
        self._is_waiting = False
        """Whether the last step found no room."""
        self._lock = threading.Lock()

    def sweep(self) -> None:
        """Publish some steps. An incomplete plan is dropped, or left to the next write of its application."""
        if not self._lock.acquire(blocking=False):
            return  # Another thread is sweeping.
        try:
            self._sweep()
        finally:
            self._lock.release()

    def _sweep(self) -> None:
        room = PLANS_PER_SWEEP - len(self._adopted)
        for plan in self._staging.adopt(SILENCE, room) if room > 0 else ():
            size, wait = step_size(plan.limit), partial(self._has_no_room, plan)
            publication = PlanPublisher(self._staging, plan, wait=wait, size=size)
            self._adopted.setdefault((plan.app, plan.target), (publication, publication.steps()))
            logger.warning(
                "Publishing the rest of write %s (%s), because its driver is silent.", plan.write, plan.app
            )
        for key, (publication, steps) in list(self._adopted.items()):
            try:
                is_done = self._advance(publication, steps)
            except BaseException:
                # Any process, this one included, adopts the plan again after some time.
                del self._adopted[key]
                raise
            if is_done:
                del self._adopted[key]

    def _advance(self, publication: PlanPublisher, steps: Steps) -> bool:
        """Make some steps. Returns whether nothing is left to do."""
        staging, plan = self._staging, publication.plan
        staging.touch(plan)
        self._sent.clear()
        self._is_waiting = False
        try:
            for _ in range(STEPS_PER_SWEEP):
                if self._is_waiting:
                    # Other plans may have room, so let go of this one, and adopt it again later.
                    return len(self._adopted) >= PLANS_PER_SWEEP
                if next(steps, None) is None:
                    self._report(plan, DONE, publication.counts)
                    if not publication.close():
                        return True  # Another sweep adopts it again, and repeats what the server has lost.
                    logger.info("Published the rest of write %s (%s).", plan.write, plan.app)
                    return True
        except QueueFullError:
            return True  # Another sweep adopts it again, when the queue may have room.
        except ChunkMissingError as error:
            if staging.state_of(plan) != "open":
                return True  # The driver, which was only slow, has finished.
            left, counts = f"{type(error).__name__}: {error}", dict[str, Counts]()
            state = UNFINISHED
            if staging.drop(plan):
                state = FAILED
                logger.error(
                    "Dropped write %s (%s), of which nothing was published: %s", plan.write, plan.app, error
                )
            elif staging.leave(plan):
                publication.give_up()
                counts = publication.counts
                left += ". The rest was given up, since nobody can publish it"
                logger.error("Gave up the rest of write %s (%s): %s", plan.write, plan.app, error)
            else:
                logger.error("Write %s (%s) remains incomplete: %s", plan.write, plan.app, error)
            self._report(plan, state, counts, left)
            return True
        return False

    def _has_no_room(self, plan: Plan, chunks: Sequence[tuple[Manifest, str, int]]) -> bool:
        """Return whether the queue of one of these chunks has so many pending jobs that publishing waits."""
        if plan.limit is None:
            return False
        sizes = Counter(manifest.queue for manifest, _, _ in chunks)
        for queue in sizes:
            counts = self._counts(queue)
            pending = sum(counts[state] for state in PENDING)
            if pending + CHUNK * self._sent[queue] >= plan.limit:
                self._is_waiting = True
                return True
        self._sent += sizes
        return False

    def _report(self, plan: Plan, state: str, counts: Mapping[str, Counts], error: str = "") -> None:
        name = report_of(plan.write)
        known = self._reports.get(name)
        if known is None:
            if not plan.frame:
                return  # A batch of a stream, which adds to the stream's report when it is repeated.
            # The driver died before it saved a report, so the rows that it rejected are not known.
            app = name if plan.app == plan.write else plan.app
            rows = sum(count.queued + count.duplicates + count.completed for count in counts.values())
            known = BulkWriteReport(name, app, plan.version, SYSTEM_CLOCK.now(), rows=rows)
        shares = dict(known.shares)
        for queue, count in counts.items():
            chunks = sum(map(len, plan.queues[queue].values()))
            published = chunks if state == DONE else shares.get(queue, QueueShare()).published
            shares[queue] = share_of(count, chunks, published, ended=True)
        finished = SYSTEM_CLOCK.now() if state == DONE else 0
        self._reports.keep(known._replace(state=state, error=error, shares=shares, finished_at=finished))
