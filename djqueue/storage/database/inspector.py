"""What the tables say: reads by any process, the scheduler or not."""

from collections.abc import Sequence
from typing import Any

from django.db.models import Count, Min, Q

from djqueue import models
from djqueue.core.durations import to_milliseconds
from djqueue.core.groups import NO_LIMIT, GroupLimit
from djqueue.core.job import DeadLetter, JobRecord, LetterPage, WorkerInfo
from djqueue.core.states import State

from . import rows

WORKER_TTL = 60_000
"""Milliseconds after which a silent worker is not shown."""


class Inspector:
    """Reads of one database."""

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        """See `Storage.jobs`."""
        found = rows.records(self._alias, queue, ids)
        return [found.get(job_id) for job_id in ids]

    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        """See `Storage.states`."""
        found: dict[str, State] = {}
        for chunk in rows.chunked(ids):
            pairs = self._jobs().filter(queue=queue, job_id__in=chunk).values_list("job_id", "state")
            found.update({job_id: State(state) for job_id, state in pairs})
        return [found.get(job_id) for job_id in ids]

    def counts(self, queue: str, states: Sequence[State] = tuple(State)) -> dict[State, int]:
        """See `Storage.counts`; only these states."""
        wanted = [state.value for state in states]
        found = self._jobs().filter(queue=queue, state__in=wanted).values_list("state")
        return {State(state): count for state, count in found.annotate(count=Count("id"))}

    def waiting_names(self, queue: str) -> dict[str, int]:
        """See `Storage.waiting_names`."""
        found = self._jobs().filter(queue=queue, state=State.WAITING.value).values_list("name")
        return dict(found.annotate(count=Count("id")))

    def page(self, queue: str, state: State | None, limit: int, after: str | None) -> list[JobRecord]:
        """See `Storage.page`."""
        found = self._jobs().filter(queue=queue)
        if state is not None:
            found = found.filter(state=state.value)
        if after is not None:
            mark = self._jobs().filter(queue=queue, job_id=after).values_list("created_at", "job_id").first()
            if mark is None:
                return []
            found = found.filter(Q(created_at__gt=mark[0]) | Q(created_at=mark[0], job_id__gt=mark[1]))
        ids = list(found.order_by("created_at", "job_id").values_list("job_id", flat=True)[:limit])
        return [record for record in self.jobs(queue, ids) if record is not None]

    def dead_letters(self, queue: str) -> list[DeadLetter]:
        """See `Storage.dead_letters`."""
        found = models.DeadLetter.objects.using(self._alias).filter(queue=queue)
        ordered = found.order_by("entered_at", "id")
        return [rows.letter_from_row(row) for row in rows.raw_values(ordered, rows.LETTER)]

    def dead_letter_page(self, queue: str, limit: int, after: str | None, now: int) -> LetterPage:
        """See `Storage.dead_letter_page`."""
        found = models.DeadLetter.objects.using(self._alias).filter(queue=queue)
        if after is not None:
            entered, number = map(int, after.split(":"))
            found = found.filter(Q(entered_at__gt=entered) | Q(entered_at=entered, id__gt=number))
        page = list(rows.raw_values(found.order_by("entered_at", "id")[: limit + 1], (*rows.LETTER, "id")))
        letters = [rows.letter_from_row(row[:-1]) for row in page[:limit]]
        is_last = len(page) <= limit
        following = None if is_last else f"{letters[-1].entered_at}:{page[limit - 1][-1]}"
        return LetterPage(letters, following, now)

    def queues(self) -> list[str]:
        """See `Storage.queues`: a step of the index for each queue, however many jobs there are."""
        names: set[str] = set(models.QueueState.objects.using(self._alias).values_list("name", flat=True))
        names.update(models.GroupState.objects.using(self._alias).values_list("queue", flat=True).distinct())
        last = ""
        while True:
            after = self._jobs().filter(queue__gt=last).aggregate(name=Min("queue"))["name"]
            if after is None:
                return sorted(names)
            names.add(after)
            last = after

    def is_paused(self, queue: str) -> bool:
        """See `Storage.is_paused`."""
        found = models.QueueState.objects.using(self._alias)
        return found.filter(name=queue, paused=True).exists()

    def group_limits(self, queue: str) -> dict[str | None, GroupLimit]:
        """See `Storage.group_limits`."""
        found = models.GroupState.objects.using(self._alias).filter(queue=queue)
        values = found.values_list("group", "concurrency", "paused")
        limits = {group or None: GroupLimit(concurrency, paused) for group, concurrency, paused in values}
        return {group: limit for group, limit in limits.items() if limit != NO_LIMIT}

    def workers(self, now: int) -> list[WorkerInfo]:
        """See `Storage.workers`."""
        found = models.WorkerState.objects.using(self._alias).filter(seen_at__gt=now - WORKER_TTL)
        names = ("worker_id", *WorkerInfo._fields[1:])
        infos = []
        for values in found.order_by("worker_id").values_list(*names):
            row = dict(zip(WorkerInfo._fields, values, strict=True))
            row["queues"] = None if row["queues"] is None else tuple(row["queues"])
            row["names"] = tuple(row["names"])
            for name in ("started_at", "seen_at"):
                row[name] = to_milliseconds(row[name])
            infos.append(WorkerInfo(**row))
        return infos

    def _jobs(self) -> Any:
        return models.Job.objects.using(self._alias)
