"""Stage the chunks of bulk writes in tables, and publish them.

The plans of committed writes are kept until their chunks are published: each is enqueued in the transaction
that records its results.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import msgpack
from django.db import connections
from django.db.models import Count, Q, Sum
from django.db.models.functions import Length

from djqueue.core.errors import OptionError, QueueFullError
from djqueue.core.job import Batch, EnqueueResult
from djqueue.storage import sparktables, wire
from djqueue.storage.facets import Reads
from djqueue.storage.staging import (
    RESUMABLE,
    STAGE_TTL,
    AbandonedPlans,
    Counts,
    Manifest,
    Plan,
    PlanState,
    PublicationState,
    Staging,
    check_chunks,
    gone_error,
    lost_error,
    missing_error,
    unpublished_error,
)
from djqueue.storage.tables import dialects as tables
from djqueue.storage.tables.clock import set_right
from djqueue.storage.tables.dberrors import named
from djqueue.storage.tables.rows import chunked

from . import enqueue
from .bulkwrites import SqlBulkWriteReports
from .transaction import Database

PER_TRANSACTION = 100
"""Chunks to delete, or manifests to store, in one transaction."""
CHUNKS, BYTES = 64, 256 * 1024
"""Maximum number of chunks published in one transaction, and their size."""
LOCK_TIMEOUT = 1_000
"""Maximum milliseconds that a sweep waits for a lock: a driver that is frozen may hold it for hours."""
KIND = "j"
"""The kind of every chunk."""
EXPIRED = 1_000
"""Rows of expired writes that one step of a sweep deletes."""
STEPS = 10
"""Such steps in one sweep."""
COUNTS = Counts._fields
PartKey = tuple[str, str, str]
"""The write, queue and name of a part."""


class SqlStaging(Staging):
    """The staging area in the tables of `djqueue.contrib.spark`.

    Args:
        database: The database.
        lock_timeout: Maximum milliseconds to wait for a lock in PostgreSQL; None: as the connection says.
    """

    def __init__(self, database: Database, lock_timeout: int | None = None) -> None:
        self._database = database
        self._alias = database.alias
        self._lock_timeout = lock_timeout

    def stage_all(
        self,
        write: str,
        part: str,
        chunks: Sequence[Sequence[Batch]],
        staged: Mapping[str, int],
        lifetime: int = STAGE_TTL,
    ) -> dict[str, str]:
        check_chunks(chunks)
        kinds: dict[str, str] = {}
        for some in chunked(chunks, PER_TRANSACTION):
            new: list[tuple[str, int, bytes]] = []
            for batches in some:
                queue = batches[0].queue
                number = staged.get(queue, 0) + len(kinds.get(queue, ""))
                new.append((queue, number, wire.pack_body([_as_staged(batch) for batch in batches])))
                kinds[queue] = kinds.get(queue, "") + KIND
            with self._writing() as now:
                parts = self._open_parts({queue for queue, _, _ in new}, write, part, staged, now, lifetime)
                rows = self._chunks()
                rows.bulk_create(
                    [
                        rows.model(part_id=parts[queue], number=number, jobs=jobs)
                        for queue, number, jobs in new
                    ],
                    ignore_conflicts=True,
                )
        return kinds

    def _open_parts(
        self, queues: Set[str], write: str, part: str, staged: Mapping[str, int], now: int, lifetime: int
    ) -> dict[str, int]:
        """Return the primary keys of a part's rows by queue, and lock them.

        Because of the lock, whoever deletes a part meanwhile deletes all of its chunks.
        """
        mine = self._parts(queue__in=queues, write=write, part=part).select_for_update().order_by("pk")
        found: dict[str, int] = {}
        valid: set[str] = set()
        for queue, pk, expires_at in mine.values_list("queue", "pk", "expires_at"):
            found[queue] = pk
            if expires_at > now:
                valid.add(queue)
        for queue in sorted(queues - valid):
            if staged.get(queue, 0):
                raise lost_error(queue, write, part, lifetime)
        if missing := sorted(queues - found.keys()):
            rows = self._parts()
            new = [
                rows.model(queue=queue, write=write, part=part, expires_at=now + lifetime)
                for queue in missing
            ]
            rows.bulk_create(new, ignore_conflicts=True)
            found |= mine.filter(queue__in=missing).values_list("queue", "pk")
        return found

    def commit(self, plan: Plan) -> PlanState:
        with self._writing() as now:
            latest = self._latest_plan(plan, now)
            # Another process may store a plan first, and drop it at once.
            while latest is None or (latest.done and latest.version < plan.version):
                values = {
                    "version": plan.version,
                    "write": plan.write,
                    "queues": msgpack.packb({name: dict(parts) for name, parts in plan.queues.items()}),
                    "limit": plan.limit,
                    "is_batch": plan.is_batch,
                    "done": False,
                    "counts": b"",
                    "lifetime": plan.lifetime,
                    "touched_at": now,
                    "adopted": False,
                    "left_at": None,
                    "expires_at": resumable_until(plan.lifetime, now),
                }
                if latest is not None:
                    self._plans(pk=latest.pk).update(**values)
                else:
                    rows = self._plans()
                    new = rows.model(app=plan.app, target=plan.target, **values)
                    rows.bulk_create([new], ignore_conflicts=True)
                latest = self._latest_plan(plan, now)
            found = _plan_of(latest)
            if latest.done or latest.version > plan.version:
                counts = msgpack.unpackb(latest.counts) if latest.counts else {}
                return PlanState("done", found, {name: Counts(*each) for name, each in counts.items()})
            self._plans(pk=latest.pk).update(touched_at=now)
            if latest.version != plan.version:
                return PlanState("unfinished", found)
            return PlanState("new" if latest.write == plan.write else "resumed", found)

    def state_of(self, plan: Plan) -> str:
        with named(self._alias):
            mine = self._plans(app=plan.app, target=plan.target, write=plan.write)
            done = mine.values_list("done", flat=True).first()
        return "" if done is None else "done" if done else "open"

    def touch(self, plan: Plan) -> None:
        with self._writing() as now:
            # A plan that is still being published must not expire, even if this takes a week.
            expires_at = resumable_until(plan.lifetime, now)
            touched = self._open_plan(plan).filter(touched_at__isnull=False)
            touched.update(touched_at=now, expires_at=expires_at)

    def mark(self, plan: Plan, mark: str) -> None:
        """Do nothing: only the check that follows notices a failover of PostgreSQL."""

    def close(self, plan: Plan, counts: Mapping[str, Counts], mark: str = "") -> bool:
        packed = msgpack.packb({queue: list(each) for queue, each in counts.items()})
        with self._writing() as now:
            self._open_plan(plan).update(
                done=True,
                queues=b"",
                counts=packed,
                touched_at=None,
                expires_at=None if plan.lifetime is None else now + plan.lifetime,
            )
        return True

    def leave(self, plan: Plan) -> bool:
        with self._writing() as now:
            stored = self._open_plan(plan).select_for_update().first()
            if stored is None:
                return False
            if stored.left_at is not None and stored.left_at <= now - RESUMABLE:
                return True
            stored.left_at = now if stored.left_at is None else stored.left_at
            stored.touched_at = now + RESUMABLE
            stored.save(using=self._alias, update_fields=["left_at", "touched_at"])
        return False

    def drop(self, plan: Plan) -> bool:
        return self._drop_plan(plan, self._open_plan(plan))

    def withdraw(self, plan: Plan) -> bool:
        return self._drop_plan(plan, self._open_plan(plan).filter(adopted=False))

    def _drop_plan(self, plan: Plan, which: Any) -> bool:
        with self._writing():
            # Lock the plan, so that no sweep adopts it, and its manifests, so that nobody publishes a chunk.
            if which.select_for_update().first() is None:
                return False
            mine = self._publications(app=plan.owner, write=plan.write, version=plan.version, done=False)
            mine = mine.select_for_update().order_by("pk").values_list("pk", flat=True)
            begun = set(mine)
            parts = self._parts(write=plan.write).select_for_update().order_by("pk")
            staged = list(parts.values_list("pk", flat=True))
            # Other publishers begun before they had to wait for these locks.
            begun.update(mine.all())
            published = self._chunks(part__write=plan.write, queued__isnull=False)
            if published.exists() or self._publications(write=plan.write, done=True).exists():
                return False
            for pks in chunked([*begun]):
                self._publications(pk__in=pks).delete()
            # From now on, nobody can begin.
            for pks in chunked(staged):
                self._parts(pk__in=pks).update(expires_at=0)
            self._open_plan(plan).delete()
        self.forget_all(sorted(plan.queues), plan.owner, plan.write)
        return True

    def adopt(self, silence: int, limit: int) -> list[Plan]:
        clock = self._database.clock
        with named(self._alias):
            set_right(clock)
            now = clock.now()
            # A sign of life that lies in the future is from before the clock was set back.
            is_silent, is_ahead = Q(touched_at__lte=now - silence), Q(touched_at__gt=now, left_at=None)
            plans = self._plans(done=False).filter(is_silent | is_ahead).order_by("touched_at")
            found = list(plans[:limit])
        adopted: list[Plan] = []
        if not found:
            return adopted
        with self._writing():
            for row in found:
                is_late = row.touched_at <= now
                values = {"touched_at": now, "adopted": True} if is_late else {"touched_at": now}
                # Only one of several sweeps updates the row.
                mine = self._plans(pk=row.pk, done=False, touched_at=row.touched_at)
                if mine.update(**values) and is_late:
                    adopted.append(_plan_of(row))
        return adopted

    def forget_all(self, queues: Sequence[str], app: str, write: str) -> int:
        parts = large = 0
        for some in chunked(queues, PER_TRANSACTION):
            with self._writing():
                mine = self._parts(queue__in=some, write=write)
                # Lock the parts first: a publication that starts meanwhile keeps them, or is seen below.
                found = list(mine.select_for_update().order_by("pk").values_list("pk", "queue"))
                open_ones = self._publications(queue__in=some, app=app, write=write, done=False)
                begun = set(open_ones.values_list("queue", flat=True))
                unused = [pk for pk, queue in found if queue not in begun]
                parts += len(unused)
                for pks in chunked(unused):
                    small = self._small(pks)
                    self._parts(pk__in=small).delete()
                    large += self._parts(pk__in=[pk for pk in pks if pk not in small]).update(expires_at=0)
        with named(self._alias):
            while large and _delete_some(self._alias, self._parts(write=write, expires_at=0)):
                pass
        return parts

    def _small(self, parts: Sequence[int]) -> set[int]:
        """Return those parts that are quickly deleted, because they have few chunks, all of them empty."""
        counts = self._chunks(part_id__in=parts).values_list("part_id").annotate(Count("pk"), Count("queued"))
        return {pk for pk, chunks, published in counts if chunks == published and chunks <= PER_TRANSACTION}

    def _latest_plan(self, plan: Plan, now: int) -> Any:
        """Return and lock the latest plan of an application for a target."""
        latest = self._plans(app=plan.app, target=plan.target).select_for_update().first()
        if latest is not None and latest.expires_at is not None and latest.expires_at <= now:
            latest.delete()
            return None
        return latest

    def _open_plan(self, plan: Plan) -> Any:
        mine = {"app": plan.app, "target": plan.target, "version": plan.version, "write": plan.write}
        return self._plans(**mine, done=False)

    def _plans(self, **which: Any) -> Any:
        return rows_of("StagedWrite", self._alias).filter(**which)

    # Publications.

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
            set_right(self._database.clock)
            with tables.dialect_for(self._alias).transaction():
                self._limit_lock_waits()
                yield self._database.clock.now()

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
            answers = self._enqueue([batch._replace(options=batch.options.refused(error))], size)
            return [one._replace(status="queued") if one.status == "rejected" else one for one in answers]

    def _enqueue(self, batches: Sequence[Batch], size: int) -> list[EnqueueResult]:
        """Enqueue jobs in the open transaction; `size` is that of their chunk, if they are all of one."""
        if not batches:
            return []
        return self._database.write(lambda tx: enqueue.enqueue(tx, batches, chunk=size))

    def _parts(self, **which: Any) -> Any:
        return rows_of("StagedPart", self._alias).filter(**which)

    def _chunks(self, **which: Any) -> Any:
        return rows_of("StagedChunk", self._alias).filter(**which)

    def _publications(self, **which: Any) -> Any:
        return rows_of("Publication", self._alias).filter(**which)


class StagingSweep:
    """Deletes what has expired, and publishes the rest of plans whose publishers have fallen silent."""

    def __init__(self, database: Database, reads: Reads) -> None:
        self._database = database
        staging = SqlStaging(database, LOCK_TIMEOUT)
        reports = SqlBulkWriteReports(database.alias, database.clock)
        self._abandoned = AbandonedPlans(staging, reports, reads.counts)

    def run(self) -> None:
        """Do some steps."""
        now = self._database.clock.now()
        with named(self._database.alias):
            for _ in range(STEPS):
                if not delete_expired(self._database.alias, now, EXPIRED):
                    break
        self._abandoned.sweep()


def delete_expired(alias: str, now: int, limit: int) -> int:
    """Delete expired chunks, parts, publications and plans, at most about `limit`; return their number."""
    count = _delete_some(alias, rows_of("StagedPart", alias).filter(expires_at__lte=now))
    for name in ("Publication", "StagedWrite"):
        expired = rows_of(name, alias).filter(expires_at__lte=now)
        if pks := list(expired.values_list("pk", flat=True)[:limit]):
            count += expired.filter(pk__in=pks).delete()[0]
    return count


def _delete_some(alias: str, parts: Any) -> int:
    """Delete chunks of these parts, and parts without chunks; return the number of rows."""
    if not parts.exists():
        return 0
    with tables.dialect_for(alias).transaction():
        mine = list(parts.select_for_update().order_by("pk").values_list("pk", flat=True)[:PER_TRANSACTION])
        chunks = rows_of("StagedChunk", alias)
        some = list(chunks.filter(part_id__in=mine).values_list("pk", flat=True)[:PER_TRANSACTION])
        count: int = chunks.filter(pk__in=some).delete()[0]
        if len(some) < PER_TRANSACTION:
            count += parts.filter(pk__in=mine).delete()[0]
    return count


def _as_staged(batch: Batch) -> Batch:
    """Return a batch as it is stored. `durable=False` has no effect here, so drop it."""
    options = batch.options if batch.options.durable is not False else replace(batch.options, durable=None)
    return batch._replace(payloads=list(batch.payloads), ids=list(batch.ids or ()), options=options)


def _plan_of(row: Any) -> Plan:
    queues = msgpack.unpackb(row.queues) if row.queues else {}
    return Plan(row.app, row.target, row.version, row.write, queues, row.lifetime, row.limit, row.is_batch)


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
