"""Stage chunks in a table, and enqueue each in the transaction that records its results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgpack
from django.db.models import Sum

from djqueue.core.clock import Clock
from djqueue.core.errors import OptionError, QueueFullError
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.states import State
from djqueue.storage import sparktables, wire
from djqueue.storage.staging import (
    STAGE_TTL,
    ChunkMissingError,
    Counts,
    Manifest,
    PublicationState,
    Staging,
    check_chunk,
)
from djqueue.storage.tables.clock import set_right
from djqueue.storage.tables.dberrors import named
from djqueue.storage.tables.dialects import Dialect
from djqueue.storage.tables.rows import chunked

RESUMABLE = 7 * 86_400_000
"""Milliseconds for which an interrupted publication can be resumed."""
AT_ONCE = 100
"""Chunks to delete in one transaction."""
KIND = "j"
"""The kind of every chunk."""
COUNTS = Counts._fields


class DatabaseStaging(Staging):
    """The staging area in the database.

    Args:
        enqueue: The storage's function that inserts rows in the open transaction.
        settle: Brings the tables up to date for jobs of a queue whose states may be outdated.
    """

    def __init__(
        self,
        dialect: Dialect,
        clock: Clock,
        enqueue: Callable[[Sequence[Batch]], list[EnqueueResult]],
        settle: Callable[[str, Mapping[str, State | None]], object],
    ) -> None:
        self._dialect = dialect
        self._alias = dialect.alias
        self._clock = clock
        self._enqueue = enqueue
        self._settle = settle

    def stage(
        self, write: str, part: str, number: int, batches: Sequence[Batch], lifetime: int = STAGE_TTL
    ) -> str:
        """Stage a chunk of a part."""
        check_chunk(batches)
        jobs = wire.pack_body([_alike(batch) for batch in batches])
        mine = {"queue": batches[0].queue, "write": write, "part": part}
        with self._writing() as now:
            # Lock the part, so that deleting it meanwhile deletes all of its chunks.
            place = self._parts(**mine).select_for_update()
            there = place.first()
            if there is None:
                new = self._parts().model(**mine, expires_at=now + lifetime)
                self._parts().bulk_create([new], ignore_conflicts=True)
                there = place.get()
            chunk = self._chunks().model(part_id=there.pk, number=number, jobs=jobs)
            self._chunks().bulk_create([chunk], ignore_conflicts=True)
        return KIND

    def begin(self, manifest: Manifest, lifetime: int | None) -> PublicationState:
        """Store a manifest, unless one of its version is already stored."""
        with self._writing() as now:
            there = self._publication(manifest, now)
            if there is None or (there.done and there.version < manifest.version):
                self._keep(manifest, now)
                self._open(manifest, lifetime, now)
                there = self._publication(manifest, now)
                assert there is not None
                if there.write == manifest.write:
                    return PublicationState("new", manifest)
            found = manifest._replace(
                version=there.version,
                write=there.write,
                parts=msgpack.unpackb(there.parts) if there.parts else {},
            )
            if there.done or there.version > manifest.version:
                return PublicationState("done", found, _counts(there))
            return PublicationState("resumed" if there.version == manifest.version else "unfinished", found)

    def publish(self, manifest: Manifest, chunks: Sequence[tuple[str, int]]) -> list[Counts]:
        """Enqueue chunks in order, each in a transaction of its own."""
        with named(self._alias):
            places = self._places(manifest, sorted({part for part, _ in chunks}))
            return [self._published(manifest, places, chunk) for chunk in chunks]

    def end(self, manifest: Manifest) -> Counts:
        """Record that all chunks of a manifest are published."""
        with self._writing() as now:
            there = self._publication(manifest, now)
            if there is None or there.version != manifest.version:
                raise _gone(manifest)
            if not there.done:
                sums = self._chunks(part__queue=there.queue, part__write=there.write).aggregate(
                    **{name: Sum(name, default=0) for name in COUNTS}
                )
                there.done, there.parts = True, b""
                there.expires_at = None if there.lifetime is None else now + there.lifetime
                for name, value in sums.items():
                    setattr(there, name, int(value))
                there.save(using=self._alias)
            return _counts(there)

    def forget(self, queue: str, app: str, write: str) -> int:
        """Delete the rest of a write, unless it is being published."""
        mine = {"queue": queue, "write": write}
        try:
            with self._writing():
                # Expire the parts first: a publication that starts meanwhile keeps them, or is seen below.
                parts: int = self._parts(**mine).update(expires_at=0)
                if self._publications(queue=queue, app=app, write=write, done=False).exists():
                    raise _Begun
        except _Begun:
            return 0
        with named(self._alias):
            while _drop(self._dialect, self._parts(**mine, expires_at=0)):
                pass
        return parts

    @contextmanager
    def _writing(self) -> Iterator[int]:
        """Open a transaction, and yield the time."""
        with named(self._alias):
            set_right(self._clock)
            with self._dialect.transaction():
                yield self._clock.now()

    def _publication(self, manifest: Manifest, now: int) -> Any:
        """Return and lock the application's last publication to the queue."""
        place = self._publications(queue=manifest.queue, app=manifest.app)
        there = place.select_for_update().first()
        if there is not None and there.expires_at is not None and there.expires_at <= now:
            there.delete()
            return None
        return there

    def _keep(self, manifest: Manifest, now: int) -> None:
        """Extend the lifetime of a manifest's parts. Raises ChunkMissingError if any has expired."""
        place = self._parts(queue=manifest.queue, write=manifest.write, expires_at__gt=now)
        kept = 0
        for names in chunked(sorted(manifest.parts)):
            kept += place.filter(part__in=names).update(expires_at=now + RESUMABLE)
        if kept < len(manifest.parts):
            raise _gone(manifest)

    def _open(self, manifest: Manifest, lifetime: int | None, now: int) -> None:
        """Record the publication in place of an earlier one, unless another has started meanwhile."""
        said = {
            "version": manifest.version,
            "write": manifest.write,
            "parts": msgpack.packb(dict(manifest.parts)),
            "done": False,
            "lifetime": lifetime,
            # A publication without an application can't be resumed later.
            "expires_at": None if lifetime is None else now + RESUMABLE,
            **Counts()._asdict(),
        }
        mine = {"queue": manifest.queue, "app": manifest.app}
        if not self._publications(**mine, done=True).update(**said):
            rows = self._publications()
            rows.bulk_create([rows.model(**mine, **said)], ignore_conflicts=True)

    def _places(self, manifest: Manifest, names: Sequence[str]) -> dict[str, int]:
        """Return the primary keys of parts, by name."""
        place = self._parts(queue=manifest.queue, write=manifest.write)
        found: dict[str, int] = {}
        for some in chunked(names):
            found.update(place.filter(part__in=some).values_list("part", "pk"))
        return found

    def _published(self, manifest: Manifest, places: Mapping[str, int], chunk: tuple[str, int]) -> Counts:
        """Publish one chunk.

        The tables lag behind the scheduler. If they report duplicates or a full queue, bring them up to date
        and try again, which is possible only outside the transaction.
        """
        try:
            # In the caller's transaction, the tables can't be brought up to date.
            locked = self._dialect.connection.in_atomic_block
            return self._enqueued(manifest, places, chunk, certain=locked)
        except _UncertainError as error:
            self._settle(manifest.queue, error.believed)
        return self._enqueued(manifest, places, chunk, certain=True)

    def _enqueued(
        self, manifest: Manifest, places: Mapping[str, int], chunk: tuple[str, int], *, certain: bool
    ) -> Counts:
        part, number = chunk
        with self._writing():
            row = self._chunks(part_id=places.get(part), number=number).select_for_update().first()
            if row is None:
                raise ChunkMissingError(
                    f"queue {manifest.queue!r}: chunk {number} of part {part!r} of write "
                    f"{manifest.write!r} is missing: the chunk expired, or another process published the "
                    "write"
                )
            if row.queued is not None:
                return _counts(row)
            batches = wire.unpack(bytes(row.jobs))
            try:
                answers = self._inserted(batches)
            except QueueFullError:
                if certain:
                    raise
                # The queue seems full, but the scheduler may know that jobs have left it.
                raise _UncertainError({batches[0].ids[0]: State.WAITING}) from None
            believed = {one.id: one.existing_state for one in answers if one.status == "duplicate"}
            if believed and not certain:
                raise _UncertainError(believed)
            counts = Counts.of(answer.status for answer in answers)
            self._chunks(pk=row.pk).update(jobs=b"", **counts._asdict())
        return counts

    def _inserted(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Insert jobs, and return their results.

        A job whose dependency was deleted since it was staged becomes a dead letter, because its producer is
        no longer there to handle an error.
        """
        try:
            return self._enqueue(batches)
        except OptionError:
            return [answer for batch in batches for answer in self._inserted_alone(batch)]

    def _inserted_alone(self, batch: Batch) -> list[EnqueueResult]:
        try:
            return self._enqueue([batch])
        except OptionError as error:
            said = (f"{OptionError.__module__}.{OptionError.__qualname__}", str(error))
            job = replace(batch.options, rejected=said, depends_on=(), unique_key=None, unique_ttl=None)
            answers = self._enqueue([batch._replace(options=job)])
            return [one._replace(status="queued") if one.status == "rejected" else one for one in answers]

    def _parts(self, **which: Any) -> Any:
        return _rows("StagedPart", self._alias).filter(**which)

    def _chunks(self, **which: Any) -> Any:
        return _rows("StagedChunk", self._alias).filter(**which)

    def _publications(self, **which: Any) -> Any:
        return _rows("Publication", self._alias).filter(**which)


def purge(dialect: Dialect, now: int, limit: int) -> int:
    """Delete expired chunks, parts and publications, at most about `limit`. Returns the number of rows."""
    if not sparktables.are_installed():
        return 0
    gone = _drop(dialect, _rows("StagedPart", dialect.alias).filter(expires_at__lte=now))
    over = _rows("Publication", dialect.alias).filter(expires_at__lte=now)
    deleted: int = over.filter(pk__in=list(over.values_list("pk", flat=True)[:limit])).delete()[0]
    return gone + deleted


def _drop(dialect: Dialect, parts: Any) -> int:
    """Delete chunks of these parts, and parts without chunks. Returns the number of rows."""
    with dialect.transaction():
        mine = list(parts.select_for_update().order_by("pk").values_list("pk", flat=True)[:AT_ONCE])
        chunks = _rows("StagedChunk", dialect.alias)
        some = list(chunks.filter(part_id__in=mine).values_list("pk", flat=True)[:AT_ONCE])
        gone: int = chunks.filter(pk__in=some).delete()[0]
        if len(some) < AT_ONCE:
            gone += parts.filter(pk__in=mine).delete()[0]
    return gone


class _Begun(Exception):
    """The write to forget is being published."""


class _UncertainError(Exception):
    """The tables reject jobs of a chunk, but may be outdated; raised to roll back the transaction."""

    def __init__(self, believed: dict[str, State | None]) -> None:
        super().__init__(believed)
        self.believed = believed


def _alike(batch: Batch) -> Batch:
    """Normalize a batch for storage. `durable=False` has no effect here, so drop it."""
    options = batch.options if batch.options.durable is not False else replace(batch.options, durable=None)
    return batch._replace(payloads=list(batch.payloads), ids=list(batch.ids or ()), options=options)


def _rows(name: str, alias: str) -> Any:
    return sparktables.spark_model(name).objects.using(alias)


def _counts(row: Any) -> Counts:
    return Counts(*(getattr(row, name) or 0 for name in COUNTS))


def _gone(manifest: Manifest) -> ChunkMissingError:
    return ChunkMissingError(
        f"queue {manifest.queue!r}: the staged chunks of write {manifest.write!r} are missing: they "
        "expired, or another version was published in the meantime"
    )
