"""The changes of the engine that are not in the tables yet, and the rows that they make."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from django.db.models import Model

from djqueue import models
from djqueue.codecs import MSGPACK, encode
from djqueue.core.engine.context import EngineContext
from djqueue.core.engine.metricstore import MetricStore
from djqueue.core.engine.queue import JobQueue
from djqueue.core.enginejob import EngineJob
from djqueue.core.metrics import ALL_TIME, DEFAULT_TIERS, TIERS, Tiers, start_of
from djqueue.core.options import JobKey
from djqueue.core.policies import NO_LIMIT
from djqueue.core.states import TERMINAL, State
from djqueue.storage.enginesnapshots import changed_limiters, settings_of
from djqueue.storage.tables import rows
from djqueue.storage.tables.dialects import Dialect
from djqueue.storage.tables.rows import (
    BUCKET,
    BUCKET_KEY,
    GROUP_STATE,
    QUEUE_STATE,
    bucket_row,
    bucket_values,
    group_row,
    pack_holds,
    raw_values,
)

Done = Callable[[BaseException | None], None]
Row = tuple[Any, ...]

KEY = rows.KEY
STATE = (
    *("state", "run_at", "started_at", "finished_at", "expires_at", "attempts", "failures", "stalls"),
    *("worker", "reason", "error_type", "error_message", "traceback", "token", "process"),
    *("progress", "items", "retries"),
)
"""Columns that change while a job lives."""
WHOLE = (*rows.NEW_JOB, *(name for name in STATE if name not in rows.NEW_JOB))
MORE = [STATE.index(name) for name in WHOLE[len(rows.NEW_JOB) :]]
"""Places in `STATE` of the columns that a new row does not have."""
LIMITER_STATE = ("name", "rate_capacity", "rate_per", "concurrency")
MODELS_OF_JOBS: tuple[type[Model], ...] = (models.Job, *rows.OWNED)
MODELS: tuple[type[Model], ...] = (
    *MODELS_OF_JOBS,
    *(models.QueueState, models.GroupState, models.LimiterState, models.MetricBucket),
)
"""The tables that the scheduler writes."""


class TableChange(NamedTuple):
    """One change of many rows of a table."""

    kind: str
    """insert | update | delete"""
    model: type[Model]
    fields: Sequence[str]
    rows: Sequence[Row]
    key: Sequence[str] = KEY
    """Columns that identify a row; without any, rows are added."""
    constants: Mapping[str, Any] | None = None

    @property
    def is_of_jobs(self) -> bool:
        """Whether each row begins with the key of a job."""
        return self.model in MODELS_OF_JOBS

    def of(self, jobs: Container[JobKey]) -> "TableChange":
        """Return the rows of these jobs."""
        rows = [row for row in self.rows if row[:2] in jobs] if self.is_of_jobs else ()
        return self._replace(rows=rows)

    def without(self, jobs: Container[JobKey]) -> "TableChange":
        """Return the other rows."""
        return (
            self._replace(rows=[row for row in self.rows if row[:2] not in jobs]) if self.is_of_jobs else self
        )

    def apply(self, dialect: Dialect) -> None:
        """Write the change."""
        if self.kind == "insert":
            dialect.insert(self.model, self.fields, self.rows, constants=self.constants, key=self.key)
        elif self.kind == "update":
            dialect.update(self.model, self.key, self.fields, self.rows)
        else:
            dialect.delete(self.model, self.key, self.rows)


OF_JOBS = ("jobs", "gone", "died", "revived", "restarted", "items", "lines", "logs", "trimmed")
"""Attributes of `UnwrittenChanges` by job."""


class UnwrittenChanges:
    """Names of everything that has changed since the last commit.

    The rows are made when they are written, at one moment for all, so that a job that was enqueued, claimed
    and completed meanwhile is one row.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.everything = False
        """Whether the tables are replaced."""
        self.jobs: dict[EngineJob, bool] = {}
        """Changed jobs; True: the row may be missing, or differ in any column."""
        self.gone: dict[JobKey, None] = {}
        self.died: dict[EngineJob, None] = {}
        """Failed jobs, in the order of their dead letters."""
        self.revived: dict[JobKey, None] = {}
        """Jobs whose dead letters in the table are over."""
        self.restarted: dict[EngineJob, None] = {}
        """Jobs whose items in the table are over."""
        self.items: dict[EngineJob, list[tuple[int, bytes]]] = {}
        """New items with their numbers."""
        self.lines: dict[EngineJob, list[tuple[int, str]]] = {}
        """New log lines."""
        self.logs: dict[EngineJob, None] = {}
        """Jobs of which all log lines are written again."""
        self.trimmed: dict[EngineJob, None] = {}
        self.queues: set[str] = set()
        self.limiters: set[str] = set()
        self.waiting: list[Done] = []
        self.durable = False

    def __bool__(self) -> bool:
        return (
            self.everything
            or bool(self.waiting)
            or any(
                getattr(self, name)
                for name in (
                    "jobs",
                    "gone",
                    "restarted",
                    "items",
                    "lines",
                    "logs",
                    "trimmed",
                    "queues",
                    "limiters",
                )
            )
        )

    def __len__(self) -> int:
        return len(self.jobs) + len(self.gone)

    def follow(self, later: "UnwrittenChanges") -> None:
        """Merge the changes made while these could not be written; they may be written all the same.

        Waiters of these have been answered.
        """
        for job in (*self.jobs, *self.lines):
            job.noted = 0
        self.logs.update(dict.fromkeys(self.lines))
        self.lines = later.lines
        for job in later.restarted:
            self.items.pop(job, None)
        for job, items in later.items.items():
            self.items.setdefault(job, []).extend(items)
        for job in later.died:
            self.died.pop(job, None)
        self.died.update(later.died)
        for job, is_whole in later.jobs.items():
            self.jobs[job] = is_whole or self.jobs.get(job, False)
        self.gone.update(later.gone)
        self.revived.update(later.revived)
        self.restarted.update(later.restarted)
        self.logs.update(later.logs)
        self.trimmed.update(later.trimmed)
        self.queues |= later.queues
        self.limiters |= later.limiters
        self.everything |= later.everything
        self.waiting, self.durable, self.generation = later.waiting, later.durable, later.generation

    def precede_with(self, earlier: "UnwrittenChanges") -> None:
        """Merge changes that were made before these."""
        earlier.follow(self)
        vars(self).update(vars(earlier))

    def take(self, keys: Container[JobKey]) -> "UnwrittenChanges":
        """Return the changes of these jobs, whose rows may be missing, and remove them from these."""
        taken = UnwrittenChanges(self.generation)
        for name in OF_JOBS:
            noted = getattr(self, name)
            for one in [one for one in noted if key_of(one) in keys]:
                getattr(taken, name)[one] = noted.pop(one)
        taken.jobs = dict.fromkeys(taken.jobs, True)
        return taken

    def touched(self, keys: Container[JobKey]) -> set[JobKey]:
        """Return those of the jobs that have changed."""
        return {key for name in OF_JOBS for one in getattr(self, name) if (key := key_of(one)) in keys}

    # Rows. The caller holds all locks of the engine.

    def tables(self, context: EngineContext) -> list[TableChange]:
        """Return the changes of the tables, in order."""
        found: list[TableChange] = []
        if self.gone:
            gone = list(self.gone)
            found += [TableChange("delete", model, (), gone) for model in MODELS_OF_JOBS]
        self._jobs(found, context)
        self._parts(found, context)
        self._settings(found, context)
        return [change for change in found if change.rows]

    def _jobs(self, found: list[TableChange], context: EngineContext) -> None:
        new: list[EngineJob] = []
        whole: list[Row] = []
        changed: list[Row] = []
        results: list[Row] = []
        letters: list[Row] = []
        histories: list[EngineJob] = []
        for job, is_whole in self.jobs.items():
            queue = _queue_of(context, job)
            if queue is None:
                continue
            is_untouched = not job.started_at and job.error is None and job.progress is None
            if is_whole and is_untouched and job.state not in TERMINAL:
                new.append(job)
            else:
                state = _state(queue, job)
                if is_whole:
                    [row] = rows.new_rows([job]).values()
                    whole.append((*row, *(state[place] for place in MORE)))
                else:
                    changed.append((job.queue, job.id, *state))
            if job.state is State.COMPLETED and job.result is not None:
                results.append(rows.result_row(job, queue.policy.retention.results))
            elif job.state is State.FAILED:
                self.died.setdefault(job)
            if job.history and (is_whole or job.noted != len(job.history)):
                job.noted = len(job.history)
                histories.append(job)
            if (
                job.logs
                and len(job.logs) >= queue.policy.retention.logs.count
                and job.state is not State.ACTIVE
            ):
                self.logs[job] = None  # The table may have older lines, too.
        for job in self.died:
            queue = _queue_of(context, job)
            if queue is not None and (letter := queue.dead.get(job.id)) is not None:
                letters.append(rows.letter_row(job, letter))
        fresh = list(rows.new_rows(new).values())
        found += (
            TableChange("insert", models.Job, rows.NEW_JOB, fresh, constants=rows.UNTOUCHED),
            TableChange("insert", models.Job, WHOLE, whole),
            TableChange("update", models.Job, STATE, changed),
            TableChange("insert", models.JobResult, rows.RESULT, results),
            TableChange("delete", models.DeadLetter, (), list(self.revived)),
            TableChange("insert", models.DeadLetter, rows.LETTER, letters),
            TableChange("delete", models.JobAttempt, (), _keys(histories)),
            TableChange(
                "insert",
                models.JobAttempt,
                rows.ATTEMPT,
                [rows.attempt_row(job, attempt) for job in histories for attempt in job.history or ()],
                (),
            ),
        )

    def _parts(self, found: list[TableChange], context: EngineContext) -> None:
        there = {job for job in (*self.lines, *self.logs, *self.items) if _queue_of(context, job) is not None}
        logs = [job for job in self.logs if job in there]
        lines = [(job, job.logs or ()) for job in logs]
        lines += [(job, new) for job, new in self.lines.items() if job in there and job not in self.logs]
        items = [
            (job.queue, job.id, number, job.stream.run, item)
            for job, new in self.items.items()
            if job in there and job.stream is not None
            for number, item in dict(new).items()
        ]
        log_rows = [row for job, new in lines for row in rows.log_rows(job, new)]
        trimmed = [job for job in self.trimmed if _queue_of(context, job) is not None]
        found += (
            TableChange("delete", models.JobLog, (), _keys(logs)),
            TableChange("insert", models.JobLog, rows.LOG, log_rows, ()),
            TableChange("delete", models.JobItem, (), _keys(self.restarted)),
            TableChange("insert", models.JobItem, rows.ITEM, items, rows.ITEM_KEY),
            TableChange("delete", models.JobResult, (), _keys(j for j in trimmed if j.result is None)),
            TableChange("delete", models.JobItem, (), _keys(j for j in trimmed if not _items(j))),
            TableChange("delete", models.JobAttempt, (), _keys(j for j in trimmed if not j.history)),
            TableChange("delete", models.JobLog, (), _keys(j for j in trimmed if not j.logs)),
        )

    def _settings(self, found: list[TableChange], context: EngineContext) -> None:
        queues: list[Row] = []
        groups: list[Row] = []
        gone: list[Row] = []
        for name in sorted(self.queues):
            queue = context.existing(name)
            if queue is None:
                gone.append((name,))
                continue
            settings = settings_of(queue)
            rate, concurrency = settings.limits or (None, None)
            pair = (None, None) if rate is None else (rate.capacity, rate.per)
            limits = *pair, concurrency, pack_holds(settings.holds), settings.limits is not None
            queues.append((name, settings.paused, *limits))
            for group, limit in {"": NO_LIMIT, **settings.key_limits}.items():
                mode = "" if group else settings.key_mode
                if (row := group_row(name, group, limit, mode)) is not None:
                    groups.append(row)
        changed = {one.name: one for one in changed_limiters(context) if one.name in self.limiters}
        limiters = []
        for one in changed.values():
            pair = (None, None) if one.rate is None else (one.rate.capacity, one.rate.per)
            limiters.append((one.name, *pair, one.concurrency))
        names = [(name,) for name in self.queues]
        as_configured = [(name,) for name in self.limiters if name not in changed]
        found += (
            TableChange("delete", models.QueueState, (), gone, ("name",)),
            TableChange("insert", models.QueueState, (*QUEUE_STATE, "limits_set"), queues, ("name",)),
            TableChange("delete", models.GroupState, (), names, ("queue",)),
            TableChange("insert", models.GroupState, GROUP_STATE, groups, GROUP_STATE[:2]),
            TableChange("delete", models.LimiterState, (), as_configured, ("name",)),
            TableChange("insert", models.LimiterState, LIMITER_STATE, limiters, ("name",)),
        )


