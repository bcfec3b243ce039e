"""The graph of jobs around one of them: what it waits for, what waits for it, and so on, both ways."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import NamedTuple

from .options import JobKey, JobOptions
from .states import TERMINAL, State

MOST = 1_000
"""Jobs that are looked at, unless the caller says otherwise."""


class FlowNode(NamedTuple):
    """One job of a graph."""

    queue: str
    id: str
    name: str
    """The job's name; empty if it is gone."""
    state: State | None
    """None: it is gone, and only known from those that depend on it."""
    reason: str = ""
    """Why it failed or was cancelled."""
    unmet: bool = False
    """True if it waits for one of the others."""
    ignores: bool = False
    """True if it runs however those end that it depends on."""
    created_at: int = 0
    """UTC milliseconds, as `finished_at`."""
    finished_at: int = 0

    @property
    def key(self) -> JobKey:
        """What names it."""
        return self.queue, self.id


class FlowEdge(NamedTuple):
    """One job depends on another: the places of both among the nodes."""

    before: int
    after: int
    unmet: bool
    """True if `after` waits for it now."""


class FlowGraph(NamedTuple):
    """Jobs that depend on one another, oldest first."""

    root: int
    """The place of the job that was asked for."""
    nodes: list[FlowNode]
    edges: list[FlowEdge]
    cut: bool = False
    """True if there are more jobs than were looked at."""

    def before(self, place: int) -> list[FlowNode]:
        """Those that a node depends on."""
        return [self.nodes[edge.before] for edge in self.edges if edge.after == place]

    def after(self, place: int) -> list[FlowNode]:
        """Those that depend on a node."""
        return [self.nodes[edge.after] for edge in self.edges if edge.before == place]

    def last(self) -> list[FlowNode]:
        """Those that nothing depends on: what the flow leads to."""
        inner = {edge.before for edge in self.edges}
        return [node for place, node in enumerate(self.nodes) if place not in inner]

    def failed(self) -> tuple[list[FlowNode], list[FlowNode]]:
        """Return the jobs that have failed: the roots, which may run again at once, and those that depend on
        a job that has not completed.
        """
        early = {
            edge.after
            for edge in self.edges
            if self.nodes[edge.before].state not in (None, State.COMPLETED)
            and not self.nodes[edge.after].ignores
        }
        failed = [place for place, node in enumerate(self.nodes) if node.state is State.FAILED]
        return (
            [self.nodes[place] for place in failed if place not in early],
            [self.nodes[place] for place in failed if place in early],
        )

    def only(self, sees: Callable[[str], bool]) -> "FlowGraph":
        """Without the jobs of queues that somebody is not to know of; the one that was asked for stays."""
        kept = [at for at, node in enumerate(self.nodes) if at == self.root or sees(node.queue)]
        if len(kept) == len(self.nodes):
            return self
        places = {old: new for new, old in enumerate(kept)}
        edges = [
            edge._replace(before=places[edge.before], after=places[edge.after])
            for edge in self.edges
            if edge.before in places and edge.after in places
        ]
        return FlowGraph(places[self.root], [self.nodes[at] for at in kept], edges, self.cut)


class JobLink(NamedTuple):
    """A job, and with which others it may be connected: what a storage tells to `explore`."""

    node: FlowNode
    depends_on: tuple[JobKey, ...]
    dependents: Sequence[JobKey]
    """Jobs that may depend on it: those that do say so themselves."""


Exploring = Generator[list[JobKey], Mapping[JobKey, JobLink], FlowGraph | None]


def link(node: FlowNode, options: JobOptions, waiting: Iterable[JobKey] = ()) -> JobLink:
    """Return the link of a job with these options; waiting: live jobs that are known to depend on it."""
    ignores = options.on_dependency_failure == "ignore"
    dependents = tuple(dict.fromkeys((*waiting, *options.dependents)))
    return JobLink(node._replace(ignores=ignores), options.depends_on, dependents)


def explore(root: JobKey, limit: int = MOST) -> Exploring:
    """Walk through the graph around a job: yields which jobs to look at, takes what was found of them.

    Each step is one further away, so there are as many steps as the graph is long. Up to `limit` jobs are
    looked at. Returns None if the first one is not known.
    """
    found: dict[JobKey, JobLink] = {}
    seen = {root}
    wanted, cut = [root], False
    while wanted:
        looked = yield wanted
        found.update((key, looked[key]) for key in wanted if key in looked)
        if root not in found:
            return None
        # What they wait for first: that is known whole.
        near = [other for key in wanted if key in found for other in found[key].depends_on]
        near += [other for key in wanted if key in found for other in found[key].dependents]
        new = [key for key in dict.fromkeys(near) if key not in seen]
        cut = cut or len(new) > limit - len(seen)
        wanted = new[: limit - len(seen)]
        seen.update(wanted)
    return _assembled(root, found, seen, cut=cut)


def walked(steps: Exploring, look: Callable[[list[JobKey]], Mapping[JobKey, JobLink]]) -> FlowGraph | None:
    """Return what `explore` returns, when `look` says what is found at each step."""
    try:
        wanted = next(steps)
        while True:
            wanted = steps.send(look(wanted))
    except StopIteration as end:
        found: FlowGraph | None = end.value
        return found


def _assembled(root: JobKey, found: Mapping[JobKey, JobLink], seen: set[JobKey], *, cut: bool) -> FlowGraph:
    """Return the jobs that are connected with the first one by their own dependencies."""
    pairs = [(other, key) for key, one in found.items() for other in one.depends_on if other in seen]
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
    nodes = {key: found[key].node if key in found else FlowNode(*key, "", None) for key in connected}
    keys = sorted(connected, key=lambda key: (nodes[key].created_at, key))
    places = {key: place for place, key in enumerate(keys)}
    edges = sorted(
        FlowEdge(places[before], places[after], _is_unmet(nodes[before], nodes[after]))
        for before, after in pairs
        if before in places and after in places
    )
    waiting = {edge.after for edge in edges if edge.unmet}
    marked = [nodes[key]._replace(unmet=place in waiting) for place, key in enumerate(keys)]
    return FlowGraph(places[root], marked, edges, cut)


def _is_unmet(before: FlowNode, after: FlowNode) -> bool:
    if after.state is not State.BLOCKED or before.state in (None, State.COMPLETED):
        return False
    return not (after.ignores and before.state in TERMINAL)
