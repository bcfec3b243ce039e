"""Stage jobs from many writers, and publish them as a whole or not at all.

Writers `stage` chunks of jobs that no worker can see. Each writer is a part of its own, including one that
repeats the work of another. The publisher lists the valid parts in a manifest, and publishes them chunk by
chunk. Once the manifest is stored, the write is committed: any later publisher finds and finishes it. Any
process can repeat any step after a crash, because a chunk is deleted in the same transaction that enqueues
its jobs.

A write belongs to an application and has a version. A version that was already published, or an earlier one,
is not published again. Delta Lake makes writes idempotent in the same way, with `txnAppId` and `txnVersion`.

A write may have many queues, each with a manifest of its own. Its plan has all of them: storing the plan
commits the whole write at one moment. The process that committed it publishes it, or a sweep if that process
falls silent. Any number of processes can repeat all steps at once, so a publisher that was only slow does no
harm.
"""

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import QueueFullError, StorageError
from djqueue.core.job import Batch
from djqueue.core.logs import Log
from djqueue.core.states import PENDING, State
from djqueue.storage.bulkwrites import (
    DONE,
    FAILED,
    UNFINISHED,
    BulkWriteReport,
    BulkWriteReports,
    QueueShare,
    report_of,
)

STAGE_TTL = 86_400_000
"""Milliseconds after which staged jobs that were never published expire."""
RESUMABLE = 7 * 86_400_000
"""Milliseconds for which an interrupted publication can be resumed."""
ONE_QUEUE = "\x1f"
"""Prefix of the application of manifests whose write was directed to one queue."""
CHUNK = 1_000
"""Maximum number of jobs in a chunk."""


class Counts(NamedTuple):
    """Results of the jobs of a write."""

    queued: int = 0
    duplicates: int = 0
    """Jobs whose id or unique key a live job already had."""
    completed: int = 0
    """Jobs whose id belongs to a completed job that is still retained."""
    rejected: int = 0
    """Jobs stored as dead letters."""

    @classmethod
    def of(cls, statuses: Iterable[str]) -> "Counts":
        """Count the values of `EnqueueResult.status`."""
        found = Counter(statuses)
        return cls(found["queued"], found["duplicate"], found["completed"], found["rejected"])

    def __add__(self, other: "Counts") -> "Counts":  # type: ignore[override]
        return Counts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Manifest(NamedTuple):
    """The contribution of one write to one queue."""

    queue: str
    app: str
    """The application; a write without one has a unique `app`."""
    version: int
    write: str
    """The name under which its parts were staged."""
    parts: Mapping[str, str]
    """For each part, the characters that `stage` returned for its chunks."""


class PublicationState(NamedTuple):
    """The progress of a manifest's publication."""

    status: str
    """new | resumed: this version was already started | done: it, or a later one, was published | unfinished:
    an earlier version was started, and must be finished first."""
    manifest: Manifest
    """The manifest to publish: the one started first, which may not be the caller's."""
    counts: Counts = Counts()
    """Counts of a finished publication, if still recorded."""


class Plan(NamedTuple):
    """A committed write with the manifests of all its queues."""

    app: str
    target: str
    """The queue that was named for the write, or "" if its rows name their queues. Writes of one application
    to different targets are independent."""
    version: int
    write: str
    queues: Mapping[str, Mapping[str, str]]
    """Parts by queue; see `Manifest.parts`. Empty once published."""
    lifetime: int | None = None
    """Milliseconds to remember that the write was published; None for ever."""
    limit: int | None = None
    """Number of pending jobs in a queue above which publishing waits."""
    is_batch: bool = False
    """Whether the write is a batch of a stream, which has one report for all of them."""

    @property
    def owner(self) -> str:
        """The application of its manifests, another one for writes that name their queue.

        Otherwise, a write to one queue would be taken for a part of one to many queues.
        """
        return f"{ONE_QUEUE}{self.app}" if self.target else self.app

    def manifest(self, queue: str) -> Manifest:
        """Return the manifest of a queue."""
        return Manifest(queue, self.owner, self.version, self.write, self.queues[queue])

    def manifests(self) -> list[Manifest]:
        """Return the manifest of each queue."""
        return [self.manifest(queue) for queue in sorted(self.queues)]


