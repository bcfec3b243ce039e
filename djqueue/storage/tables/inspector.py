"""Read jobs, queues and workers from the tables, in any process."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.db.models import Count, Q

from djqueue import models
from djqueue.core.errors import OptionError
from djqueue.core.graph import FlowNode, JobLink, link
from djqueue.core.groups import GroupLimit
from djqueue.core.job import DeadLetterPage, DeadLetterRecord, ItemMark, ItemPage, JobRecord, WorkerInfo
from djqueue.core.limiter import Rate
from djqueue.core.options import JobKey
from djqueue.core.pages import JobPage, PagePosition, mark_of, page_of, position_of
from djqueue.core.states import State
from djqueue.core.streams import are_readable, cut
from djqueue.core.summaries import JobSummaryPage, first_of, mark_in

from . import names, rows, workerrows
from .groups import group_limits

WORKER_TTL = 60_000
"""Milliseconds after which a silent worker is no longer listed."""
ITEMS = 100
"""Maximum rows per query."""
LINK = ("job_id", "name", "state", "reason", "options", "created_at", "finished_at")


class DatabaseInspector:
    """Reads of one database."""

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        """Return the records of jobs, in the order of `ids`; None for unknown ones."""
        found = rows.records(self._alias, queue, ids)
        return [found.get(job_id) for job_id in ids]

    def items(self, queue: str, marks: Sequence[ItemMark], now: int) -> list[ItemPage | None]:
        """Return a page of streamed items for each position."""
        return [self._item_page(queue, mark, now) for mark in marks]

    def _item_page(self, queue: str, mark: ItemMark, now: int) -> ItemPage | None:
        job = self._jobs().filter(queue=queue, job_id=mark.id)
        row = next(iter(rows.raw_values(job, ("state", "options", "finished_at", "items"))), None)
        if row is None:
            return None
        state, options, count = State(row[0]), rows.unpack_options(bytes(row[1])), row[3]
        mine = models.JobItem.objects.using(self._alias).filter(queue=queue, job_id=mark.id)
        run = mine.filter(number=0).values_list("run", flat=True).first() or 0
        start = mark.start if mark.run == run else 0
        found: tuple[bytes, ...] = ()
        if run and are_readable(state, options, row[2] or 0, now):
            ahead = mine.filter(run=run, number__gte=start).order_by("number")[:ITEMS]
            found = cut(bytes(item) for (item,) in rows.raw_values(ahead, ("item",)))
        return ItemPage(state, options.content_type, run, start, found, max(count, start + len(found)))

    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        """Return the states of jobs, in the order of `ids`; None for unknown ones."""
        found: dict[str, State] = {}
        for chunk in rows.chunked(ids):
            pairs = self._jobs().filter(queue=queue, job_id__in=chunk).values_list("job_id", "state")
            found.update({job_id: State(state) for job_id, state in pairs})
        return [found.get(job_id) for job_id in ids]

    def counts(self, queue: str, states: Sequence[State] = tuple(State)) -> dict[State, int]:
        """Return the number of jobs in each of these states."""
        wanted = [state.value for state in states]
        found = self._jobs().filter(queue=queue, state__in=wanted).values_list("state")
        return {State(state): count for state, count in found.annotate(count=Count("id"))}

    def stale_leases(self, until: int) -> dict[str, int]:
        """Return the number of active jobs by queue whose lease expired before a time."""
        found: dict[str, int] = {}
        for chunk in rows.chunked(self.queues()):
            active = self._jobs().filter(queue__in=chunk, state=State.ACTIVE.value, leased_until__lt=until)
            found.update(active.values_list("queue").annotate(count=Count("id")))
        return found

    def waiting_names(self, queue: str) -> dict[str, int]:
        """Return the number of waiting jobs by name."""
        found = self._jobs().filter(queue=queue, state=State.WAITING.value).values_list("name")
        return dict(found.annotate(count=Count("id")))

    def page(self, queue: str, state: State | None, limit: int, after: str | None) -> list[JobRecord]:
        """Return the first jobs of a queue in a state, or in any state."""
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

    def last_row(self) -> int:
        """Return the primary key of the newest job; 0 if there are none."""
        return self._jobs().order_by("-id").values_list("id", flat=True).first() or 0

    def cursor_page(
        self, queue: str, state: State, limit: int, cursor: str | None, *, newest_first: bool
    ) -> JobPage:
        """Return a page of jobs in the order of their rows, with one query."""
        place = position_of(cursor, newest_first=newest_first)
        wanted = self.placed(queue, state, place)[: limit + 1]
        page = rows.raw_values(wanted, ("id", *rows.JOB_FIELDS))
        found = [(f"{row[0]}:", rows.job_from_row(row[1:]).record()) for row in page]
        return page_of(found, limit, place)

    def placed(self, queue: str, state: State, place: PagePosition) -> Any:
        """Return a query of the rows of a page and of all later ones."""
        found = self._jobs().filter(queue=queue, state=state.value)
        if place.mark is not None:
            number, _ = mark_of(place.mark)
            found = found.filter(id__lt=number) if place.is_descending else found.filter(id__gt=number)
        return found.order_by("-id" if place.is_descending else "id")

    def links(self, keys: Iterable[JobKey]) -> dict[JobKey, JobLink]:
        """Return the existing jobs among these, with their own dependencies."""
        by_queue: dict[str, list[str]] = {}
        for queue, job_id in keys:
            by_queue.setdefault(queue, []).append(job_id)
        found = {}
        for queue, ids in by_queue.items():
            for chunk in rows.chunked(ids):
                mine = self._jobs().filter(queue=queue, job_id__in=chunk)
                for row in rows.raw_values(mine, LINK):
                    found[queue, row[0]] = _link(queue, row)
        return found

    def newest_blocked(self, queue: str, limit: int) -> Iterator[tuple[JobKey, tuple[JobKey, ...]]]:
        """Yield the blocked jobs of a queue with their dependencies."""
        blocked = self._jobs().filter(queue=queue, state=State.BLOCKED.value).order_by("-id")[:limit]
        for job_id, options in rows.raw_values(blocked, ("job_id", "options")):
            yield (queue, job_id), rows.unpack_options(bytes(options)).depends_on

    def find(self, job_id: str, queues: Sequence[str]) -> list[tuple[str, State]]:
        """Return the queues that have a job with this id, and its state in each."""
        found: dict[str, str] = {}
        for chunk in rows.chunked(queues):
            pairs = self._jobs().filter(queue__in=chunk, job_id=job_id).values_list("queue", "state")
            found.update(pairs)
        return [(queue, State(found[queue])) for queue in queues if queue in found]

    def about(
        self, subject: str, limit: int, cursor: str | None, queues: Sequence[str] | None
    ) -> JobSummaryPage:
        """Return a page of the newest jobs about a subject, with one query of the index."""
        some = self.mentions(subject, cursor, queues)[: limit + 1]
        page = rows.raw_values(some, ("id", *rows.MENTION))
        return first_of([(f"{row[5]}:{row[0]}", rows.mention_of(row[1:])) for row in page], limit)

    def mentions(self, subject: str, cursor: str | None, queues: Sequence[str] | None) -> Any:
        """Return a query of the rows of a page of jobs about a subject, and of all later ones."""
        found = self._jobs().filter(subject=subject)
        mark = mark_in(cursor)
        if mark is not None:
            at, number = mark_of(mark)
            if not number.isdecimal():
                raise OptionError(f"cursor: {cursor!r} is invalid; pass the cursor of an earlier page")
            # The first is what the index can begin at.
            found = found.filter(created_at__lte=at).exclude(created_at=at, id__gte=int(number))
        if queues is not None:
            found = found.filter(queue__in=queues)
        return found.order_by("-created_at", "-id")

    def dead_letters(self, queue: str) -> list[DeadLetterRecord]:
        """Return the dead letters of a queue, oldest first."""
        found = models.DeadLetter.objects.using(self._alias).filter(queue=queue)
        # Not by time: a moved one keeps the time of its death, and arrives behind the others.
        return [rows.letter_from_row(row) for row in rows.raw_values(found.order_by("id"), rows.LETTER)]

    def dead_letter_page(self, queue: str, limit: int, after: str | None, now: int) -> DeadLetterPage:
        """Return a page of dead letters, oldest first."""
        found = models.DeadLetter.objects.using(self._alias).filter(queue=queue)
        if after is not None:
            found = found.filter(id__gt=int(after))
        page = list(rows.raw_values(found.order_by("id")[: limit + 1], (*rows.LETTER, "id")))
        letters = [rows.letter_from_row(row[:-1]) for row in page[:limit]]
        is_last = len(page) <= limit
        following = None if is_last else str(page[limit - 1][-1])
        return DeadLetterPage(letters, following, now)

    def queues(self) -> list[str]:
        """Return the names of queues, with one step of the index per queue."""
        told = models.QueueState.objects.using(self._alias).values_list("name")
        grouped = models.GroupState.objects.using(self._alias).values_list("queue")
        found = {name for (name,) in told.union(grouped)}
        return sorted(found.union(names.used_queues(self._alias, models.Job)))

    def is_paused(self, queue: str) -> bool:
        """Return whether a queue is paused."""
        found = models.QueueState.objects.using(self._alias)
        return found.filter(name=queue, paused=True).exists()

    def group_limits(self, queue: str) -> dict[str | None, GroupLimit]:
        """Return the limits set on groups of a queue."""
        return {group: said for (_, group), said in group_limits(self._alias, queue=queue).items()}

    def limiter(self, name: str) -> tuple[Rate | None, int | None] | None:
        """Return the rate and concurrency that were set on a limiter at run time; None if the settings
        apply.
        """
        found = models.LimiterState.objects.using(self._alias).filter(name=name).first()
        return None if found is None else rows.limits(found)

    def workers(self, now: int) -> list[WorkerInfo]:
        """Return the workers that have not been silent for too long."""
        found = models.WorkerState.objects.using(self._alias).filter(seen_at__gt=now - WORKER_TTL)
        return [workerrows.worker_from_row(row) for row in found.order_by("worker_id")]

    def _jobs(self) -> Any:
        return models.Job.objects.using(self._alias)


def _link(queue: str, row: rows.Row) -> JobLink:
    job_id, name, state, reason, options, created_at, finished_at = row
    node = FlowNode(
        queue,
        job_id,
        name,
        State(state),
        "" if reason == rows.CANCEL_REQUESTED else reason,
        created_at=created_at,
        finished_at=finished_at or 0,
    )
    return link(node, rows.unpack_options(bytes(options)))
