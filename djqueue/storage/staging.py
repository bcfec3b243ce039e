"""Stage jobs from many writers, and publish them as a whole or not at all.

Writers `stage` chunks of jobs that no worker can see. Each writer is a part of its own, including one that
repeats the work of another. The publisher lists the valid parts in a manifest, and publishes them chunk by
chunk. Once the manifest is stored, the write is committed: any later publisher finds and finishes it. Any
process can repeat any step after a crash, because a chunk is deleted in the same transaction that enqueues
its jobs.

A write belongs to an application and has a version. A version that was already published, or an earlier one,
is not published again. Delta Lake makes writes idempotent in the same way, with `txnAppId` and `txnVersion`.

A write may have many queues, each with a manifest of its own. Its plan has all of them: storing the plan
commits the whole write at one moment. If the publisher falls silent, a sweep publishes the rest; see
`djqueue.storage.publishing`.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from djqueue.core.errors import StorageError
from djqueue.core.job import Batch

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
    frame: str = ""
    """A fingerprint of the columns and options that turn rows into jobs."""
    run: str = ""
    """The run of the streaming query in which the write was committed, if any."""
    content: int = 0
    """A checksum of the jobs, whatever their order."""

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
        """Stage chunks of a part, idempotently. See `check_chunk` for their requirements.

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


def check_chunk(batches: Sequence[Batch]) -> None:
    """Raise ValueError unless these are at most `CHUNK` jobs with ids and the same queue and name."""
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
