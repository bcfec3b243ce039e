"""The mirror's tables: copies of the jobs in Redis, written in bulk."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections
from django.db.models import Count, Max, Min, Model, Q, QuerySet

from djqueue import models
from djqueue.codecs import encode
from djqueue.core.enginejob import EngineJob
from djqueue.core.job import DeadLetterRecord, JobRecord
from djqueue.core.options import MSGPACK, JobKey, JobOptions
from djqueue.core.policies import KeyLimit
from djqueue.core.states import LIVE, TERMINAL, State
from djqueue.core.units import to_datetime
from djqueue.core.workers import WorkerInfo
from djqueue.storage.tables import rows
from djqueue.storage.tables.dialects import Dialect, dialect_for
from djqueue.storage.tables.inspector import DatabaseInspector
from djqueue.storage.tables.rows import (
    GROUP_STATE,
    NO_ERROR,
    OWNED,
    QUEUE_STATE,
    TEXT_LIMIT,
    Row,
    clean,
    group_row,
)

if TYPE_CHECKING:
    from djqueue.storage.redis.options import MirrorOptions

PAGE = 1_000
"""Rows read or removed at a time."""
VALUES = {state: state.value for state in State}
ENDED = [state.value for state in TERMINAL]
UNFINISHED = frozenset(state.value for state in LIVE)


class MirroredRows(NamedTuple):
    """The rows of a job."""

    job_id: str
    state: str
    created_at: int


class Tables:
    """The tables of one database.

    options: which rows are kept, and for how long.
    renew: called first in each transaction; raises if another process now has the leader lease.
    """

    def __init__(self, alias: str, options: "MirrorOptions", renew: Callable[..., None]) -> None:
        self._alias = alias
        self._states = options.states
        self._retention = options.retention
        self._keep = options.keep
        self._renew = renew
        self._grown: set[tuple[str, State]] = set()
        """Queues and outcomes that may have more rows than their limit."""

    @cached_property
    def _dialect(self) -> Dialect:
        return dialect_for(self._alias)

    def tune(self) -> None:
        """Prepare this thread's connection for many writes, before anything else uses it."""
        self._dialect.tune()

    # Jobs.

    def write(
        self,
        queue: str,
        records: Mapping[str, JobRecord | None],
        dead_letters: Mapping[str, DeadLetterRecord],
        now: int,
    ) -> None:
        """Write the current state of some jobs, in one transaction.

        Args:
            records: Records by id; None for a job that Redis does not know.
            dead_letters: The dead letters of failed jobs.
        """
        write = self._dialect
        with write.transaction():
            self._renew(changes_jobs=True)
            known = self._known(queue, list(records))
            kept = [job for job in records.values() if job is not None and job.state in self._states]
            self._clear(queue, known, records, kept, now)
            if not kept:
                return
            expiries = [self._expiry(job, dead_letters) if job.state in TERMINAL else None for job in kept]
            usual, others = job_rows(kept, expiries)
            write.insert(models.Job, FIELDS, usual, constants=UNCLAIMED | USUAL, key=rows.KEY)
            write.insert(models.Job, (*FIELDS, *USUAL), others, constants=UNCLAIMED, key=rows.KEY)
            if self._keep:
                self._grown.update((queue, job.state) for job in kept if job.state in TERMINAL)
            results = [
                (queue, job.id, job.options.content_type, job.result, job.finished_at, expires_at)
                for job, expires_at in zip(kept, expiries, strict=True)
                if job.result is not None
            ]
            write.insert(models.JobResult, rows.RESULT, results, key=rows.KEY)
            dead = [
                rows.letter_row(any_of(job), dead_letters[job.id]) for job in kept if job.id in dead_letters
            ]
            write.insert(models.DeadLetter, rows.LETTER, dead, key=rows.KEY)
            runs = {
                job.id: [rows.attempt_row(any_of(job), run) for run in job.history]
                for job in kept
                if job.history
            }
            self._extend(models.JobAttempt, rows.ATTEMPT, "finished_at", queue, runs)
            lines = {job.id: rows.log_rows(any_of(job), job.logs) for job in kept if job.logs}
            self._extend(models.JobLog, rows.LOG, "at", queue, lines)

    def _clear(
        self,
        queue: str,
        known: Mapping[str, MirroredRows],
        found: Mapping[str, JobRecord | None],
        kept: Iterable[JobRecord],
        now: int,
    ) -> None:
        """Delete rows that are no longer true."""
        stays = {job.id: job for job in kept}
        gone: list[JobKey] = []
        outlived: list[JobKey] = []
        replaced: list[JobKey] = []
        revived: list[JobKey] = []
        for row in known.values():
            job = stays.get(row.job_id)
            key = (queue, row.job_id)
            if job is None:
                # Jobs without a record that have ended stay visible for a while.
                remains = found[row.job_id] is None and row.state not in UNFINISHED
                (outlived if remains and State(row.state) in self._states else gone).append(key)
            elif job.created_at != row.created_at:
                replaced.append(key)
            elif row.state == State.FAILED and job.state is not State.FAILED:
                revived.append(key)
        delete = self._dialect.delete
        delete(models.Job, rows.KEY, gone)
        for model in OWNED:
            delete(model, rows.KEY, gone + replaced)
        delete(models.DeadLetter, rows.KEY, revived + outlived)
        until = now + self._retention
        for chunk in rows.chunked(outlived):
            late = self._jobs().filter(queue=queue, job_id__in=[job_id for _, job_id in chunk])
            late.filter(Q(expires_at=None) | Q(expires_at__gt=until)).update(expires_at=until)

    def _extend(
        self,
        model: type[Model],
        fields: Sequence[str],
        moment: str,
        queue: str,
        found: Mapping[str, list[Row]],
    ) -> None:
        """Write the rows of which a job has many. New ones are only appended, and the oldest may be
        deleted.
        """
        at = fields.index(moment)
        known: dict[str, tuple[Any, ...]] = {}
        for chunk in rows.chunked(list(found)):
            mine = self._of(model).filter(queue=queue, job_id__in=chunk).values_list("job_id")
            counted = mine.annotate(count=Count("id"), first=Min(moment), last=Max(moment))
            known.update({job_id: facts for job_id, *facts in counted.order_by()})
        new: list[Row] = []
        stale: list[JobKey] = []
        for job_id, every in found.items():
            count, first, last = known.get(job_id, (0, None, None))
            beginning = every[:count]
            ends = [to_datetime(row[at]) for row in (*beginning[:1], *beginning[-1:])]
            if len(beginning) == count and [first, last] == ends:
                every = every[count:]
            elif count:
                stale.append((queue, job_id))
            new += every
        self._dialect.delete(model, rows.KEY, stale)
        self._dialect.insert(model, fields, new)

    def _expiry(self, job: JobRecord, letters: Mapping[str, DeadLetterRecord]) -> int | None:
        expires_at = self._outlived_at(job, letters)
        keep = self._keep.get(job.state)
        if keep is None or keep.age is None:
            return expires_at
        latest = job.finished_at + keep.age
        return latest if expires_at is None else min(latest, expires_at)

    def _outlived_at(self, job: JobRecord, letters: Mapping[str, DeadLetterRecord]) -> int | None:
        if job.state is State.FAILED:
            letter = letters.get(job.id)
            return (letter.expires_at if letter is not None else job.finished_at) + self._retention
        if job.state not in TERMINAL or job.options.kept is None:
            return None
        return job.finished_at + job.options.kept + self._retention

    def _known(self, queue: str, ids: Sequence[str]) -> dict[str, MirroredRows]:
        # Written by hand, because the ORM needs longer to build such a statement than the database to run
        # it.
        connection = connections[self._alias]
        table, *names = map(
            connection.ops.quote_name, (models.Job._meta.db_table, *MirroredRows._fields, "queue")
        )
        known: dict[str, MirroredRows] = {}
        with connection.cursor() as cursor:
            for chunk in rows.chunked(ids):
                placeholders = ", ".join(["%s"] * len(chunk))
                statement = (
                    f"SELECT {', '.join(names[:-1])} FROM {table} "  # noqa: S608 - names of the model
                    f"WHERE {names[-1]} = %s AND {names[0]} IN ({placeholders})"
                )
                cursor.execute(statement, [queue, *chunk])
                known.update({row[0]: MirroredRows(*row) for row in cursor.fetchall()})
        return known

    def pages(self, queue: str) -> Iterator[list[MirroredRows]]:
        """Yield the rows of the queue's jobs, a page at a time."""
        last = ""
        while True:
            following = self._jobs().filter(queue=queue, job_id__gt=last).order_by("job_id")[:PAGE]
            page = [MirroredRows(*row) for row in rows.raw_values(following, MirroredRows._fields)]
            if not page:
                return
            yield page
            last = page[-1].job_id

    def unfinished(self, queue: str, states: Iterable[State], size: int) -> Iterator[list[EngineJob]]:
        """Yield pages of the queue's jobs in some states, oldest first."""
        wanted = [state.value for state in states]
        jobs = self._jobs().filter(queue=queue, state__in=wanted).order_by("created_at", "id")
        numbers = list(jobs.values_list("id", flat=True))
        for chunk in rows.chunked(numbers, size):
            stored = rows.raw_values(self._jobs().filter(id__in=chunk), ("id", *rows.JOB_FIELDS))
            by_number = {row[0]: rows.job_from_row(row[1:]) for row in stored}
            yield [by_number[number] for number in chunk if number in by_number]

    def states(self, queue: str, ids: Sequence[str]) -> dict[str, State]:
        """Return the states of the jobs that have rows."""
        return {row.job_id: State(row.state) for row in self._known(queue, ids).values()}

    def purge(self, now: int) -> int:
        """Delete some of the expired ended jobs; return their number."""
        return self._forget(list(self.expired(now).values_list("queue", "job_id")[:PAGE]))

    def trim(self) -> int:
        """Delete some of the ended jobs above the limits of their queues; return their number."""
        while self._grown:
            queue, state = next(iter(self._grown))
            keep = self._keep.get(state)
            if keep is not None and keep.count is not None:
                newest = list(rows.raw_values(self.behind(queue, state, keep.count), ("finished_at", "id")))
                for finished_at, number in newest:
                    old = self.before(queue, state, finished_at, number)[:PAGE]
                    return self._forget([(queue, job_id) for (job_id,) in rows.raw_values(old, ("job_id",))])
            self._grown.discard((queue, state))
        return 0

    def check_all(self) -> None:
        """Check every queue for too many rows, because another process may have written them."""
        if self._keep:
            self._grown = {(queue, state) for queue in self.queues() for state in self._keep}

    def expired(self, now: int) -> "QuerySet[models.Job]":
        """Return the expired ended jobs, in no order: to sort them, all would be read for each page."""
        return self._jobs().filter(expires_at__lte=now, state__in=ENDED)

    def behind(self, queue: str, state: State, count: int) -> "QuerySet[models.Job]":
        """Return the newest of a queue's jobs with an outcome that are beyond the limit."""
        ended = self._jobs().filter(queue=queue, state=state.value, finished_at__isnull=False)
        return ended.order_by("-finished_at", "-id")[count : count + 1]

    def before(self, queue: str, state: State, finished_at: int, number: int) -> "QuerySet[models.Job]":
        """Return a queue's jobs with an outcome up to a given end and row number, in order."""
        end = to_datetime(finished_at)
        ended = self._jobs().filter(queue=queue, state=state.value, finished_at__lte=end)
        return ended.exclude(finished_at=end, id__gt=number).order_by("finished_at", "id")

    def _forget(self, keys: Sequence[JobKey]) -> int:
        if keys:
            with self._dialect.transaction():
                self._renew(changes_jobs=True)
                for model in (models.Job, *OWNED):
                    self._dialect.delete(model, rows.KEY, keys)
        return len(keys)

    # Queues and workers.

    def queues(self) -> list[str]:
        """Return the names of the queues that have rows."""
        return DatabaseInspector(self._alias).queues()

    def count_unfinished(self, queue: str) -> int:
        """Return the number of the queue's unfinished jobs."""
        return self._jobs().filter(queue=queue, state__in=UNFINISHED).count()

    def controls(self) -> dict[str, Row]:
        """Return the controls of queues, as `QUEUE_STATE`, by name."""
        return {row[0]: row for row in rows.raw_values(self._of(models.QueueState), QUEUE_STATE)}

    def write_controls(self, queue: str, row: Row | None) -> None:
        """Write the controls of a queue; None deletes them."""
        with self._dialect.transaction():
            self._renew()
            if row is None:
                self._dialect.delete(models.QueueState, ("name",), [(queue,)])
            else:
                self._dialect.insert(models.QueueState, QUEUE_STATE, [row], key=("name",))

    def key_limits(self, queue: str) -> Mapping[str | None, KeyLimit]:
        """Return the limits of a queue's groups; None is the key of the default."""
        return DatabaseInspector(self._alias).key_limits(queue)

    def write_groups(self, queue: str, limits: Mapping[str | None, KeyLimit]) -> None:
        """Replace the limits of a queue's groups."""
        known = self.key_limits(queue)
        gone = [(queue, group or "") for group in known.keys() - limits.keys()]
        new = [(group, limit) for group, limit in limits.items() if known.get(group) != limit]
        if not gone and not new:
            return
        rows = [row for group, limit in new if (row := group_row(queue, group, limit)) is not None]
        with self._dialect.transaction():
            self._renew()
            self._dialect.delete(models.GroupState, GROUP_STATE[:2], gone)
            self._dialect.insert(models.GroupState, GROUP_STATE, rows, key=GROUP_STATE[:2])

    def write_workers(self, infos: Iterable[WorkerInfo]) -> None:
        """Write the live workers."""
        known = self._of(models.WorkerState)
        with self._dialect.transaction():
            self._renew()
            names = []
            for info in infos:
                name, values = rows.worker_row(info)
                names.append(name)
                known.update_or_create(worker_id=name, defaults=values)
            known.exclude(worker_id__in=names).delete()

    def _jobs(self) -> "QuerySet[models.Job]":
        return models.Job.objects.using(self._alias)

    def _of(self, model: type[Model]) -> QuerySet[Any]:
        return model._default_manager.using(self._alias)


