"""Index the ended jobs of queues with bounds, by queue and outcome: a row for each job, and their sums.

Rows and sums change in the same transaction as the jobs' own rows. A sum changes by the difference of the
rows before and after, so a flush that is repeated because its commit had no answer counts nothing twice.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from django.db.models import F, Func, IntegerField, QuerySet

from djqueue import models
from djqueue.core.enginejob import EngineJob
from djqueue.core.job import JobFailure
from djqueue.core.retention import Retention
from djqueue.core.sizes import size_of, size_of_error
from djqueue.core.states import State
from djqueue.storage.tables import rows
from djqueue.storage.tables.dialects import Dialect

from .pinned import PUT_OFF, own_end

Key = tuple[str, str]
FOREVER = 1 << 62
PAGE = 1_000
"""Rows of one transaction."""
RESULTS = "results"
"""Kind of the sum of results; the others are outcomes."""
FILLED = "filled"
"""Kind of the entry for how far the jobs that ended before their queue was bounded have been entered."""
ENDED = (State.COMPLETED, State.CANCELLED)


class RetentionEntry(NamedTuple):
    """The space that one ended job takes, in the order of its row's fields."""

    queue: str
    job_id: str
    outcome: str
    pinned: bool
    ended_at: int
    expires_at: int
    size: int
    result_size: int
    result_until: int


