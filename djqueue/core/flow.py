"""Jobs connected by dependencies: the order in which they are enqueued, and the graph around one of them."""

from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from .errors import OptionError
from .job import Batch, EnqueueResult
from .options import JobKey, JobOptions
from .states import TERMINAL, State

Node = TypeVar("Node", bound=Hashable)


def levels(
    nodes: Iterable[Node], needs: Callable[[Node], Iterable[Node]], describe: Callable[[Node], str]
) -> list[list[Node]]:
    """Return the nodes in levels, each node in a later level than all that it needs.

    Nodes of one level need none of each other, and keep the order in which they were given. Raises
    OptionError, which names the nodes of a cycle, if there is one.
    """
    left = {node: set(needs(node)) for node in nodes}
    needed_by: dict[Node, list[Node]] = {node: [] for node in left}
    for node, wanted in left.items():
        for other in wanted:
            needed_by[other].append(node)
    positions = {node: index for index, node in enumerate(left)}
    ordered: list[list[Node]] = []
    level = [node for node, wanted in left.items() if not wanted]
    while level:
        ordered.append(level)
        freed: dict[Node, None] = {}
        for node in level:
            for other in needed_by[node]:
                left[other].discard(node)
                if not left[other]:
                    freed[other] = None
            del left[node]
        level = sorted(freed, key=positions.__getitem__)
    if left:
        cycle = " -> ".join(map(describe, _cycle(left, positions)))
        raise OptionError(f"depends_on: these jobs depend on each other in a cycle: {cycle}")
    return ordered


def _cycle(left: dict[Node, set[Node]], positions: dict[Node, int]) -> list[Node]:
    """Return a cycle among nodes each of which needs another one."""
    path: dict[Node, int] = {}
    node = next(iter(left))
    while node not in path:
        path[node] = len(path)
        node = min(left[node], key=positions.__getitem__)
    return [*list(path)[path[node] :], node]


# The batches of one call of a storage.
def outside(batches: Sequence[Batch]) -> list[JobKey]:
    """Return the dependencies of a call's jobs outside the call.

    Raises OptionError for a job that would wait for itself.
    """
    if not any(batch.options.depends_on for batch in batches):
        return []
    inside: set[JobKey] = set()
    dependencies: dict[JobKey, None] = {}
    for batch in batches:
        own = {(batch.queue, job_id) for job_id in batch.ids or ()}
        for key in batch.options.depends_on:
            if key in own:
                raise OptionError(f"depends_on: job {key[1]!r} cannot depend on itself")
            if key not in inside:
                dependencies[key] = None
        inside |= own
    return list(dependencies)


def waves(batches: Sequence[Batch]) -> list[list[int]]:
    """Return the indexes of a call's batches in waves: the dependencies of a batch are in an earlier wave."""
    if len(batches) == 1 or not any(batch.options.depends_on for batch in batches):
        return [list(range(len(batches)))]
    wave_of: dict[JobKey, int] = {}
    indexes: list[list[int]] = []
    for index, batch in enumerate(batches):
        wave = max((wave_of[key] + 1 for key in batch.options.depends_on if key in wave_of), default=0)
        # Of an id that occurs twice, the first one counts.
        for job_id in batch.ids or ():
            wave_of.setdefault((batch.queue, job_id), wave)
        if wave == len(indexes):
            indexes.append([])
        indexes[wave].append(index)
    return indexes


class Substitutes:
    """Dependencies on jobs whose unique keys were taken, replaced by the owners of the keys."""

    def __init__(self) -> None:
        self._keys: dict[JobKey, JobKey] = {}

    def note(self, batch: Batch, answers: Sequence[EnqueueResult]) -> None:
        """Record the results of a batch."""
        if batch.options.unique_key is not None:
            for job_id, answer in zip(batch.ids or (), answers, strict=False):
                if answer.id != job_id:
                    self._keys[batch.queue, job_id] = (batch.queue, answer.id)

    def in_(self, batch: Batch) -> Batch:
        """Return a later batch with its dependencies replaced."""
        wanted = batch.options.depends_on
        if not wanted or self._keys.keys().isdisjoint(wanted):
            return batch
        others = tuple(dict.fromkeys(self._keys.get(key, key) for key in wanted))
        return batch._replace(options=replace(batch.options, depends_on=others))


