"""Flows as the pages show them: read around a job, counted, and found among the newest jobs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from django.http import HttpRequest

from djqueue.client import get_storage
from djqueue.core.graph import MOST, FlowGraph, FlowNode
from djqueue.core.job import JobRecord
from djqueue.core.options import JobKey
from djqueue.core.states import LIVE, TERMINAL, State

from . import queries, rights
from .snapshot import CachedRead, snapshots

LISTED = 20
"""Flows of the list."""
LOOKED_AT = 200
"""Jobs of each of them, and of a job's own flow on its page."""
EACH = 50
"""The newest jobs of a queue and state among which flows are looked for."""
QUEUES = 20
"""Queues of the list: those with most such jobs."""
FRESH = 3_000
"""Milliseconds for which the list is shown again."""
NEAR = 50
"""Jobs before and behind one that its page names."""
KINDS: dict[str, tuple[State, ...]] = {
    "live": (State.BLOCKED, State.ACTIVE, State.WAITING, State.DELAYED),
    "failed": (State.FAILED,),
    "completed": (State.COMPLETED,),
    "cancelled": (State.CANCELLED,),
}
"""In which states of their jobs flows are looked for."""


class Summary(NamedTuple):
    """A flow in a line."""

    graph: FlowGraph
    last: FlowNode
    """The first of those that it leads to: by it the flow is named and found again."""
    others: int
    """How many else it leads to."""

    @property
    def counts(self) -> list[tuple[State | None, int]]:
        """Jobs by state; None are those that are gone."""
        found = Counter(node.state for node in self.graph.nodes)
        return [(state, found[state]) for state in (*State, None) if found[state]]

    @property
    def total(self) -> int:
        """Its jobs."""
        return len(self.graph.nodes)

    @property
    def ended(self) -> int:
        """Those that have ended."""
        return sum(node.state is None or node.state in TERMINAL for node in self.graph.nodes)

    @property
    def is_live(self) -> bool:
        """Whether one of its jobs runs, or will."""
        return any(node.state in LIVE for node in self.graph.nodes)

    @property
    def began_at(self) -> int:
        """When the first of its jobs was enqueued: UTC milliseconds."""
        return min((node.created_at for node in self.graph.nodes if node.created_at), default=0)

    @property
    def ended_at(self) -> int | None:
        """When the last of its jobs ended; None: they have not."""
        return None if self.is_live else max(node.finished_at for node in self.graph.nodes)


class Around(NamedTuple):
    """What a job's page tells of its flow."""

    size: int
    cut: bool
    before: list[FlowNode]
    """What it depends on."""
    after: list[FlowNode]
    """What depends on it, as far as that is known."""
    more_before: int
    """How many of these are not named."""
    more_after: int


def read(request: HttpRequest, queue: str, job_id: str, limit: int = MOST) -> FlowGraph | None:
    """The flow around a job, without the jobs that the user is not to know of."""
    graph = get_storage().reads.flow(queue, job_id, limit)
    return None if graph is None else visible(request, graph)


def visible(request: HttpRequest, graph: FlowGraph) -> FlowGraph:
    """A flow without the jobs that the user is not to know of."""
    return graph.only(lambda name: rights.sees(request, name))


def failed(request: HttpRequest, graph: FlowGraph) -> tuple[list[FlowNode], list[FlowNode]]:
    """See `FlowGraph.failed`: of a whole flow, as a job may depend on one that the user does not see."""
    able, early = graph.failed()
    seen = {node.key for node in visible(request, graph).nodes}
    return [node for node in able if node.key in seen], [node for node in early if node.key in seen]


def around(request: HttpRequest, queue: str, job_id: str) -> Around | None:
    """A job's flow in short; None if it is in none."""
    graph = read(request, queue, job_id, LOOKED_AT)
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
    """A flow in a line."""
    last = graph.last()
    return Summary(graph, last[0], len(last) - 1)


def newest(request: HttpRequest, kind: str) -> CachedRead[list[Summary]]:
    """Flows of the newest jobs in some states, the newest flow first."""
    lines = queries.board(request).value.lines
    wanted: list[tuple[State, str]] = []
    for state in KINDS[kind]:
        counted = sorted((-line.count(state), line.name) for line in lines if line.count(state))
        wanted += [(state, name) for _, name in counted[:QUEUES]]
    cached = snapshots.read(("flows", kind, tuple(wanted)), lambda: _graphs(wanted), FRESH)
    seen = [graph.only(lambda name: rights.sees(request, name)) for graph in cached.value]
    rows = sorted(map(summary, seen), key=lambda row: -row.began_at)
    return CachedRead(rows, cached.at, cached.away)


def _graphs(wanted: Sequence[tuple[State, str]]) -> list[FlowGraph]:
    """The flows of the newest jobs of these states and queues that are in one."""
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
        # Of a flow with more jobs than are looked at another one may have been met before.
        if len(keys) > 1 and not any(node.key in keys for one in found for node in one.nodes):
            found.append(graph)
        known |= keys
    return found


def _near(record: JobRecord) -> Iterable[JobKey]:
    return (record.queue, record.id), *record.options.depends_on, *record.options.dependents
