"""Answer reads from the tables alone while no scheduler is running.

Each statement reads a bounded number of jobs for each queue and state.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from django.db import connections
from django.db.models import Case, F, When

from djqueue import models
from djqueue.core.explain import Dependency, Facts
from djqueue.core.graph import FlowGraph, JobLink, explore, walked
from djqueue.core.groups import NO_LIMIT, GroupOverview
from djqueue.core.limiter import Rate
from djqueue.core.options import JobKey
from djqueue.core.overview import NO_TOTALS, GroupsOverview, Overview, QueueOverview
from djqueue.core.queue import QueuePolicy
from djqueue.core.states import State
from djqueue.storage.tables import rows
from djqueue.storage.tables.groups import recorded_modes
from djqueue.storage.tables.inspector import DatabaseInspector

CAP = 10_000
"""Maximum jobs to count in a queue and state."""
DETAILED = frozenset({State.WAITING, State.DELAYED})
"""States whose jobs are counted by name, with the earliest time."""
BLOCKED = 200
"""Maximum blocked jobs of a queue to search for dependents."""
AT_ONCE = 50
"""Queues in one statement: SQLite allows 500 parts in a union, and each queue needs seven."""


class JobCountPart(NamedTuple):
    """The count of a queue's jobs with one state and name."""

    queue: str
    state: State
    name: str
    jobs: int
    since: int | None
    """The earliest time at which one was enqueued or due, in UTC milliseconds."""


def overview(alias: str, queues: Sequence[str], now: int, policy: Callable[[str], QueuePolicy]) -> Overview:
    """Return the overview of queues. Waiting jobs count as claimable, because the tables have no more
    detail."""
    parts: dict[str, list[JobCountPart]] = {}
    for start in range(0, len(queues), AT_ONCE):
        for part in _parts(alias, list(dict.fromkeys(queues[start : start + AT_ONCE]))):
            parts.setdefault(part.queue, []).append(part)
    said = {row.name: row for row in models.QueueState.objects.using(alias).all()}
    recorded = recorded_modes(alias)
    found = []
    for queue in queues:
        mode = recorded.get(queue, policy(queue).group_mode)
        found.append(_of(queue, parts.get(queue, ()), said.get(queue), policy(queue), mode))
    return Overview(now, found, capped=True)


def groups(alias: str, queue: str, limit: int, names: Sequence[str], policy: QueuePolicy) -> GroupsOverview:
    """Return a queue's groups, from a bounded number of its jobs."""
    told = DatabaseInspector(alias).group_limits(queue)
    common = told.get(None, NO_LIMIT)
    waiting, whole = _by_group(alias, queue, State.WAITING)
    active, _ = _by_group(alias, queue, State.ACTIVE)

    def row(name: str) -> GroupOverview:
        said = told.get(name, NO_LIMIT)
        return GroupOverview(
            name,
            waiting.get(name, 0),
            active.get(name, 0),
            policy.group_limit and (said.concurrency or common.concurrency or policy.group_limit),
            said.rate or common.rate or policy.group_rate,
            said.weight or policy.group_weights.get(name, 1),
            said.paused,
            said,
        )

    busiest = sorted(waiting, key=lambda name: (-waiting[name], name))[:limit]
    return GroupsOverview(
        recorded_modes(alias, [queue]).get(queue, policy.group_mode),
        policy.group_limit and (common.concurrency or policy.group_limit),
        common.rate or policy.group_rate,
        common,
        [row(name) for name in busiest],
        [row(name) for name in names],
        whole,
    )


def _by_group(alias: str, queue: str, state: State) -> tuple[dict[str, int], bool]:
    """Return the numbers of jobs in a state by group, and whether all jobs were counted."""
    jobs = models.Job.objects.using(alias).filter(queue=queue, state=state.value)
    some = list(jobs.values_list("group", flat=True)[: CAP + 1])
    return dict(Counter(group for group in some if group is not None)), len(some) <= CAP


