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
    RESUMABLE,
    STAGE_TTL,
    Counts,
    Manifest,
    Plan,
    PlanState,
    PublicationState,
    Staging,
    check_chunk,
    gone_error,
    missing_error,
)
from djqueue.storage.tables.clock import set_right
from djqueue.storage.tables.dberrors import named
from djqueue.storage.tables.dialects import Dialect
from djqueue.storage.tables.rows import chunked

AT_ONCE = 100
"""Chunks to delete, or manifests to store, in one transaction."""
TOGETHER, BYTES = 50, 256 * 1024
"""Maximum number of chunks published in one transaction, and their approximate size."""
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
        self.dialect = self._dialect = dialect
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

    def commit(self, plan: Plan) -> PlanState:
        """Store a plan, unless one of its version is already stored."""
        with self._writing() as now:
            there = self._plan(plan, now)
            if there is None or (there.done and there.version < plan.version):
                said = {
                    "version": plan.version,
                    "write": plan.write,
                    "queues": msgpack.packb({name: dict(parts) for name, parts in plan.queues.items()}),
                    "limit": plan.limit,
                    "frame": plan.frame,
                    "run": plan.run,
                    "content": plan.content,
                    "done": False,
                    "counts": b"",
                    "lifetime": plan.lifetime,
                    "touched_at": now,
                    "adopted": False,
                    "left_at": None,
                    "expires_at": None if plan.lifetime is None else now + RESUMABLE,
                }
                mine = {"app": plan.app, "target": plan.target}
                if not self._plans(**mine, done=True).update(**said):
                    rows = self._plans()
                    rows.bulk_create([rows.model(**mine, **said)], ignore_conflicts=True)
                there = self._plan(plan, now)
                assert there is not None
            found = _plan_of(there)
            if there.done or there.version > plan.version:
                counts = msgpack.unpackb(there.counts) if there.counts else {}
                return PlanState("done", found, {name: Counts(*each) for name, each in counts.items()})
            self._plans(pk=there.pk).update(touched_at=now)
            if there.version != plan.version:
                return PlanState("unfinished", found)
            return PlanState("new" if there.write == plan.write else "resumed", found)

    def state_of(self, plan: Plan) -> str:
        """Return the state of a plan: open, done, or "" if no plan of this write is stored."""
        with named(self._alias):
            found = self._plans(app=plan.app, target=plan.target, write=plan.write)
            done = found.values_list("done", flat=True).first()
        return "" if done is None else "done" if done else "open"

    def touch(self, plan: Plan) -> None:
        """Record that a plan is being published."""
        with self._writing() as now:
            self._open_plan(plan).filter(touched_at__isnull=False).update(touched_at=now)

    def close(self, plan: Plan, counts: Mapping[str, Counts]) -> None:
        """Record that a plan is published, with the counts of its queues."""
        packed = msgpack.packb({queue: list(each) for queue, each in counts.items()})
        with self._writing() as now:
            self._open_plan(plan).update(
                done=True,
                queues=b"",
                counts=packed,
                touched_at=None,
                expires_at=None if plan.lifetime is None else now + plan.lifetime,
            )

    def leave(self, plan: Plan) -> bool:
        """Keep an open plan from sweeps for `RESUMABLE`. Returns whether it was left that long ago before."""
        with self._writing() as now:
            there = self._open_plan(plan).select_for_update().first()
            if there is None:
                return False
            if there.left_at is not None and there.left_at <= now - RESUMABLE:
                return True
            there.left_at = now if there.left_at is None else there.left_at
            there.touched_at = now + RESUMABLE
            there.save(using=self._alias, update_fields=["left_at", "touched_at"])
        return False

    def drop(self, plan: Plan) -> bool:
        """Delete an open plan with its manifests and staged jobs, unless a chunk was published."""
        return self._drop_plan(plan, self._open_plan(plan))

    def withdraw(self, plan: Plan) -> bool:
        """Delete an open plan as `drop` does, unless a sweep has adopted it."""
        return self._drop_plan(plan, self._open_plan(plan).filter(adopted=False))

    def _drop_plan(self, plan: Plan, which: Any) -> bool:
        with self._writing():
            # Lock the plan, so that no sweep adopts it meanwhile.
            if which.select_for_update().first() is None:
                return False
            mine = self._publications(app=plan.app, write=plan.write, version=plan.version, done=False)
            begun = [row.pk for row in mine.select_for_update().order_by("pk")]
            # Lock the chunks, too: this waits for those that are being published.
            chunks = self._chunks(part_id__in=self._parts(write=plan.write).values("pk"))
            locked = chunks.select_for_update().order_by("pk").values_list("queued", flat=True)
            if any(queued is not None for queued in locked.iterator()):
                return False
            if self._publications(write=plan.write, done=True).exists():
                return False
            chunks.delete()
            self._publications(pk__in=begun).delete()
            self._open_plan(plan).delete()
        self.forget_all(sorted(plan.queues), plan.app, plan.write)
        return True

    def adopt(self, silence: int, limit: int) -> list[Plan]:
        """Return open plans that were not touched for this many milliseconds, and touch them."""
        with named(self._alias):
            set_right(self._clock)
            now = self._clock.now()
            silent = self._plans(done=False, touched_at__lte=now - silence)
            said = {"touched_at": now, "adopted": True}
            return [
                _plan_of(row)
                for row in silent.order_by("touched_at")[:limit]
                # Only one of several sweeps updates the row.
                if self._plans(pk=row.pk, done=False, touched_at=row.touched_at).update(**said)
            ]

    def begin_all(self, manifests: Sequence[Manifest], lifetime: int | None) -> list[PublicationState]:
        """Store manifests, each unless one of its version is already stored."""
        found: list[PublicationState] = []
        for some in chunked(manifests, AT_ONCE):
            with self._writing() as now:
                found += [self._begun(manifest, lifetime, now) for manifest in some]
        return found

    def _begun(self, manifest: Manifest, lifetime: int | None, now: int) -> PublicationState:
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

    def publish_all(self, chunks: Sequence[tuple[Manifest, str, int]]) -> list[Counts]:
        """Enqueue chunks in order: large ones each in a transaction of its own, small ones together."""
        found: list[Counts] = []
        with named(self._alias):
            places = self._places(chunks)
            # In the caller's transaction, the tables can't be brought up to date.
            locked = self._dialect.connection.in_atomic_block
            together = limit = 1 if locked else TOGETHER
            while len(found) < len(chunks):
                some = chunks[len(found) : len(found) + together]
                try:
                    found += self._enqueued(places, some, certain=locked)
                    together = limit
                except _UncertainError as error:
                    if error.index:
                        together = error.index  # Publish the chunks before it first.
                        continue
                    self._settle(error.queue, error.believed)
                    found += self._enqueued(places, some[:1], certain=True)
        return found

    def end_all(self, manifests: Sequence[Manifest]) -> list[Counts]:
        """Record that all chunks of manifests are published."""
        found: list[Counts] = []
        for some in chunked(manifests, AT_ONCE):
            with self._writing() as now:
                found += [self._ended(manifest, now) for manifest in some]
        return found

    def _ended(self, manifest: Manifest, now: int) -> Counts:
        there = self._publication(manifest, now)
        if there is None or there.version != manifest.version:
            raise gone_error(manifest)
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

    def forget_all(self, queues: Sequence[str], app: str, write: str) -> int:
        """Delete the rest of a write, except in queues where it is being published."""
        parts = 0
        for some in chunked(queues, AT_ONCE):
            with self._writing():
                mine = self._parts(queue__in=some, write=write)
                # Lock the parts first: a publication that starts meanwhile keeps them, or is seen below.
                found = list(mine.select_for_update().order_by("pk").values_list("pk", "queue"))
                open_ones = self._publications(queue__in=some, app=app, write=write, done=False)
                begun = set(open_ones.values_list("queue", flat=True))
                gone = [pk for pk, queue in found if queue not in begun]
                for keys in chunked(gone):
                    parts += self._parts(pk__in=keys).update(expires_at=0)
        with named(self._alias):
            if parts:
                while _drop(self._dialect, self._parts(write=write, expires_at=0)):
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
            raise gone_error(manifest)

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
        counts: list[Counts] = []
        size = 0
        with self._writing():
            for manifest, part, number in chunks:
                place = places.get((manifest.write, manifest.queue, part))
                row = self._chunks(part_id=place, number=number).select_for_update().first()
                if row is None:
                    if counts:
                        break  # Let the caller know after this transaction.
                    raise missing_error(manifest, part, number)
                if row.queued is not None:
                    counts.append(_counts(row))
                    continue
                size += len(row.jobs)
                if counts and size > BYTES:
                    break
                batches = wire.unpack(bytes(row.jobs))
                try:
                    answers = self._inserted(batches)
                except QueueFullError:
                    if certain:
                        raise
                    # The queue seems full, but the scheduler may know that jobs have left it.
                    uncertain: dict[str, State | None] = {batches[0].ids[0]: State.WAITING}
                    raise _UncertainError(manifest.queue, len(counts), uncertain) from None
                believed = {one.id: one.existing_state for one in answers if one.status == "duplicate"}
                if believed and not certain:
                    raise _UncertainError(manifest.queue, len(counts), believed)
                counts.append(Counts.of(answer.status for answer in answers))
                self._chunks(pk=row.pk).update(jobs=b"", **counts[-1]._asdict())
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

    def _plan(self, plan: Plan, now: int) -> Any:
        """Return and lock the last plan of an application for a target."""
        there = self._plans(app=plan.app, target=plan.target).select_for_update().first()
        if there is not None and there.expires_at is not None and there.expires_at <= now:
            there.delete()
            return None
        return there

    def _open_plan(self, plan: Plan) -> Any:
        mine = {"app": plan.app, "target": plan.target, "version": plan.version, "write": plan.write}
        return self._plans(**mine, done=False)

    def _plans(self, **which: Any) -> Any:
        return _rows("StagedWrite", self._alias).filter(**which)

    def _publications(self, **which: Any) -> Any:
        return _rows("Publication", self._alias).filter(**which)


