"""Publish staged chunks: each is enqueued in the transaction that records its results."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgpack
from django.db import connections
from django.db.models import Count, Sum
from django.db.models.functions import Length

from djqueue.core.errors import OptionError, QueueFullError
from djqueue.core.job import Batch, EnqueueResult
from djqueue.storage import sparktables, wire
from djqueue.storage.staging import (
    RESUMABLE,
    Counts,
    Manifest,
    PublicationState,
    Staging,
    gone_error,
    missing_error,
    unpublished_error,
)
from djqueue.storage.tables import dialects as tables
from djqueue.storage.tables.clock import set_right
from djqueue.storage.tables.dberrors import named
from djqueue.storage.tables.rows import chunked

from . import enqueue

if TYPE_CHECKING:
    from .storage import DatabaseStorage

PER_TRANSACTION = 100
"""Chunks to delete, or manifests to store, in one transaction."""
CHUNKS, BYTES = 64, 256 * 1024
"""Maximum number of chunks published in one transaction, and their size."""
COUNTS = Counts._fields
PartKey = tuple[str, str, str]
"""The write, queue and name of a part."""


class Publications(Staging):
    """The part of the staging area that publishes manifests.

    Args:
        storage: The storage.
        lock_timeout: Maximum milliseconds to wait for a lock in PostgreSQL; None: as the connection says.
    """

    def __init__(self, storage: "DatabaseStorage", lock_timeout: int | None = None) -> None:
        self._storage = storage
        self._alias = storage.alias
        self._lock_timeout = lock_timeout

    def begin_all(self, manifests: Sequence[Manifest], lifetime: int | None) -> list[PublicationState]:
        states: list[PublicationState] = []
        for some in chunked(manifests, PER_TRANSACTION):
            with self._writing() as now:
                states += self._begin(some, lifetime, now)
        return states

    def _begin(self, manifests: Sequence[Manifest], lifetime: int | None, now: int) -> list[PublicationState]:
        latest = self._latest(manifests, now)
        mine = [one for one in manifests if _gives_way(latest.get((one.queue, one.app)), one)]
        opened = {(one.queue, one.app) for one in mine}
        while mine:
            self._keep(mine, now)
            self._open(mine, latest, lifetime, now)
            found = self._latest(mine, now)
            latest |= found
            # Another process may have stored a publication first, and have dropped it since.
            mine = [one for one in mine if (one.queue, one.app) not in found]
        states = [
            _state_of(latest[key], manifest, opened=key in opened)
            for manifest in manifests
            for key in [(manifest.queue, manifest.app)]
        ]
        self._renew([state.manifest for state in states if state.status in ("resumed", "unfinished")], now)
        return states

    def _renew(self, manifests: Sequence[Manifest], now: int) -> None:
        """Extend the lifetime of open publications and their parts, if half of it is over.

        What has just begun is not locked here: a process that began it, too, may hold its parts.
        """
        if not manifests:
            return
        soon = now + RESUMABLE // 2
        which = {"queue__in": {one.queue for one in manifests}, "write__in": {one.write for one in manifests}}
        mine = self._publications(**which, done=False, expires_at__lte=soon)
        mine.update(expires_at=now + RESUMABLE)
        wanted = {(one.queue, one.write, part) for one in manifests for part in one.parts}
        parts = self._parts(**which, expires_at__gt=now, expires_at__lte=soon)
        found = parts.select_for_update().order_by("pk").values_list("pk", "queue", "write", "part")
        for pks in chunked([pk for pk, *part in found if tuple(part) in wanted]):
            self._parts(pk__in=pks).update(expires_at=now + RESUMABLE)

    def publish_all(self, chunks: Sequence[tuple[Manifest, str, int]]) -> list[Counts]:
        """Enqueue chunks in order: large ones each in a transaction of its own, small ones together."""
        counts: list[Counts] = []
        with named(self._alias):
            parts = self._part_keys(chunks)
        together = CHUNKS
        while len(counts) < len(chunks):
            some = chunks[len(counts) : len(counts) + together]
            try:
                counts += self._publish(parts, some)
                together = CHUNKS
            except QueueFullError:
                if len(some) == 1:
                    raise
                together = len(some) // 2  # Publish the chunks before the one that does not fit.
        return counts

    def end_all(self, manifests: Sequence[Manifest], *, partial: bool = False) -> list[Counts]:
        totals: list[Counts] = []
        for some in chunked(manifests, PER_TRANSACTION):
            with self._writing() as now:
                totals += self._end(some, now, partial=partial)
        return totals

    def _end(self, manifests: Sequence[Manifest], now: int, *, partial: bool) -> list[Counts]:
        latest = self._latest(manifests, now)
        ended: dict[tuple[str, str], Any] = {}
        for manifest in manifests:
            row = latest.get((manifest.queue, manifest.app))
            if row is None or row.version != manifest.version:
                raise gone_error(manifest)
            if not row.done:
                ended[row.queue, row.write] = row
        which = {"part__queue__in": {queue for queue, _ in ended}, "part__write__in": {w for _, w in ended}}
        published = self._chunks(**which).values_list("part__queue", "part__write").order_by()
        sums = {(queue, write): found for queue, write, *found in _summed(published)}
        changes: dict[int, Mapping[str, Any]] = {}
        for key, row in ended.items():
            number, counts = sums.get(key, (0, Counts()))
            if not partial and number < sum(map(len, msgpack.unpackb(row.parts).values())):
                raise unpublished_error(*key)
            expires_at = None if row.lifetime is None else now + row.lifetime
            changes[row.pk] = {"done": True, "parts": b"", "expires_at": expires_at, **counts._asdict()}
            for name, value in changes[row.pk].items():
                setattr(row, name, value)
        _update(self._publications(), changes)
        return [_counts(latest[manifest.queue, manifest.app]) for manifest in manifests]

    @contextmanager
    def _writing(self) -> Iterator[int]:
        """Open a transaction, and yield the time."""
        with named(self._alias):
            set_right(self._storage.clock)
            with tables.dialect_for(self._alias).transaction():
                self._limit_lock_waits()
                yield self._storage.clock.now()

    def _limit_lock_waits(self) -> None:
        connection = connections[self._alias]
        if self._lock_timeout is not None and connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SELECT set_config('lock_timeout', %s, true)", [str(self._lock_timeout)])

    def _latest(self, manifests: Sequence[Manifest], now: int) -> dict[tuple[str, str], Any]:
        """Return and lock the latest publications of applications to queues, by queue and application."""
        keys = {(manifest.queue, manifest.app) for manifest in manifests}
        queues, apps = {queue for queue, _ in keys}, {app for _, app in keys}
        rows = self._publications(queue__in=queues, app__in=apps).select_for_update().order_by("pk")
        latest, expired = {}, []
        for row in rows:
            if (row.queue, row.app) not in keys:
                continue
            if row.expires_at is not None and row.expires_at <= now:
                expired.append(row.pk)
            else:
                latest[row.queue, row.app] = row
        if expired:
            self._publications(pk__in=expired).delete()
        return latest

    def _keep(self, manifests: Sequence[Manifest], now: int) -> None:
        """Extend the lifetime of the manifests' parts. Raises ChunkMissingError if any of it has expired."""
        queues, writes = {one.queue for one in manifests}, {one.write for one in manifests}
        parts = self._parts(queue__in=queues, write__in=writes, expires_at__gt=now)
        kept = {
            tuple(key): pk
            for pk, *key in parts.select_for_update()
            .order_by("pk")
            .values_list("pk", "queue", "write", "part")
        }
        wanted: dict[int, tuple[Manifest, int]] = {}
        for manifest in manifests:
            for part, kinds in manifest.parts.items():
                pk = kept.get((manifest.queue, manifest.write, part))
                if pk is None:
                    raise gone_error(manifest)
                wanted[pk] = manifest, len(kinds)
        for pks in chunked([*wanted]):
            chunks = self._chunks(part_id__in=pks).values_list("part_id").annotate(Count("pk")).order_by()
            sizes = dict(chunks)
            for pk in pks:
                manifest, size = wanted[pk]
                # A part that expired while its task was running has only the chunks staged since.
                if sizes.get(pk, 0) < size:
                    raise gone_error(manifest)
            self._parts(pk__in=pks).update(expires_at=now + RESUMABLE)

    def _open(
        self,
        manifests: Sequence[Manifest],
        latest: Mapping[tuple[str, str], Any],
        lifetime: int | None,
        now: int,
    ) -> None:
        """Record publications in place of earlier ones, unless others have started meanwhile."""
        rows = self._publications()
        new = [
            rows.model(
                queue=manifest.queue,
                app=manifest.app,
                version=manifest.version,
                write=manifest.write,
                parts=msgpack.packb(dict(manifest.parts)),
                done=False,
                lifetime=lifetime,
                expires_at=resumable_until(lifetime, now),
                **Counts()._asdict(),
            )
            for manifest in manifests
        ]
        earlier = [latest[row.queue, row.app].pk for row in new if (row.queue, row.app) in latest]
        if earlier:
            self._publications(pk__in=earlier).delete()
        rows.bulk_create(new, ignore_conflicts=True)

    def _part_keys(self, chunks: Sequence[tuple[Manifest, str, int]]) -> dict[PartKey, int]:
        """Return the primary keys of parts."""
        names: dict[str, dict[str, None]] = {}
        queues: dict[str, dict[str, None]] = {}
        for manifest, part, _ in chunks:
            names.setdefault(manifest.write, {})[part] = None
            queues.setdefault(manifest.write, {})[manifest.queue] = None
        found: dict[PartKey, int] = {}
        for write, parts in names.items():
            for some in chunked([*queues[write]]):
                mine = self._parts(write=write, queue__in=some)
                for few in chunked([*parts]):
                    for queue, part, pk in mine.filter(part__in=few).values_list("queue", "part", "pk"):
                        found[write, queue, part] = pk
        return found

    def _publish(
        self, parts: Mapping[PartKey, int], chunks: Sequence[tuple[Manifest, str, int]]
    ) -> list[Counts]:
        """Publish the first of these chunks in one transaction, at least one and at most about `BYTES`."""
        with self._writing():
            counts, new = self._choose(parts, chunks)
            batches = self._staged(new.values())
            if len(new) > 1 and any(one.options.depends_on for some in batches.values() for one in some):
                # Jobs of one call may wait for one another, but each chunk is a call of its own.
                first = min(new)
                counts, new = counts[: first + 1], {first: new[first]}
            answers = self._enqueue_all([batches[pk] for pk in new.values()])
            changes: dict[int, Mapping[str, Any]] = {}
            for (index, pk), mine in zip(new.items(), answers, strict=True):
                counts[index] = Counts.of(answer.status for answer in mine)
                changes[pk] = {"jobs": b"", **counts[index]._asdict()}
            _update(self._chunks(), changes)
        return counts

    def _choose(
        self, parts: Mapping[PartKey, int], chunks: Sequence[tuple[Manifest, str, int]]
    ) -> tuple[list[Counts], dict[int, int]]:
        """Lock the manifests and the first of these chunks, at least one and at most about `BYTES`.

        A manifest that is not open has been published, or was withdrawn with its plan.

        Returns:
            The counts of the chunks, and the primary keys of those that are not published, by their indexes.
        """
        wanted = [
            (parts.get((manifest.write, manifest.queue, part)), number) for manifest, part, number in chunks
        ]
        manifests = [manifest for manifest, _, _ in chunks]
        mine = self._publications(
            queue__in={one.queue for one in manifests}, write__in={one.write for one in manifests}, done=False
        )
        opened = set(mine.select_for_update().order_by("pk").values_list("queue", "write"))
        rows = self._chunks(part_id__in={pk for pk, _ in wanted}, number__in={number for _, number in wanted})
        sized = rows.annotate(size=Length("jobs")).select_for_update().order_by("pk")
        found = {
            (row[1], row[2]): row for row in sized.values_list("pk", "part_id", "number", "size", *COUNTS)
        }
        counts: list[Counts] = []
        new: dict[int, int] = {}
        total = 0
        for index, key in enumerate(wanted):
            row, manifest = found.get(key), manifests[index]
            if row is None or (row[4] is None and (manifest.queue, manifest.write) not in opened):
                if counts:
                    break  # Publish the chunks before it first.
                raise missing_error(*chunks[index])
            pk, _, _, size, *known = row
            if known[0] is None:
                total += size
                if counts and total > BYTES:
                    break
                new[index] = pk
            counts.append(Counts(*(value or 0 for value in known)))
        return counts, new

    def _staged(self, pks: Iterable[int]) -> dict[int, list[Batch]]:
        """Return the jobs of chunks."""
        rows = self._chunks(pk__in=list(pks)).values_list("pk", "jobs")
        return {pk: wire.unpack(bytes(jobs)) for pk, jobs in rows}

    def _enqueue_all(self, chunks: Sequence[Sequence[Batch]]) -> list[list[EnqueueResult]]:
        """Enqueue the jobs of chunks, and return the results of each chunk.

        A job whose dependency was deleted since it was staged becomes a dead letter, because its producer is
        no longer there to handle an error.
        """
        batches = [batch for chunk in chunks for batch in chunk]
        size = sum(len(batch.payloads) for batch in batches) if len(chunks) == 1 else 0
        try:
            answers = iter(self._enqueue(batches, size))
        except OptionError:
            answers = (answer for batch in batches for answer in self._enqueue_alone(batch, size))
        return [list(islice(answers, sum(len(batch.payloads) for batch in chunk))) for chunk in chunks]

    def _enqueue_alone(self, batch: Batch, size: int) -> list[EnqueueResult]:
        try:
            return self._enqueue([batch], size)
        except OptionError as error:
            rejected = (f"{OptionError.__module__}.{OptionError.__qualname__}", str(error))
            options = replace(
                batch.options, rejected=rejected, depends_on=(), unique_key=None, unique_ttl=None
            )
            answers = self._enqueue([batch._replace(options=options)], size)
            return [one._replace(status="queued") if one.status == "rejected" else one for one in answers]

    def _enqueue(self, batches: Sequence[Batch], size: int) -> list[EnqueueResult]:
        """Enqueue jobs in the open transaction; `size` is that of their chunk, if they are all of one."""
        if not batches:
            return []
        return self._storage.write(lambda tx: enqueue.enqueue(tx, batches, chunk=size))

    def _parts(self, **which: Any) -> Any:
        return rows_of("StagedPart", self._alias).filter(**which)

    def _chunks(self, **which: Any) -> Any:
        return rows_of("StagedChunk", self._alias).filter(**which)

    def _publications(self, **which: Any) -> Any:
        return rows_of("Publication", self._alias).filter(**which)


