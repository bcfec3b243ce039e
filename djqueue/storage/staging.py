"""Jobs that are put aside first and come all together, or not at all: for many writers and one publisher.

Writers `stage` chunks of jobs, privately; each writer, also one that does another's work again, is a part of
its own. The publisher says in a manifest which parts count, and publishes them chunk by chunk. Storing the
manifest is the point from which the write will be there: whoever comes next finds and finishes it. Every step
may be repeated, by anybody, after any crash: a chunk's jobs come in the step in which the chunk goes.

A write belongs to an application, and has a version: a version that was published before, or an earlier one,
is published no more. This is how Delta Lake makes writes idempotent (its `txnAppId` and `txnVersion`).
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from djqueue.core.errors import StorageError
from djqueue.core.job import Batch

STAGE_TTL = 86_400_000
"""Milliseconds after which what was put aside and never published goes."""
CHUNK = 1_000
"""The most jobs of a chunk."""


class Counts(NamedTuple):
    """What became of the jobs of a write."""

    queued: int = 0
    duplicates: int = 0
    """Whose ids or unique keys live jobs had."""
    completed: int = 0
    """Whose ids had completed, and are remembered."""
    rejected: int = 0
    """That are dead letters from the start."""

    @classmethod
    def of(cls, statuses: Iterable[str]) -> "Counts":
        """The counts of `EnqueueResult.status`."""
        found = Counter(statuses)
        return cls(found["queued"], found["duplicate"], found["completed"], found["rejected"])

    def __add__(self, other: "Counts") -> "Counts":  # type: ignore[override]
        return Counts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Manifest(NamedTuple):
    """What one write brings to one queue."""

    queue: str
    app: str
    """Whose write it is; one that is nobody's has an `app` of its own."""
    version: int
    write: str
    """The name under which its parts were put aside."""
    parts: Mapping[str, str]
    """For each chunk of each part the letter that `stage` answered."""


class PublicationState(NamedTuple):
    """How the publication of a manifest stands."""

    status: str
    """new | resumed: this version had been begun | done: it, or a later one, was published | unfinished: an
    earlier version has been begun, and comes first."""
    manifest: Manifest
    """What is to be published: the one that was begun first, which need not be the caller's."""
    counts: Counts = Counts()
    """Of one that is done, if it is still known."""


class ChunkMissingError(StorageError):
    """A chunk that a manifest names is gone: it expired, or the server has dropped it."""


class Staging(ABC):
    """What a storage offers that can be staged in."""

    @abstractmethod
    def stage(
        self, write: str, part: str, number: int, batches: Sequence[Batch], lifetime: int = STAGE_TTL
    ) -> str:
        """Put a chunk of a part aside: see `check_chunk`. Saying it again changes nothing.

        lifetime: milliseconds from the part's first chunk until all of it expires.

        Returns a letter, for the manifest: the kind of the chunk.
        """

    @abstractmethod
    def begin(self, manifest: Manifest, lifetime: int | None) -> PublicationState:
        """Store a manifest, unless one of its version is there.

        lifetime: milliseconds for which it is known that it was published; None: for ever.
        """

    @abstractmethod
    def publish(self, manifest: Manifest, chunks: Sequence[tuple[str, int]]) -> list[Counts]:
        """Enqueue chunks, each named by its part and number, in order.

        Those that had been published answer as they did then.
        Raises ChunkMissingError, and QueueFullError if there is no room; earlier chunks are published then.
        """

    @abstractmethod
    def end(self, manifest: Manifest) -> Counts:
        """Note that all of a manifest's chunks are published."""

    @abstractmethod
    def forget(self, queue: str, app: str, write: str) -> int:
        """Let go of what is left of a write, unless its publication has begun and not ended.

        Returns the number of its parts.
        """


def check_chunk(batches: Sequence[Batch]) -> None:
    """Raise ValueError unless these are at most `CHUNK` jobs of one queue and name, all of them with ids."""
    if len({(batch.queue, batch.name) for batch in batches}) != 1:
        raise ValueError("the jobs of a chunk have one queue and one name")
    if sum(len(batch.payloads) for batch in batches) > CHUNK:
        raise ValueError(f"a chunk has at most {CHUNK} jobs")
    if any(batch.ids is None or len(batch.ids) != len(batch.payloads) for batch in batches):
        raise ValueError("the jobs of a chunk have ids")


def chunks_of(manifest: Manifest) -> list[tuple[str, int]]:
    """All chunks that a manifest names, in the order in which they are published."""
    return [(part, number) for part, kinds in manifest.parts.items() for number in range(len(kinds))]