def facts(alias: str, queue: str, job_id: str, now: int, policy: QueuePolicy) -> Facts | None:
    """Return the facts that explain why a job is not running, apart from missing workers."""
    inspector = DatabaseInspector(alias)
    record = rows.records(alias, queue, [job_id], belongings=False).get(job_id)
    if record is None:
        return None
    group = record.options.group if policy.group_limit else None
    unmet: tuple[Dependency, ...] = ()
    if record.state is State.BLOCKED:
        depends_on = record.options.depends_on
        found = [Dependency(name, other, inspector.states(name, [other])[0]) for name, other in depends_on]
        unmet = tuple(one for one in found if one.state is not State.COMPLETED)
    return Facts(
        now,
        queue,
        job_id,
        record.name,
        record.state,
        record.run_at,
        paused=inspector.is_paused(queue),
        worker=record.worker,
        unmet=unmet,
        group=group,
        group_paused=group is not None and inspector.group_limits(queue).get(group, NO_LIMIT).paused,
    )


def flow(alias: str, root: JobKey, limit: int) -> FlowGraph | None:
    """Return the graph of a workflow. Dependents are found in flows and among the newest blocked jobs."""
    inspector = DatabaseInspector(alias)
    waiting: dict[JobKey, list[JobKey]] = {}
    for queue in inspector.queues()[:AT_ONCE]:
        for key, depends_on in inspector.newest_blocked(queue, BLOCKED):
            for other in depends_on:
                waiting.setdefault(other, []).append(key)

    def look(keys: list[JobKey]) -> dict[JobKey, JobLink]:
        return {
            key: one._replace(dependents=(*waiting.get(key, ()), *one.dependents))
            for key, one in inspector.links(keys).items()
        }

    return walked(explore(root, limit), look)


def _of(
    queue: str, parts: Sequence[JobCountPart], said: models.QueueState | None, policy: QueuePolicy, mode: str
) -> QueueOverview:
    rate, concurrency = limits(said, policy)
    counts = dict.fromkeys(State, 0)
    for part in parts:
        counts[part.state] += part.jobs
    waiting = [part for part in parts if part.state is State.WAITING]
    return QueueOverview(
        queue,
        {state: min(count, CAP) for state, count in counts.items()},
        said is not None and said.paused,
        _earliest(waiting),
        _earliest([part for part in parts if part.state is State.DELAYED]),
        rate,
        rate.capacity if rate is not None else None,
        concurrency,
        min(counts[State.ACTIVE], CAP),
        mode,
        0,
        {part.name: part.jobs for part in waiting},
        NO_TOTALS,
    )


def limits(said: models.QueueState | None, policy: QueuePolicy) -> tuple[Rate | None, int | None]:
    """Return rate and concurrency: the queue's override at run time, or the configured values."""
    if said is None or not (said.rate_capacity or said.concurrency):
        return policy.rate, policy.concurrency
    rate = Rate(said.rate_capacity, said.rate_per or 1_000) if said.rate_capacity else None
    return rate, said.concurrency


def _earliest(parts: Sequence[JobCountPart]) -> int | None:
    return min((part.since for part in parts if part.since is not None), default=None)


def _parts(alias: str, queues: Sequence[str]) -> Iterator[JobCountPart]:
    connection = connections[alias]
    statements: list[str] = []
    values: list[str] = []
    # Compiling one for each queue and state would take as long as counting.
    compiled = {detailed: _first(alias, detailed=detailed) for detailed in (True, False)}
    for place, queue in enumerate(queues):
        for at, state in enumerate(State):
            detailed = state in DETAILED
            of_each = "name, COUNT(*), MIN(since)" if detailed else "'', COUNT(*), NULL"
            by = "GROUP BY name" if detailed else ""
            statements.append(f"SELECT {place}, {at}, {of_each} FROM ({compiled[detailed]}) part {by}")
            values += [queue, state.value]
    with connection.cursor() as cursor:
        cursor.execute(" UNION ALL ".join(statements), values)
        states = list(State)
        for place, at, name, count, since in cursor.fetchall():
            yield JobCountPart(queues[place], states[at], name, count, since)


def _first(alias: str, *, detailed: bool) -> str:
    """Return SQL that selects a bounded number of jobs, with names and times if `detailed`.

    Its parameters are a queue and a state.
    """
    jobs = models.Job.objects.using(alias).filter(queue="queue", state="state")
    since = Case(When(run_at__gt=F("created_at"), then=F("run_at")), default=F("created_at"))
    # Ids alone come from an index, without the rows.
    wanted = jobs.values_list("name").annotate(since=since) if detailed else jobs.values_list("id")
    statement, parameters = wanted[: CAP + 1].query.get_compiler(alias).as_sql()
    assert tuple(parameters) == ("queue", "state")
    return str(statement)