def key_of(job: EngineJob | JobKey) -> JobKey:
    """Return the key of a job, or of one that is gone."""
    return job if isinstance(job, tuple) else (job.queue, job.id)


def _queue_of(context: EngineContext, job: EngineJob) -> JobQueue | None:
    """Return the queue of a job; None if the job has been removed."""
    queue = context.existing(job.queue)
    return queue if queue is not None and queue.is_there(job) else None


def _state(queue: JobQueue, job: EngineJob) -> Row:
    error = job.error or rows.NO_ERROR
    is_active = job.state is State.ACTIVE
    reason = rows.CANCEL_REQUESTED if is_active and job.cancel_requested else job.reason
    return (
        job.state.value,
        job.run_at,
        job.started_at or None,
        job.finished_at or None,
        rows.expiry(job, queue.policy.retention.of(job.state)),
        job.attempts,
        job.failures,
        job.stalls,
        rows.clean(job.worker, rows.TEXT_LIMIT),
        rows.clean(reason, rows.TEXT_LIMIT),
        rows.clean(error.type, rows.TEXT_LIMIT),
        rows.clean(error.message),
        rows.clean(error.traceback),
        *((job.token, job.process) if is_active else (job.last_token, "")),
        None if job.progress is None else encode(job.progress, MSGPACK),
        0 if job.stream is None else job.stream.count,
        queue.dead.retries_of(job.id),
    )