def purge_staged(dialect: Dialect, now: int, limit: int) -> int:
    """Delete expired chunks, parts, publications and plans, at most about `limit`.

    Returns:
        The number of rows.
    """
    if not sparktables.are_installed():
        return 0
    gone = _drop(dialect, _rows("StagedPart", dialect.alias).filter(expires_at__lte=now))
    for name in ("Publication", "StagedWrite"):
        over = _rows(name, dialect.alias).filter(expires_at__lte=now)
        gone += over.filter(pk__in=list(over.values_list("pk", flat=True)[:limit])).delete()[0]
    return gone


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


class _UncertainError(Exception):
    """The tables reject jobs of a chunk, but may be outdated; raised to roll back the transaction."""

    def __init__(self, queue: str, index: int, believed: dict[str, State | None]) -> None:
        super().__init__(queue, index, believed)
        self.queue = queue
        self.index = index
        self.believed = believed


def _alike(batch: Batch) -> Batch:
    """Normalize a batch for storage. `durable=False` has no effect here, so drop it."""
    options = batch.options if batch.options.durable is not False else replace(batch.options, durable=None)
    return batch._replace(payloads=list(batch.payloads), ids=list(batch.ids or ()), options=options)


def _rows(name: str, alias: str) -> Any:
    return sparktables.spark_model(name).objects.using(alias)


def _counts(row: Any) -> Counts:
    return Counts(*(getattr(row, name) or 0 for name in COUNTS))


def _plan_of(row: Any) -> Plan:
    queues = msgpack.unpackb(row.queues) if row.queues else {}
    return Plan(
        row.app,
        row.target,
        row.version,
        row.write,
        queues,
        row.lifetime,
        row.limit,
        row.frame,
        row.run,
        row.content,
    )