MAX_FLOW_JOBS = 1_000
"""Default maximum number of jobs to read."""


class FlowNode(NamedTuple):
    """One job of a graph."""

    queue: str
    id: str
    name: str
    """Name of the job; empty if it no longer exists."""
    state: State | None
    """State of the job; None if it no longer exists and is only known as a dependency."""
    reason: str = ""
    """Reason of the failure or cancellation."""
    unmet: bool = False
    """True if it waits for another job."""
    ignores: bool = False
    """True if it runs regardless of how its dependencies end."""
    created_at: int = 0
    """UTC milliseconds, like `started_at` of the last attempt and `finished_at`; 0 if not yet."""
    finished_at: int = 0
    started_at: int = 0

    @property
    def key(self) -> JobKey:
        """Key of the job."""
        return self.queue, self.id


class FlowEdge(NamedTuple):
    """A dependency between two nodes, given by their indexes."""

    before: int
    after: int
    unmet: bool
    """True if `after` waits for it now."""


class FlowGraph(NamedTuple):
    """Connected jobs, oldest first."""

    root: int
    """Index of the requested job."""
    nodes: list[FlowNode]
    edges: list[FlowEdge]
    cut: bool = False
    """True if there are more jobs than were read."""

    def before(self, index: int) -> list[FlowNode]:
        """Return the dependencies of a node."""
        return [self.nodes[edge.before] for edge in self.edges if edge.after == index]

    def after(self, index: int) -> list[FlowNode]:
        """Return the dependents of a node."""
        return [self.nodes[edge.after] for edge in self.edges if edge.before == index]

    def first(self) -> list[FlowNode]:
        """Return the jobs without dependencies."""
        inner = {edge.after for edge in self.edges}
        return [node for index, node in enumerate(self.nodes) if index not in inner]

    def state(self) -> State | None:
        """Return the state of the whole: active while a job has not ended, then failed if a job has failed,
        cancelled if one was, otherwise completed. None if no job is left.
        """
        states = {node.state for node in self.nodes if node.state is not None}
        if not states <= TERMINAL:
            return State.ACTIVE
        return next((one for one in (State.FAILED, State.CANCELLED, State.COMPLETED) if one in states), None)

    def failed(self) -> tuple[list[FlowNode], list[FlowNode]]:
        """Return the failed jobs: those that may run again at once, and those with a dependency that has not
        completed.
        """
        early = {
            edge.after
            for edge in self.edges
            if self.nodes[edge.before].state not in (None, State.COMPLETED)
            and not self.nodes[edge.after].ignores
        }
        failed = [index for index, node in enumerate(self.nodes) if node.state is State.FAILED]
        return (
            [self.nodes[index] for index in failed if index not in early],
            [self.nodes[index] for index in failed if index in early],
        )

    def only(self, sees: Callable[[str], bool]) -> "FlowGraph":
        """Return the graph without jobs of hidden queues; the requested job stays."""
        kept = [at for at, node in enumerate(self.nodes) if at == self.root or sees(node.queue)]
        if len(kept) == len(self.nodes):
            return self
        indexes = {old: new for new, old in enumerate(kept)}
        edges = [
            edge._replace(before=indexes[edge.before], after=indexes[edge.after])
            for edge in self.edges
            if edge.before in indexes and edge.after in indexes
        ]
        return FlowGraph(indexes[self.root], [self.nodes[at] for at in kept], edges, self.cut)


class JobLink(NamedTuple):
    """A job with the keys of the jobs that it may be connected to, as a storage passes it to `explore`."""

    node: FlowNode
    depends_on: tuple[JobKey, ...]
    dependents: Sequence[JobKey]
    """Jobs that may depend on it; their own dependencies decide."""


Graphs = TypeVar("Graphs")
Exploring = Generator[list[JobKey], Mapping[JobKey, JobLink], FlowGraph | None]