class PlanState(NamedTuple):
    """The progress of a plan."""

    status: str
    """new | resumed | done | unfinished, as for a publication."""
    plan: Plan
    """The plan that was committed first, which may not be the caller's."""
    counts: Mapping[str, Counts] = {}
    """Counts of a published plan by queue."""


class ChunkMissingError(StorageError):
    """A chunk in a manifest is missing, because it expired or the server lost it."""


class Staging(ABC):
    """The staging area of a storage that supports bulk writes."""

    @abstractmethod
    def stage_all(
        self,
        write: str,
        part: str,
        chunks: Sequence[Sequence[Batch]],
        staged: Mapping[str, int],
        lifetime: int = STAGE_TTL,
    ) -> dict[str, str]:
        """Stage chunks of a part, idempotently. See `check_chunks` for their requirements.

        Args:
            write: The write's name.
            part: The part's name.
            chunks: The jobs of each chunk. Chunks of one queue keep their order.
            staged: For each queue that had chunks before, the number of characters that the previous calls
                have returned for it.
            lifetime: Milliseconds from the part's first chunk in a queue until all of it expires.

        Returns:
            For each queue, the kinds of its chunks, for the manifest. A storage may store a chunk as
            several, and returns a character for each.

        Raises:
            ChunkMissingError: Chunks that the previous calls have staged expired or were lost.
        """

    @abstractmethod
    def commit(self, plan: Plan) -> PlanState:
        """Store a plan, unless one of its version is already stored. From then on, it will be published."""

    @abstractmethod
    def state_of(self, plan: Plan) -> str:
        """Return the state of a plan: open, done, or "" if no plan of this write is stored."""

    @abstractmethod
    def touch(self, plan: Plan) -> None:
        """Record that a plan is being published."""

    @abstractmethod
    def mark(self, plan: Plan, mark: str) -> None:
        """Mark an open plan before its publisher checks that all queues are published; see `close`."""

    @abstractmethod
    def close(self, plan: Plan, counts: Mapping[str, Counts], mark: str = "") -> bool:
        """Record that a plan is published, with the counts of its queues.

        Returns:
            False if the plan is open, but lacks this mark: the server has lost changes, in a failover for
            example.
        """

    def confirm(self, plan: Plan) -> bool:
        """Wait a limited time until replicas have a published plan, if the storage has any.

        Returns:
            False if a failover has lost it since: commit it again.
        """
        return True

    @abstractmethod
    def leave(self, plan: Plan) -> bool:
        """Keep an open plan that cannot be published from sweeps for `RESUMABLE`. `commit` still finds it.

        Returns:
            Whether it was left before, for the first time at least `RESUMABLE` ago.
        """

    @abstractmethod
    def drop(self, plan: Plan) -> bool:
        """Delete an open plan with its manifests and staged jobs, unless a chunk was published.

        Returns:
            False if a chunk was published, so that the plan stays.
        """

    @abstractmethod
    def withdraw(self, plan: Plan) -> bool:
        """Delete an open plan as `drop` does, unless a sweep has adopted it. Its publisher must have stopped.

        Returns:
            False if it is too late: a chunk was published, or a sweep publishes the plan.
        """

    @abstractmethod
    def adopt(self, silence: int, limit: int) -> list[Plan]:
        """Return open plans that were not touched for this many milliseconds, and touch them."""

    @abstractmethod
    def begin_all(self, manifests: Sequence[Manifest], lifetime: int | None) -> list[PublicationState]:
        """Store manifests of different queues, each unless one of its version is already stored.

        Args:
            manifests: The manifests.
            lifetime: Milliseconds to remember that they were published; None for ever.

        Raises:
            ChunkMissingError: A part, or some of its chunks, expired or was lost.
        """

    @abstractmethod
    def publish_all(self, chunks: Sequence[tuple[Manifest, str, int]]) -> list[Counts]:
        """Enqueue chunks in order, each identified by manifest, part and number.

        A chunk that was already published returns its original counts. If an error is raised, any of the
        chunks may be published.

        Raises:
            ChunkMissingError: A chunk expired or was lost.
            QueueFullError: The queue has no room for a chunk. One that is larger than MAX_SIZE fits as long
                as the queue is not full.
        """

    @abstractmethod
    def end_all(self, manifests: Sequence[Manifest], *, partial: bool = False) -> list[Counts]:
        """Record that manifests are published, and return their totals.

        Args:
            manifests: The manifests.
            partial: Whether their chunks may be unpublished, and are given up.

        Raises:
            ChunkMissingError: A manifest is not stored, or one of its chunks is not published. The server may
                have lost the latest changes, in a failover for example.
        """

    @abstractmethod
    def forget_all(self, queues: Sequence[str], app: str, write: str) -> int:
        """Delete the rest of a write in queues, unless its publication there has started and not ended.

        Returns:
            The number of deleted parts.
        """

    def stage(
        self, write: str, part: str, number: int, batches: Sequence[Batch], lifetime: int = STAGE_TTL
    ) -> str:
        """Stage one chunk, which has this number in its queue, as `stage_all` does."""
        staged = {batch.queue: number for batch in batches}
        [kinds] = self.stage_all(write, part, [batches], staged, lifetime).values()
        return kinds

    def begin(self, manifest: Manifest, lifetime: int | None) -> PublicationState:
        """Store a manifest, as `begin_all` does."""
        [found] = self.begin_all([manifest], lifetime)
        return found

    def publish(self, manifest: Manifest, chunks: Sequence[tuple[str, int]]) -> list[Counts]:
        """Enqueue chunks of one manifest, as `publish_all` does."""
        return self.publish_all([(manifest, *chunk) for chunk in chunks])

    def end(self, manifest: Manifest) -> Counts:
        """Record that all chunks of a manifest are published, as `end_all` does."""
        [found] = self.end_all([manifest])
        return found

    def forget(self, queue: str, app: str, write: str) -> int:
        """Delete the rest of a write in one queue, as `forget_all` does."""
        return self.forget_all([queue], app, write)


