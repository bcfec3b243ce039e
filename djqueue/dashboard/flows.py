"""Workflows: read around a job, summarized, and found among the newest jobs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from django.http import HttpRequest

from djqueue.client import get_storage
from djqueue.core.flow import FlowGraph, FlowNode
from djqueue.core.job import JobRecord
from djqueue.core.options import JobKey
from djqueue.core.states import LIVE, TERMINAL, State

from . import queries, rights
from .snapshot import CachedRead, snapshots

LISTED = 20
"""Maximum workflows in the list."""
LOOKED_AT = 200
"""Maximum jobs read of each workflow, in the list and on a job's page."""
EACH = 50
"""Newest jobs of each queue and state that are searched for workflows."""
QUEUES = 20
"""Maximum queues searched: those with most such jobs."""
FRESH = 3_000
"""Milliseconds before the list is read again."""
NEAR = 50
"""Maximum dependencies and dependents named on a job's page."""
KINDS: dict[str, tuple[State, ...]] = {
    "live": (State.BLOCKED, State.ACTIVE, State.WAITING, State.DELAYED),
    "failed": (State.FAILED,),
    "completed": (State.COMPLETED,),
    "cancelled": (State.CANCELLED,),
}
"""States of jobs that are searched for workflows, by kind of list."""


class Summary(NamedTuple):
    """A workflow as a row of the list."""

    graph: FlowGraph
    last: FlowNode
    """The first final job, which identifies the workflow."""
    others: int
    """The number of other final jobs."""

    @property
    def counts(self) -> list[tuple[State | None, int]]:
        """Jobs by state; None stands for removed jobs."""
        found = Counter(node.state for node in self.graph.nodes)
        return [(state, found[state]) for state in (*State, None) if found[state]]

    @property
    def total(self) -> int:
        return len(self.graph.nodes)

    @property
    def ended(self) -> int:
        return sum(node.state is None or node.state in TERMINAL for node in self.graph.nodes)

    @property
    def is_live(self) -> bool:
        """Whether a job is pending or active."""
        return any(node.state in LIVE for node in self.graph.nodes)

    @property
    def began_at(self) -> int:
        """Time at which the first job was enqueued, in UTC milliseconds."""
        return min((node.created_at for node in self.graph.nodes if node.created_at), default=0)

    @property
    def ended_at(self) -> int | None:
        """Time at which the last job finished; None while jobs are pending or active."""
        return None if self.is_live else max(node.finished_at for node in self.graph.nodes)


class Around(NamedTuple):
    """The workflow of a job, for the job's page."""

    size: int
    cut: bool
    before: list[FlowNode]
    """Dependencies of the job."""
    after: list[FlowNode]
    """Known dependents of the job."""
    more_before: int
    """The number of dependencies that are not listed."""
    more_after: int


def visible(request: HttpRequest, graph: FlowGraph) -> FlowGraph:
    """Return a workflow without jobs that the user can't see."""
    return graph.only(lambda name: rights.sees(request, name))


def failed(request: HttpRequest, graph: FlowGraph) -> tuple[list[FlowNode], list[FlowNode]]:
    """Return the visible jobs of `FlowGraph.failed`, which needs the whole workflow."""
    able, early = graph.failed()
    seen = {node.key for node in visible(request, graph).nodes}
    return [node for node in able if node.key in seen], [node for node in early if node.key in seen]


def around(request: HttpRequest, queue: str, job_id: str) -> Around | None:
    """Return the workflow of a job; None if the job has neither dependencies nor dependents."""
    whole = get_storage().reads.flow(queue, job_id, LOOKED_AT)
    graph = whole and visible(request, whole)
    if graph is None or len(graph.nodes) < 2:
        return None
    before, after = graph.before(graph.root), graph.after(graph.root)
    return Around(
        len(graph.nodes),
        graph.cut,
        before[:NEAR],
        after[:NEAR],
        max(0, len(before) - NEAR),
        max(0, len(after) - NEAR),
    )


def summary(graph: FlowGraph) -> Summary:
    """Summarize a workflow."""
    last = graph.last()
    return Summary(graph, last[0], len(last) - 1)


def newest(request: HttpRequest, kind: str) -> CachedRead[list[Summary]]:
    """Return the workflows of the newest jobs in some states, newest first."""
    lines = queries.board(request).value.lines
    wanted: list[tuple[State, str]] = []
    for state in KINDS[kind]:
        counted = sorted((-line.count(state), line.name) for line in lines if line.count(state))
        wanted += [(state, name) for _, name in counted[:QUEUES]]
    cached = snapshots.read(("flows", kind, tuple(wanted)), lambda: _graphs(wanted), FRESH)
    seen = [visible(request, graph) for graph in cached.value]
    rows = sorted(map(summary, seen), key=lambda row: -row.began_at)
    return CachedRead(rows, cached.at, cached.error)


def _graphs(wanted: Sequence[tuple[State, str]]) -> list[FlowGraph]:
    """Return the workflows of the newest jobs of these states and queues."""
    storage = get_storage()
    records = [one for state, name in wanted for one in storage.reads.cursor_page(name, state, EACH).jobs]
    records = [one for one in records if one.options.depends_on or one.options.dependents]
    records.sort(key=lambda one: -one.created_at)
    found: list[FlowGraph] = []
    known: set[JobKey] = set()
    for record in records:
        if len(found) == LISTED:
            break
        if not known.isdisjoint(_near(record)):
            continue
        known.update(_near(record))
        graph = storage.reads.flow(record.queue, record.id, LOOKED_AT)
        if graph is None:
            continue
        keys = {node.key for node in graph.nodes}
        # Of a large workflow, other jobs may have been found before.
        if len(keys) > 1 and not any(node.key in keys for one in found for node in one.nodes):
            found.append(graph)
        known |= keys
    return found


def _near(record: JobRecord) -> Iterable[JobKey]:
    return (record.queue, record.id), *record.options.depends_on, *record.options.dependents
