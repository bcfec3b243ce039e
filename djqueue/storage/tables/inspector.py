"""Read jobs, queues and workers from the tables, in any process."""

from collections.abc import Sequence
from typing import Any

from django.db import connections
from django.db.models import Min, Model, Q

from djqueue import models
from djqueue.core.errors import OptionError
from djqueue.core.job import JobRecord
from djqueue.core.logs import storable
from djqueue.core.pages import JobSummaryPage, first_of, mark_in, mark_of
from djqueue.core.policies import KeyLimit
from djqueue.core.states import State
from djqueue.storage.tables import rows
from djqueue.storage.tables.rows import key_limits


class DatabaseInspector:
    """Reads of one database."""

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        """Return the records of jobs, in the order of `ids`; None for unknown ones."""
        found = rows.records(self._alias, queue, ids)
        return [found.get(job_id) for job_id in ids]

    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        """Return the states of jobs, in the order of `ids`; None for unknown ones."""
        found: dict[str, State] = {}
        for chunk in rows.chunked(ids):
            pairs = self._jobs().filter(queue=queue, job_id__in=chunk).values_list("job_id", "state")
            found.update({job_id: State(state) for job_id, state in pairs})
        return [found.get(job_id) for job_id in ids]

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
        if storable(subject) != subject:
            return first_of([], limit)  # An enqueue refuses it.
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

    def queues(self) -> list[str]:
        """Return the names of queues, with one step of the index per queue."""
        told = models.QueueState.objects.using(self._alias).values_list("name")
        grouped = models.GroupState.objects.using(self._alias).values_list("queue")
        found = {name for (name,) in told.union(grouped)}
        return sorted(found.union(used_queues(self._alias, models.Job)))

    def key_limits(self, queue: str) -> dict[str | None, KeyLimit]:
        """Return the limits set on groups of a queue."""
        return {group: said for (_, group), said in key_limits(self._alias, queue=queue).items()}

    def _jobs(self) -> Any:
        return models.Job.objects.using(self._alias)


def used_queues(alias: str, model: type[Model], limit: int | None = None) -> list[str]:
    """Return the distinct queues in a table, in order, at most `limit`.

    Each queue is one probe of the index: 0.6 ms where a SELECT DISTINCT of ten million rows takes half a
    second.
    """
    if connections[alias].vendor == "oracle":  # Oracle has another syntax for recursion.
        return probed(alias, model, limit)
    quote = connections[alias].ops.quote_name
    field: Any = model._meta.get_field("queue")
    table, column = quote(model._meta.db_table), quote(field.column)
    statement = f"""
        WITH RECURSIVE found(name) AS (
            SELECT MIN({column}) FROM {table}
            UNION ALL
            SELECT (SELECT MIN({column}) FROM {table} WHERE {column} > found.name)
            FROM found WHERE found.name IS NOT NULL
        )
        SELECT name FROM found WHERE name IS NOT NULL
    """
    bound = () if limit is None else (limit,)
    with connections[alias].cursor() as cursor:
        cursor.execute(statement + ("LIMIT %s" if bound else ""), bound)
        return [name for (name,) in cursor.fetchall()]


def probed(alias: str, model: type[Model], limit: int | None = None) -> list[str]:
    """Like `used_queues`, with one query for each queue."""
    found: list[str] = []
    rows = model._default_manager.using(alias)
    while limit is None or len(found) < limit:
        later = rows.filter(queue__gt=found[-1]) if found else rows
        first = later.aggregate(first=Min("queue"))["first"]
        if first is None:
            break
        found.append(first)
    return found
