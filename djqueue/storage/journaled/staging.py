"""Stage chunks in a table, and enqueue each in the transaction that records its results."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import msgpack
from django.db.models import Count, Q

from djqueue.core.job import Batch
from djqueue.storage import sparktables, wire
from djqueue.storage.staging import (
    RESUMABLE,
    STAGE_TTL,
    Counts,
    Plan,
    PlanState,
    check_chunk,
    lost_error,
)
from djqueue.storage.tables.clock import set_right
from djqueue.storage.tables.dberrors import named
from djqueue.storage.tables.dialects import Dialect
from djqueue.storage.tables.rows import chunked

from .publications import AT_ONCE, DatabasePublications, resumable_until, rows_of

LOCK_TIMEOUT = 1_000
"""Maximum of milliseconds that a sweep waits for a lock: a driver that is frozen may hold it for hours."""
KIND = "j"
"""The kind of every chunk."""


class DatabaseStaging(DatabasePublications):
    """The staging area in the database.

    Args:
        enqueue: The storage's function that inserts rows in the open transaction.
        settle: Brings the tables up to date for jobs of a queue whose states may be outdated.
        lock_timeout: See `DatabasePublications`.
    """

    def stage_all(
        self,
        write: str,
        part: str,
        chunks: Sequence[Sequence[Batch]],
        staged: Mapping[str, int],
        lifetime: int = STAGE_TTL,
    ) -> dict[str, str]:
        """Stage chunks of a part, `AT_ONCE` in a transaction."""
        kinds: dict[str, str] = {}
        for batches in chunks:
            check_chunk(batches)
        for some in chunked(chunks, AT_ONCE):
            new: list[tuple[str, int, bytes]] = []
            for batches in some:
                queue = batches[0].queue
                number = staged.get(queue, 0) + len(kinds.get(queue, ""))
                new.append((queue, number, wire.pack_body([_alike(batch) for batch in batches])))
                kinds[queue] = kinds.get(queue, "") + KIND
            with self._writing() as now:
                parts = self._opened({queue for queue, _, _ in new}, write, part, staged, now, lifetime)
                rows = self._chunks()
                rows.bulk_create(
                    [
                        rows.model(part_id=parts[queue], number=number, jobs=jobs)
                        for queue, number, jobs in new
                    ],
                    ignore_conflicts=True,
                )
        return kinds

    def _opened(
        self, queues: Set[str], write: str, part: str, staged: Mapping[str, int], now: int, lifetime: int
    ) -> dict[str, int]:
        """Return the primary keys of a part's rows by queue, and lock them.

        A lock has whoever deletes a part meanwhile delete all of its chunks.
        """
        mine = self._parts(queue__in=queues, write=write, part=part).select_for_update().order_by("pk")
        found = dict[str, int]()
        valid = set[str]()
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
        """Store a plan, unless one of its version is already stored."""
        with self._writing() as now:
            there = self._plan(plan, now)
            # Another process may store a plan first, and drop it at once.
            while there is None or (there.done and there.version < plan.version):
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
                    "expires_at": resumable_until(plan.lifetime, now),
                }
                if there is not None:
                    self._plans(pk=there.pk).update(**said)
                else:
                    rows = self._plans()
                    new = rows.model(app=plan.app, target=plan.target, **said)
                    rows.bulk_create([new], ignore_conflicts=True)
                there = self._plan(plan, now)
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
            # A plan that is still being published must not expire, even if this takes a week.
            expires_at = resumable_until(plan.lifetime, now)
            touched = self._open_plan(plan).filter(touched_at__isnull=False)
            touched.update(touched_at=now, expires_at=expires_at)

    def mark(self, plan: Plan, mark: str) -> None:
        """Mark nothing: only the check that follows notices a failover of PostgreSQL."""

    def close(self, plan: Plan, counts: Mapping[str, Counts], mark: str = "") -> bool:
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
        return True

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
        """Return open plans that were not touched for this many milliseconds, and touch them."""
        with named(self._alias):
            set_right(self._clock)
            now = self._clock.now()
            # A sign of life that lies in the future is from before the clock was set back.
            is_silent, is_ahead = Q(touched_at__lte=now - silence), Q(touched_at__gt=now, left_at=None)
            plans = self._plans(done=False).filter(is_silent | is_ahead).order_by("touched_at")
            found = list(plans[:limit])
        adopted = list[Plan]()
        if not found:
            return adopted
        with self._writing():
            for row in found:
                said = {"touched_at": now} if row.touched_at > now else {"touched_at": now, "adopted": True}
                # Only one of several sweeps updates the row.
                is_mine = self._plans(pk=row.pk, done=False, touched_at=row.touched_at).update(**said)
                if is_mine and row.touched_at <= now:
                    adopted.append(_plan_of(row))
        return adopted

    def forget_all(self, queues: Sequence[str], app: str, write: str) -> int:
        """Delete the rest of a write, except in queues where it is being published."""
        parts = large = 0
        for some in chunked(queues, AT_ONCE):
            with self._writing():
                mine = self._parts(queue__in=some, write=write)
                # Lock the parts first: a publication that starts meanwhile keeps them, or is seen below.
                found = list(mine.select_for_update().order_by("pk").values_list("pk", "queue"))
                open_ones = self._publications(queue__in=some, app=app, write=write, done=False)
                begun = set(open_ones.values_list("queue", flat=True))
                gone = [pk for pk, queue in found if queue not in begun]
                parts += len(gone)
                for pks in chunked(gone):
                    small = self._small(pks)
                    self._parts(pk__in=small).delete()
                    large += self._parts(pk__in=[pk for pk in pks if pk not in small]).update(expires_at=0)
        with named(self._alias):
            if large:
                while _drop(self._dialect, self._parts(write=write, expires_at=0)):
                    pass
        return parts

    def _small(self, parts: Sequence[int]) -> set[int]:
        """Return those parts that are quickly deleted, because they have few chunks, all of them empty."""
        counts = self._chunks(part_id__in=parts).values_list("part_id").annotate(Count("pk"), Count("queued"))
        return {pk for pk, chunks, published in counts if chunks == published and chunks <= AT_ONCE}

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
        return rows_of("StagedWrite", self._alias).filter(**which)


def purge_staged(dialect: Dialect, now: int, limit: int) -> int:
    """Delete expired chunks, parts, publications and plans, at most about `limit`.

    Returns:
        The number of rows.
    """
    if not sparktables.are_installed():
        return 0
    gone = _drop(dialect, rows_of("StagedPart", dialect.alias).filter(expires_at__lte=now))
    for name in ("Publication", "StagedWrite"):
        over = rows_of(name, dialect.alias).filter(expires_at__lte=now)
        gone += over.filter(pk__in=list(over.values_list("pk", flat=True)[:limit])).delete()[0]
    return gone


def _drop(dialect: Dialect, parts: Any) -> int:
    """Delete chunks of these parts, and parts without chunks. Returns the number of rows."""
    with dialect.transaction():
        mine = list(parts.select_for_update().order_by("pk").values_list("pk", flat=True)[:AT_ONCE])
        chunks = rows_of("StagedChunk", dialect.alias)
        some = list(chunks.filter(part_id__in=mine).values_list("pk", flat=True)[:AT_ONCE])
        gone: int = chunks.filter(pk__in=some).delete()[0]
        if len(some) < AT_ONCE:
            gone += parts.filter(pk__in=mine).delete()[0]
    return gone


def _alike(batch: Batch) -> Batch:
    """Normalize a batch for storage. `durable=False` has no effect here, so drop it."""
    options = batch.options if batch.options.durable is not False else replace(batch.options, durable=None)
    return batch._replace(payloads=list(batch.payloads), ids=list(batch.ids or ()), options=options)


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