def _keys(jobs: Iterable[EngineJob]) -> list[JobKey]:
    return [(job.queue, job.id) for job in jobs]


def _items(job: EngineJob) -> list[bytes] | None:
    return None if job.stream is None else job.stream.items


BucketKey = tuple[int, int, str, str]
"""(length, start, queue, name)."""
PURGE_EVERY = 60_000
"""Milliseconds between two removals of expired rows."""


class StoredMetrics(MetricStore):
    """Metrics that note which buckets have changed."""

    def __init__(self, tiers: Tiers = DEFAULT_TIERS) -> None:
        super().__init__(tiers)
        self._changed: dict[BucketKey, None] = {}
        self._gone: dict[str, None] = {}
        self._purged = 0

    def load(self, alias: str) -> None:
        """Load the rows."""
        found = models.MetricBucket.objects.using(alias).order_by("start")
        with self._lock:
            for row in raw_values(found, BUCKET):
                queue, name, tier, start = row[:4]
                if tier in self._buckets:
                    self._buckets[tier][start, queue, name] = bucket_values(row)
                if tier == ALL_TIME and name:
                    self._names.setdefault(queue, set()).add(name)

    def forget(self, queue: str) -> None:
        super().forget(queue)
        with self._lock:
            self._gone[queue] = None
            self._changed = {key: None for key in self._changed if key[2] != queue}

    def _add(self, queue: str, name: str, values: Sequence[int], now: int) -> None:
        super()._add(queue, name, values, now)
        self._changed.update({(tier, start_of(tier, now), queue, name): None for tier in TIERS})

    # Rows.

    @property
    def have_changed(self) -> bool:
        """Whether there are changes that `take` returns."""
        return bool(self._changed or self._gone)

    def take(self) -> list[TableChange]:
        """Return the changes of the table since the last call."""
        with self._lock:
            changed, self._changed = self._changed, {}
            gone, self._gone = self._gone, {}
            found = [
                bucket_row((queue, name, tier, start), self._buckets[tier][start, queue, name])
                for tier, start, queue, name in changed
                if (start, queue, name) in self._buckets[tier]
            ]
        changes = (
            TableChange("delete", models.MetricBucket, (), [(name,) for name in gone], ("queue",)),
            TableChange("insert", models.MetricBucket, BUCKET, found, BUCKET_KEY),
        )
        return [change for change in changes if change.rows]

    def give_back(self, changes: Sequence[TableChange]) -> None:
        """Note changes again that could not be written."""
        with self._lock:
            for change in changes:
                if change.kind == "delete":
                    self._gone.update({name: None for (name,) in change.rows})
                else:
                    self._changed.update({(row[2], row[3], row[0], row[1]): None for row in change.rows})

    def purge(self, alias: str, now: int) -> None:
        """Delete expired rows, once a minute."""
        if now - self._purged < PURGE_EVERY:
            return
        self._purged = now
        kept: Mapping[int, int] = self._kept
        for tier, time in kept.items():
            models.MetricBucket.objects.using(alias).filter(tier=tier, start__lt=now - time).delete()