def any_of(job: JobRecord) -> Any:
    """Return the record as an engine's job: both have the attributes that are used there."""
    return job


UNCLAIMED: dict[str, Any] = {"token": 0, "process": ""}
"""Values of each row: another storage claims the job."""
USUAL = {"error_type": "", "error_message": "", "traceback": "", "progress": None, "items": 0}
"""Values of most rows. As a part of the statement they take less time than as its parameters."""
FIELDS = tuple(name for name in rows.JOB_FIELDS if name not in UNCLAIMED and name not in USUAL)


def job_rows(records: Iterable[JobRecord], expiries: Iterable[int | None]) -> tuple[list[Row], list[Row]]:
    """Return rows with `FIELDS`, and those of other jobs with the fields of `USUAL`, too."""
    usual: list[Row] = []
    others: list[Row] = []
    shared: JobOptions | None = None
    packed, last_worker, worker_name = b"", "", ""
    for job, expires_at in zip(records, expiries, strict=True):
        # Reading the fields one by one would take several times longer.
        job_id, queue, name, payload, options, state, created_at, run_at, *counted = job[:11]
        worker, started_at, finished_at, _, error, reason, progress, _, _, items = job[11:]
        if options is not shared:
            shared = options
            packed = rows.pack_options(options)
            fixed = (options.unique_key, options.concurrency_key, options.subject)
            priority, content_type = options.priority, options.content_type
        if worker != last_worker:
            last_worker, worker_name = worker, clean(worker, TEXT_LIMIT)
        new = (queue, job_id, name, VALUES[state], priority, payload, content_type, packed, *fixed)
        times = (created_at, run_at, started_at or None, finished_at or None, expires_at)
        row = (*new, *times, *counted, worker_name, reason and clean(reason, TEXT_LIMIT))
        if error is None and progress is None and not items:
            usual.append(row)
        else:
            others.append((*row, *_unusual(job)))
    return usual, others


def _unusual(job: JobRecord) -> Row:
    error = job.error or NO_ERROR
    texts = (clean(error.type, TEXT_LIMIT), clean(error.message), clean(error.traceback))
    return (*texts, None if job.progress is None else encode(job.progress, MSGPACK), job.items)