def link(node: FlowNode, options: JobOptions, waiting: Iterable[JobKey] = ()) -> JobLink:
    """Return the link of a job with these options; `waiting` are live jobs that are known to depend on it."""
    ignores = options.on_dependency_failure == "ignore"
    dependents = tuple(dict.fromkeys((*waiting, *options.dependents)))
    return JobLink(node._replace(ignores=ignores), options.depends_on, dependents)


def explore(root: JobKey, limit: int = MAX_FLOW_JOBS) -> Exploring:
    """Walk the graph around a job: yield keys to read, and receive the links found.

    Each step is one edge further away, so there are as many steps as the graph is long. Up to `limit` jobs
    are read. Returns None if the first one is unknown.
    """
    known: dict[JobKey, JobLink] = {}
    seen = {root}
    wanted, cut = [root], False
    while wanted:
        links = yield wanted
        known.update((key, links[key]) for key in wanted if key in links)
        if root not in known:
            return None
        # Dependencies first: they are all known.
        near = [other for key in wanted if key in known for other in known[key].depends_on]
        near += [other for key in wanted if key in known for other in known[key].dependents]
        new = [key for key in dict.fromkeys(near) if key not in seen]
        cut = cut or len(new) > limit - len(seen)
        wanted = new[: limit - len(seen)]
        seen.update(wanted)
    return _assembled(root, known, seen, cut=cut)


def explore_all(
    roots: Iterable[JobKey], limit: int = MAX_FLOW_JOBS
) -> Generator[list[JobKey], Mapping[JobKey, JobLink], list[FlowGraph | None]]:
    """Walk the graphs around several jobs at once: like `explore`, with as many steps as the longest one."""
    walks = [explore((queue, id), limit) for queue, id in roots]
    graphs: list[FlowGraph | None] = [None] * len(walks)
    wanted = {index: next(walk) for index, walk in enumerate(walks)}
    while wanted:
        links = yield list(dict.fromkeys(key for keys in wanted.values() for key in keys))
        for index in list(wanted):
            try:
                wanted[index] = walks[index].send(links)
            except StopIteration as end:
                graphs[index] = end.value
                del wanted[index]
    return graphs


def walked(
    steps: Generator[list[JobKey], Mapping[JobKey, JobLink], Graphs],
    look: Callable[[list[JobKey]], Mapping[JobKey, JobLink]],
) -> Graphs:
    """Return the result of `explore` or `explore_all`, with links read by `look`."""
    try:
        wanted = next(steps)
        while True:
            wanted = steps.send(look(wanted))
    except StopIteration as end:
        graphs: Graphs = end.value
        return graphs


def _assembled(root: JobKey, links: Mapping[JobKey, JobLink], seen: set[JobKey], *, cut: bool) -> FlowGraph:
    """Return the jobs connected with the first one by their own dependencies."""
    pairs = [(other, key) for key, linked in links.items() for other in linked.depends_on if other in seen]
    near: dict[JobKey, list[JobKey]] = {}
    for before, after in pairs:
        near.setdefault(before, []).append(after)
        near.setdefault(after, []).append(before)
    connected, left = {root}, [root]
    while left:
        for other in near.get(left.pop(), ()):
            if other not in connected:
                connected.add(other)
                left.append(other)
    nodes = {key: links[key].node if key in links else FlowNode(*key, "", None) for key in connected}
    keys = sorted(connected, key=lambda key: (nodes[key].created_at, key))
    indexes = {key: index for index, key in enumerate(keys)}
    edges = sorted(
        FlowEdge(indexes[before], indexes[after], _is_unmet(nodes[before], nodes[after]))
        for before, after in pairs
        if before in indexes and after in indexes
    )
    waiting = {edge.after for edge in edges if edge.unmet}
    marked = [nodes[key]._replace(unmet=index in waiting) for index, key in enumerate(keys)]
    return FlowGraph(indexes[root], marked, edges, cut)


def _is_unmet(before: FlowNode, after: FlowNode) -> bool:
    if after.state is not State.BLOCKED or before.state in (None, State.COMPLETED):
        return False
    return not (after.ignores and before.state in TERMINAL)