class RetentionIndex:
    """The index of the retained jobs of a database.

    retention: Retention of the queues that have one.
    """

    def __init__(self, dialect: Dialect, retention: Mapping[str, Retention]) -> None:
        self._dialect = dialect
        self._bounded = {queue: kept for queue, kept in retention.items() if kept.counts}

    def concerns(self, queue: str) -> bool:
        """Return whether the ended jobs of the queue are counted."""
        return queue in self._bounded

    def entry(self, job: EngineJob) -> RetentionEntry:
        """Return the entry of a completed or cancelled job."""
        retention = self._bounded[job.queue]
        expires_at = rows.expiry(job, retention.of(job.state))
        size = 0 if job.result is None else len(job.result)
        until = rows.result_expiry(job, retention.results) if size else None
        ended = (job.queue, job.id, job.state, False, job.finished_at)
        return _entry(*ended, expires_at, size_of(job), size, until)

    # Writing, in a transaction.

    def write(
        self,
        entries: Mapping[Key, RetentionEntry | None],
        results_gone: Iterable[Key] = (),
        put_off: Mapping[Key, bool] | None = None,
    ) -> None:
        """Add jobs, or remove them (None). Results of other jobs were removed; pinned jobs (True) do not
        count, and released ones (False) count again.
        """
        changed: dict[Key, RetentionEntry | None] = dict(entries)
        gone = [key for key in results_gone if key not in changed and self.concerns(key[0])]
        held = {key: is_held for key, is_held in (put_off or {}).items() if self.concerns(key[0])}
        there = self._there([*{**changed, **dict.fromkeys(gone), **held}])
        for key in gone:
            if (entry := there.get(key)) is not None:
                changed[key] = entry._replace(result_size=0, result_until=FOREVER)
        for key, is_held in held.items():
            entry = changed[key] if key in changed else there.get(key)
            if entry is not None:
                changed[key] = entry._replace(pinned=is_held)
        sums: defaultdict[Key, list[int]] = defaultdict(lambda: [0, 0])
        for sign, found in ((-1, [there[key] for key in changed if key in there]), (1, changed.values())):
            for entry in found:
                if entry is not None and not entry.pinned:
                    _add(sums[entry.queue, entry.outcome], sign, sign * entry.size)
                    _add(sums[entry.queue, RESULTS], sign * bool(entry.result_size), sign * entry.result_size)
        struck = [key for key, entry in changed.items() if entry is None and key in there]
        self._dialect.delete(models.RetainedJob, rows.KEY, struck)
        entered = [entry for entry in changed.values() if entry is not None]
        self._dialect.insert(models.RetainedJob, RetentionEntry._fields, entered, key=rows.KEY)
        for (queue, kind), (count, size) in sums.items():
            self._sum(queue, kind, count, size)

    def _sum(self, queue: str, kind: str, count: int, size: int) -> None:
        if count or size:
            mine = self._totals().filter(queue=queue, kind=kind)
            if not mine.update(count=F("count") + count, size=F("size") + size):
                self._totals().create(queue=queue, kind=kind, count=count, size=size)
            elif count < 0:
                mine.filter(count=0).delete()

    def _there(self, keys: Sequence[Key]) -> dict[Key, RetentionEntry]:
        ids: defaultdict[str, list[str]] = defaultdict(list)
        for queue, job_id in keys:
            ids[queue].append(job_id)
        found: dict[Key, RetentionEntry] = {}
        for queue, mine in ids.items():
            for chunk in rows.chunked(mine):
                some = self._jobs().filter(queue=queue, job_id__in=chunk)
                for row in some.values_list(*RetentionEntry._fields):
                    found[row[0], row[1]] = RetentionEntry(*row)
        return found

    # Jobs above the limits.

    def surplus(self, queue: str, state: State, limit: int) -> list[str]:
        """Return the ids of up to `limit` jobs above the queue's limit for an outcome, those that expire
        first.
        """
        keep, totals = self._bounded[queue].of(state), self.totals(queue)
        count, size = totals.get(state.value, (0, 0))
        if state is State.COMPLETED:
            size += totals.get(RESULTS, (0, 0))[1]
        surplus = 0 if keep.count is None else count - keep.count
        excess = 0 if keep.bytes is None else size - keep.bytes
        if surplus <= 0 and excess <= 0:
            return []
        ids: list[str] = []
        for job_id, own, result in self.in_order(queue, state)[:limit]:
            if len(ids) >= surplus and excess <= 0:
                break
            ids.append(job_id)
            excess -= own + result
        return ids

    def surplus_results(self, queue: str, limit: int) -> list[tuple[str, str, int]]:
        """Return queue, id and end of up to `limit` jobs whose results are above the queue's limit."""
        maximum = self._bounded[queue].results.bytes
        if maximum is None:
            return []
        excess = self.totals(queue).get(RESULTS, (0, 0))[1] - maximum
        found: list[tuple[str, str, int]] = []
        for job_id, ended_at, size in self.results_in_order(queue)[:limit] if excess > 0 else ():
            if excess <= 0:
                break
            found.append((queue, job_id, ended_at))
            excess -= size
        return found

    def in_order(self, queue: str, state: State) -> QuerySet[Any, Any]:
        """Yield (id, size, size of the result) of jobs with an outcome, by expiry."""
        mine = (
            self._jobs().filter(queue=queue, outcome=state.value, pinned=False).order_by("expires_at", "id")
        )
        return mine.values_list("job_id", "size", "result_size")

    def results_in_order(self, queue: str) -> QuerySet[Any, Any]:
        """Yield (id, end of the job, size of the result) of jobs with results, by expiry of the results."""
        mine = (
            self._jobs().filter(queue=queue, pinned=False, result_size__gt=0).order_by("result_until", "id")
        )
        return mine.values_list("job_id", "ended_at", "result_size")

    def totals(self, queue: str) -> dict[str, tuple[int, int]]:
        """Return the number and bytes of jobs by outcome, and of results, without pinned ones."""
        mine = self._totals().filter(queue=queue).exclude(kind=FILLED)
        return {kind: (count, size) for kind, count, size in mine.values_list("kind", "count", "size")}

    # Changes of the bounded queues.

    def open(self, transaction: Callable[[], AbstractContextManager[None]]) -> None:
        """Add the jobs that ended before their queue was bounded, and remove queues that are no longer
        bounded.
        """
        for queue in {*self._totals().values_list("queue", flat=True)} - {*self._bounded}:
            self._close(queue, transaction)
        filled = dict(self._totals().filter(kind=FILLED).values_list("queue", "size"))
        for queue in self._bounded:
            last: int | None = filled.get(queue, 0)
            while last is not None and last < FOREVER:
                with transaction():
                    last = self._fill(queue, last)

    def _close(self, queue: str, transaction: Callable[[], AbstractContextManager[None]]) -> None:
        while numbers := list(self._jobs().filter(queue=queue).values_list("id", flat=True)[:PAGE]):
            with transaction():
                self._jobs().filter(id__in=numbers).delete()
        self._totals().filter(queue=queue).delete()

    def _fill(self, queue: str, last: int) -> int:
        """Add some of the jobs with row numbers above one; return the last number."""
        there = models.Job.objects.using(self._dialect.alias).filter(
            queue=queue, state__in=[state.value for state in ENDED], id__gt=last
        )
        weight = Func(F("payload"), function="LENGTH", output_field=IntegerField())
        fields = ("id", "job_id", "state", "finished_at", "expires_at")
        texts = ("error_type", "error_message", "traceback")
        page = there.annotate(weight=weight).order_by("id")[:PAGE]
        found = list(rows.raw_values(page, (*fields, "weight", *texts)))
        results = self._results(queue, [row[1] for row in found])
        entries: dict[Key, RetentionEntry | None] = {}
        for number, job_id, state, ended_at, expires_at, size, *error in found:
            last = number
            size += size_of_error(JobFailure(*error)) if any(error) else 0
            result_size, until = results.get(job_id, (0, None))
            is_held = any(end is not None and end >= PUT_OFF for end in (expires_at, until))
            times = (own_end(expires_at), size, result_size, own_end(until))
            entries[queue, job_id] = _entry(queue, job_id, State(state), is_held, ended_at, *times)
        self.write(entries)
        last = last if len(found) == PAGE else FOREVER
        self._totals().update_or_create(queue=queue, kind=FILLED, defaults={"size": last})
        return last

    def _results(self, queue: str, ids: Sequence[str]) -> dict[str, tuple[int, int | None]]:
        found: dict[str, tuple[int, int | None]] = {}
        weight = Func(F("result"), function="LENGTH", output_field=IntegerField())
        for chunk in rows.chunked(ids):
            mine = models.JobResult.objects.using(self._dialect.alias).filter(queue=queue, job_id__in=chunk)
            for job_id, size, until in rows.raw_values(
                mine.annotate(weight=weight), ("job_id", "weight", "expires_at")
            ):
                found[job_id] = size, until
        return found

    def _jobs(self) -> QuerySet[models.RetainedJob]:
        return models.RetainedJob.objects.using(self._dialect.alias)

    def _totals(self) -> QuerySet[models.RetainedTotal]:
        return models.RetainedTotal.objects.using(self._dialect.alias)


def _entry(
    queue: str,
    job_id: str,
    state: State,
    is_held: bool,
    ended_at: int,
    expires_at: int | None,
    size: int,
    result_size: int,
    result_until: int | None,
) -> RetentionEntry:
    forever = FOREVER + ended_at
    return RetentionEntry(
        queue,
        job_id,
        state.value,
        is_held,
        ended_at,
        forever if expires_at is None else expires_at,
        size,
        result_size,
        forever if result_until is None else result_until,
    )


def _add(total: list[int], count: int, size: int) -> None:
    total[0] += count
    total[1] += size