def resumable_until(lifetime: int | None, now: int) -> int | None:
    """Return when an open plan or publication expires: never without a name, as it can't be resumed later."""
    return None if lifetime is None else now + RESUMABLE


def rows_of(name: str, alias: str) -> Any:
    """Return the rows of a model of `djqueue.contrib.spark`."""
    return sparktables.spark_model(name).objects.using(alias)


def _update(rows: Any, changes: Mapping[int, Mapping[str, Any]]) -> None:
    """Update rows by primary key, those with equal values together."""
    alike: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for pk, values in changes.items():
        alike.setdefault(tuple(values.items()), []).append(pk)
    for same, pks in alike.items():
        for some in chunked(pks):
            rows.filter(pk__in=some).update(**dict(same))


def _summed(chunks: Any) -> Iterator[tuple[Any, ...]]:
    """Yield groups of chunks with the number of published ones and the sums of their counts."""
    sums = [Sum(name, default=0) for name in COUNTS]
    for *key, number, queued, duplicates, completed, rejected in chunks.annotate(Count("queued"), *sums):
        yield *key, number, Counts(int(queued), int(duplicates), int(completed), int(rejected))


def _gives_way(latest: Any, manifest: Manifest) -> bool:
    """Return whether a publication may start in place of the latest one, if there is one."""
    return latest is None or (latest.done and latest.version < manifest.version)


def _state_of(latest: Any, manifest: Manifest, *, opened: bool) -> PublicationState:
    """Return the state of the publication that is recorded."""
    if opened and latest.write == manifest.write:
        return PublicationState("new", manifest)
    parts = msgpack.unpackb(latest.parts) if latest.parts else {}
    found = manifest._replace(version=latest.version, write=latest.write, parts=parts)
    if latest.done or latest.version > manifest.version:
        return PublicationState("done", found, _counts(latest))
    return PublicationState("resumed" if latest.version == manifest.version else "unfinished", found)


def _counts(row: Any) -> Counts:
    return Counts(*(getattr(row, name) or 0 for name in COUNTS))