def check_chunks(chunks: Iterable[Sequence[Batch]]) -> None:
    """Raise ValueError unless each is at most `CHUNK` jobs with ids and the same queue and name."""
    for batches in chunks:
        if len({(batch.queue, batch.name) for batch in batches}) != 1:
            raise ValueError("all jobs of a chunk must have the same queue and name")
        if sum(len(batch.payloads) for batch in batches) > CHUNK:
            raise ValueError(f"a chunk can have at most {CHUNK} jobs")
        if any(batch.ids is None or len(batch.ids) != len(batch.payloads) for batch in batches):
            raise ValueError("all jobs of a chunk must have ids")


def chunks_of(manifest: Manifest) -> list[tuple[str, int]]:
    """Return all chunks of a manifest, in the order of publication."""
    return [(part, number) for part, kinds in manifest.parts.items() for number in range(len(kinds))]


def missing_error(manifest: Manifest, part: str, number: int) -> ChunkMissingError:
    """Return the error of a chunk that cannot be published."""
    return ChunkMissingError(
        f"queue {manifest.queue!r}: chunk {number} of part {part!r} of write {manifest.write!r} is missing: "
        "it expired or was evicted, or the write was published or withdrawn in the meantime"
    )


def lost_error(queue: str, write: str, part: str, lifetime: int) -> ChunkMissingError:
    """Return the error of a part whose first chunks are missing while others are staged."""
    return ChunkMissingError(
        f"queue {queue!r}: chunks that part {part!r} of write {write!r} staged before are missing: they "
        f"expired after {lifetime // 1_000} s (stageTtl), or the server lost them, for example in a restart. "
        "Run the task again"
    )


def unpublished_error(queue: str, write: str) -> ChunkMissingError:
    """Return the error of a manifest that cannot end."""
    return ChunkMissingError(
        f"queue {queue!r}: not all chunks of write {write!r} are published: the server has "
        "lost changes, for example by a failover"
    )


def gone_error(manifest: Manifest) -> ChunkMissingError:
    """Return the error of a manifest whose chunks are missing."""
    return ChunkMissingError(
        f"queue {manifest.queue!r}: the staged chunks of write {manifest.write!r} are missing: they "
        "expired (stageTtl), the server evicted or lost them, or another version was published meanwhile"
    )


logger = Log("djqueue.storage")

CHUNKS_PER_STEP = 64
"""Chunks to publish in one step."""
QUEUES_PER_STEP = 200
"""Manifests to store or end in one step."""
TAKEOVER_AFTER = 60_000
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
        for plan in self._staging.adopt(TAKEOVER_AFTER, room) if room > 0 else ():
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
            if plan.is_batch:
                return  # It adds to the report of its stream when it is repeated.
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
