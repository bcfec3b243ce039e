"""Publish staged chunks of the database: each is enqueued in the transaction that records its results."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import msgpack
from django.db.models import Count, Sum
from django.db.models.functions import Length

from djqueue.core.clock import Clock
from djqueue.core.errors import OptionError, QueueFullError
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.states import State
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
from djqueue.storage.tables.clock import set_right
from djqueue.storage.tables.dberrors import named
from djqueue.storage.tables.dialects import Dialect
from djqueue.storage.tables.rows import chunked

from .producer import enqueueing_chunk

AT_ONCE = 100
"""Chunks to delete, or manifests to store, in one transaction."""
TOGETHER, BYTES = 64, 256 * 1024
"""Maximum number of chunks published in one transaction, which a publisher sends at once, and their size."""
COUNTS = Counts._fields
Believed = dict[str, State | None]
"""States of jobs by their ids, as the tables have them."""


class DatabasePublications(Staging):
    """The part of the staging area that publishes manifests.

    Args:
        enqueue: The storage's function that inserts rows in the open transaction.
        settle: Brings the tables up to date for jobs of a queue whose states may be outdated.
        lock_timeout: Maximum of milliseconds to wait for a lock in PostgreSQL.
    """

    def __init__(
        self,
        dialect: Dialect,
        clock: Clock,
        enqueue: Callable[[Sequence[Batch]], list[EnqueueResult]],
        settle: Callable[[str, Mapping[str, State | None]], object],
        lock_timeout: int | None = None,
    ) -> None:
        self.dialect = self._dialect = dialect
        self._alias = dialect.alias
        self._clock = clock
        self._enqueue = enqueue
        self._settle = settle
        self._lock_timeout = lock_timeout

    def begin_all(self, manifests: Sequence[Manifest], lifetime: int | None) -> list[PublicationState]:
        """Store manifests, each unless one of its version is already stored."""
        found: list[PublicationState] = []
        for some in chunked(manifests, AT_ONCE):
            with self._writing() as now:
                found += self._begun(some, lifetime, now)
        return found

    def _begun(self, manifests: Sequence[Manifest], lifetime: int | None, now: int) -> list[PublicationState]:
        there = self._last(manifests, now)
        mine = [one for one in manifests if _gives_way(there.get((one.queue, one.app)), one)]
        opened = {(one.queue, one.app) for one in mine}
        while mine:
            self._keep(mine, now)
            self._open(mine, there, lifetime, now)
            found = self._last(mine, now)
            there |= found
            # Another process may have stored a publication first, and have dropped it since.
            mine = [one for one in mine if (one.queue, one.app) not in found]
        states = [
            _state_of(there[place], manifest, opened=place in opened)
            for manifest in manifests
            for place in [(manifest.queue, manifest.app)]
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
        place = {"queue__in": {one.queue for one in manifests}, "write__in": {one.write for one in manifests}}
        mine = self._publications(**place, done=False, expires_at__lte=soon)
        mine.update(expires_at=now + RESUMABLE)
        wanted = {(one.queue, one.write, part) for one in manifests for part in one.parts}
        parts = self._parts(**place, expires_at__gt=now, expires_at__lte=soon)
        found = parts.select_for_update().order_by("pk").values_list("pk", "queue", "write", "part")
        for pks in chunked([pk for pk, *part in found if tuple(part) in wanted]):
            self._parts(pk__in=pks).update(expires_at=now + RESUMABLE)

    def publish_all(self, chunks: Sequence[tuple[Manifest, str, int]]) -> list[Counts]:
        """Enqueue chunks in order: large ones each in a transaction of its own, small ones together."""
        found: list[Counts] = []
        with named(self._alias):
            places = self._places(chunks)
            # In the caller's transaction, the tables can't be brought up to date.
            locked = self._dialect.connection.in_atomic_block
            together = limit = 1 if locked else TOGETHER
            certain = locked
            while len(found) < len(chunks):
                some = chunks[len(found) : len(found) + together]
                try:
                    found += self._enqueued(places, some, certain=certain)
                    together, certain = limit, locked
                except _UncertainError as error:
                    together = error.together
                    for queue, believed in error.believed.items():
                        self._settle(queue, believed)
                        certain = True
        return found

    def end_all(self, manifests: Sequence[Manifest], *, partial: bool = False) -> list[Counts]:
        """Record that manifests are published."""
        found: list[Counts] = []
        for some in chunked(manifests, AT_ONCE):
            with self._writing() as now:
                found += self._ended(some, now, partial=partial)
        return found

    def _ended(self, manifests: Sequence[Manifest], now: int, *, partial: bool) -> list[Counts]:
        there = self._last(manifests, now)
        ended: dict[tuple[str, str], Any] = {}
        for manifest in manifests:
            row = there.get((manifest.queue, manifest.app))
            if row is None or row.version != manifest.version:
                raise gone_error(manifest)
            if not row.done:
                ended[row.queue, row.write] = row
        places = {"part__queue__in": {queue for queue, _ in ended}, "part__write__in": {w for _, w in ended}}
        published = self._chunks(**places).values_list("part__queue", "part__write").order_by()
        sums = {(queue, write): found for queue, write, *found in _summed(published)}
        changes: dict[int, Mapping[str, Any]] = {}
        for place, row in ended.items():
            number, counts = sums.get(place, (0, Counts()))
            if not partial and number < sum(map(len, msgpack.unpackb(row.parts).values())):
                raise unpublished_error(*place)
            expires_at = None if row.lifetime is None else now + row.lifetime
            changes[row.pk] = {"done": True, "parts": b"", "expires_at": expires_at, **counts._asdict()}
            for name, value in changes[row.pk].items():
                setattr(row, name, value)
        _update(self._publications(), changes)
        return [_counts(there[manifest.queue, manifest.app]) for manifest in manifests]

    @contextmanager
    def _writing(self) -> Iterator[int]:
        """Open a transaction, and yield the time."""
        with named(self._alias):
            set_right(self._clock)
            with self._dialect.transaction():
                self._limit_lock_waits()
                yield self._clock.now()

    def _limit_lock_waits(self) -> None:
        connection = self._dialect.connection
        if self._lock_timeout is not None and connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SELECT set_config('lock_timeout', %s, true)", [str(self._lock_timeout)])

    def _last(self, manifests: Sequence[Manifest], now: int) -> dict[tuple[str, str], Any]:
        """Return and lock the last publications of applications to queues, by queue and application."""
        places = {(manifest.queue, manifest.app) for manifest in manifests}
        queues, apps = {queue for queue, _ in places}, {app for _, app in places}
        rows = self._publications(queue__in=queues, app__in=apps).select_for_update().order_by("pk")
        found, expired = {}, []
        for row in rows:
            if (row.queue, row.app) not in places:
                continue
            if row.expires_at is not None and row.expires_at <= now:
                expired.append(row.pk)
            else:
                found[row.queue, row.app] = row
        if expired:
            self._publications(pk__in=expired).delete()
        return found

    def _keep(self, manifests: Sequence[Manifest], now: int) -> None:
        """Extend the lifetime of the manifests' parts. Raises ChunkMissingError if any of it has expired."""
        queues, writes = {one.queue for one in manifests}, {one.write for one in manifests}
        place = self._parts(queue__in=queues, write__in=writes, expires_at__gt=now)
        kept = {
            (queue, write, part): pk
            for pk, queue, write, part in place.select_for_update()
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
        there: Mapping[tuple[str, str], Any],
        lifetime: int | None,
        now: int,
    ) -> None:
        """Record the publications in place of earlier ones, unless others have started meanwhile."""
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
        earlier = [there[row.queue, row.app].pk for row in new if (row.queue, row.app) in there]
        if earlier:
            self._publications(pk__in=earlier).delete()
        rows.bulk_create(new, ignore_conflicts=True)

    def _places(self, chunks: Sequence[tuple[Manifest, str, int]]) -> dict[tuple[str, str, str], int]:
        """Return the primary keys of parts, by write, queue and name."""
        names: dict[str, dict[str, None]] = {}
        queues: dict[str, dict[str, None]] = {}
        for manifest, part, _ in chunks:
            names.setdefault(manifest.write, {})[part] = None
            queues.setdefault(manifest.write, {})[manifest.queue] = None
        found: dict[tuple[str, str, str], int] = {}
        for write, parts in names.items():
            for some in chunked([*queues[write]]):
                place = self._parts(write=write, queue__in=some)
                for few in chunked([*parts]):
                    for queue, part, pk in place.filter(part__in=few).values_list("queue", "part", "pk"):
                        found[write, queue, part] = pk
        return found

    def _enqueued(
        self,
        places: Mapping[tuple[str, str, str], int],
        chunks: Sequence[tuple[Manifest, str, int]],
        *,
        certain: bool,
    ) -> list[Counts]:
        """Publish the first of these chunks in one transaction, at least one and at most about `BYTES`.

        The tables lag behind the scheduler. If they report duplicates or a full queue, the caller brings them
        up to date and tries again, which is possible only outside the transaction.
        """
        with self._writing():
            counts, new = self._chosen(places, chunks)
            batches = self._staged(new.values())
            if len(new) > 1 and any(one.options.depends_on for some in batches.values() for one in some):
                # Jobs of one call may wait for one another, but each chunk is a call of its own.
                first = min(new)
                counts, new = counts[: first + 1], {first: new[first]}
            answers = self._answers(
                chunks, {place: batches[pk] for place, pk in new.items()}, certain=certain
            )
            changes: dict[int, Mapping[str, Any]] = {}
            for place, pk in new.items():
                counts[place] = Counts.of(answer.status for answer in answers[place])
                changes[pk] = {"jobs": b"", **counts[place]._asdict()}
            _update(self._chunks(), changes)
        return counts

    def _chosen(
        self, places: Mapping[tuple[str, str, str], int], chunks: Sequence[tuple[Manifest, str, int]]
    ) -> tuple[list[Counts], dict[int, int]]:
        """Lock the manifests and the first of these chunks, at least one and at most about `BYTES`.

        A manifest that is not open has been published, or was withdrawn with its plan.

        Returns:
            The counts of the chunks, and the primary keys of those that are not published, by their places.
        """
        wanted = [
            (places.get((manifest.write, manifest.queue, part)), number) for manifest, part, number in chunks
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
        for at, key in enumerate(wanted):
            row, manifest = found.get(key), manifests[at]
            if row is None or (row[4] is None and (manifest.queue, manifest.write) not in opened):
                if counts:
                    break  # Let the caller know after this transaction.
                raise missing_error(*chunks[at])
            pk, _, _, size, *known = row
            if known[0] is None:
                total += size
                if counts and total > BYTES:
                    break
                new[at] = pk
            counts.append(Counts(*(value or 0 for value in known)))
        return counts, new

    def _staged(self, pks: Iterable[int]) -> dict[int, list[Batch]]:
        """Return the jobs of chunks."""
        rows = self._chunks(pk__in=list(pks)).values_list("pk", "jobs")
        return {pk: wire.unpack(bytes(jobs)) for pk, jobs in rows}

    def _answers(
        self,
        chunks: Sequence[tuple[Manifest, str, int]],
        new: Mapping[int, Sequence[Batch]],
        *,
        certain: bool,
    ) -> dict[int, list[EnqueueResult]]:
        """Insert the jobs of chunks, and return the results by the places of the chunks."""
        places = list(new)
        all_batches = [batch for batches in new.values() for batch in batches]
        size = sum(len(batch.payloads) for batch in all_batches) if len(new) == 1 else 0
        try:
            with enqueueing_chunk(size):
                answers = iter(self._inserted(all_batches))
        except QueueFullError:
            if len(new) < 2 and certain:
                raise
            # One of the queues seems full, but the scheduler may know that jobs have left it.
            at = places[len(places) // 2]
            if at:
                raise _UncertainError(at, {}) from None  # Publish the chunks before it first.
            batch = new[at][0]
            waiting: Believed = {str((batch.ids or ("",))[0]): State.WAITING}
            raise _UncertainError(1, {batch.queue: waiting}) from None
        found: dict[int, list[EnqueueResult]] = {}
        uncertain: dict[str, Believed] = {}
        for at, batches in new.items():
            found[at] = list(islice(answers, sum(len(batch.payloads) for batch in batches)))
            believed = {one.id: one.existing_state for one in found[at] if one.status == "duplicate"}
            if believed and not certain:
                uncertain.setdefault(chunks[at][0].queue, {}).update(believed)
        if uncertain:
            raise _UncertainError(len(chunks), uncertain)
        return found

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
        return rows_of("StagedPart", self._alias).filter(**which)

    def _chunks(self, **which: Any) -> Any:
        return rows_of("StagedChunk", self._alias).filter(**which)

    def _publications(self, **which: Any) -> Any:
        return rows_of("Publication", self._alias).filter(**which)


class _UncertainError(Exception):
    """The tables reject jobs of some chunks, but may be outdated; raised to roll back the transaction.

    Args:
        together: Number of chunks to try next.
        believed: By queue, the jobs to bring up to date before.
    """

    def __init__(self, together: int, believed: Mapping[str, Believed]) -> None:
        super().__init__(together, believed)
        self.together = together
        self.believed = believed


def resumable_until(lifetime: int | None, now: int) -> int | None:
    """Return when an open plan or publication expires: never without a name, as it can't be resumed later."""
    return None if lifetime is None else now + RESUMABLE


def rows_of(name: str, alias: str) -> Any:
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


def _gives_way(there: Any, manifest: Manifest) -> bool:
    """Return whether a publication may start in place of the last one, if there is one."""
    return there is None or (there.done and there.version < manifest.version)


def _state_of(there: Any, manifest: Manifest, *, opened: bool) -> PublicationState:
    """Return the state of the publication that is recorded."""
    if opened and there.write == manifest.write:
        return PublicationState("new", manifest)
    parts = msgpack.unpackb(there.parts) if there.parts else {}
    found = manifest._replace(version=there.version, write=there.write, parts=parts)
    if there.done or there.version > manifest.version:
        return PublicationState("done", found, _counts(there))
    return PublicationState("resumed" if there.version == manifest.version else "unfinished", found)


def _counts(row: Any) -> Counts:
    return Counts(*(getattr(row, name) or 0 for name in COUNTS))
