"""Workflow diagrams: a layout in layers, in which every edge points forward, drawn as SVG.

The layout follows Sugiyama, Tagawa and Toda ("Methods for Visual Understanding of Hierarchical System
Structures", 1981): layers by the longest path, a dummy node in every layer that a long edge crosses, and the
order within a layer by the mean position of the neighbors (barycenter), sweeping back and forth. Heights are
then moved towards the means of the neighbors as far as order and distance allow (isotonic regression by
pooling adjacent violators). The SVG has attributes and classes only, as content security policies require.
"""

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from djqueue.core.flow import FlowGraph, FlowNode
from djqueue.core.options import JobKey
from djqueue.core.states import State
from djqueue.models import JobState

T = TypeVar("T")
Link = Callable[[FlowNode], str]
"""Returns the URL of a job's page."""
WIDTH, HEIGHT = 200, 46
"""Size of a box, in pixels."""
ACROSS, DOWN = 60, 14
"""Space between layers, and between the boxes of a layer."""
THIN = 10
"""Height of an edge in a layer that it crosses."""
MARGIN = 8
MAX_NODES = 300
"""Maximum jobs drawn one by one. Above that, the jobs of each layer and state share a box."""
MAX_LINES = 1_000
"""Maximum edges drawn, the shortest first."""
MAX_BENDS = 2_000
"""Maximum dummy nodes. Above that, edges are drawn straight."""
SWEEPS = 8
"""Sweeps through the layers."""
Neighbours = Sequence[Sequence[int]]
SYMBOLS = {
    State.WAITING: "○",
    State.DELAYED: "◔",
    State.BLOCKED: "‖",
    State.ACTIVE: "▶",
    State.COMPLETED: "✓",
    State.FAILED: "✕",
    State.CANCELLED: "–",
    None: "?",
}
"""Symbols of states, shown next to their names and colors."""
MAX_CHARACTERS, MAX_STATES = 22, 27
"""Maximum characters of a name and of states in a box."""
MIN_FOLDED = 5
"""Minimum number of equal jobs that share a box."""
CAUSED = "dependency_failed"
"""Reason of jobs that failed because of another one."""
PADDING, FIRST, SECOND = 10, 19, 36
"""Offsets of the texts in a box, in pixels: left padding and two baselines."""
ARROW = 5
WORST = (
    State.FAILED,
    State.ACTIVE,
    State.WAITING,
    State.DELAYED,
    State.BLOCKED,
    State.CANCELLED,
    State.COMPLETED,
)
"""States in the order in which they stand for several jobs."""


class GraphNode(NamedTuple):
    """A box: one job, several equal ones, or several of the same layer and state."""

    x: int
    y: int
    layer: int
    state: State | None
    nodes: tuple[int, ...]
    """Indexes of the graph's nodes."""


class GraphEdge(NamedTuple):
    """An edge from the right of a box to the left of another."""

    before: int
    """Indexes of the boxes."""
    after: int
    points: tuple[tuple[int, int], ...]
    unmet: bool


class Drawing(NamedTuple):
    """Boxes and edges in a frame."""

    width: int
    height: int
    boxes: list[GraphNode]
    lines: list[GraphEdge]
    collapsed: bool
    """Whether boxes stand for all jobs of a layer and state."""
    folded: bool
    """Whether some boxes stand for several equal jobs."""
    left_out: int
    """The number of edges that are not drawn."""

    def in_order(self) -> list[GraphNode]:
        """Return the boxes in reading order: by layer, top to bottom."""
        return sorted(self.boxes, key=lambda box: (box.layer, box.y))


class _GraphPart(NamedTuple):
    """The nodes of a future box."""

    layer: int
    state: State | None
    nodes: tuple[int, ...]


def draw(graph: FlowGraph, limit: int = MAX_NODES, *, fold: bool = False) -> Drawing:
    """Lay out a graph. The result is deterministic.

    Args:
        fold: Draw jobs that have the same name and the same kinds of neighbors as one box.
    """
    pairs = [(edge.before, edge.after) for edge in graph.edges]
    layers = layers_of(len(graph.nodes), pairs)
    shares = siblings(graph, layers) if fold else [(at,) for at in range(len(graph.nodes))]
    collapsed = len(shares) > limit
    parts, edges = _bands(graph, layers, limit) if collapsed else _shared(graph, layers, shares)
    shown = sorted(edges, key=lambda edge: (parts[edge[1]].layer - parts[edge[0]].layer, edge))[:MAX_LINES]
    shown.sort()
    columns, routes = _layered(parts, shown)
    places, heights = _placed(columns, routes, len(parts))
    boxes = [
        GraphNode(MARGIN + part.layer * (WIDTH + ACROSS), heights[index] - HEIGHT // 2, *part)
        for index, part in enumerate(parts)
    ]
    lines = [
        GraphEdge(before, after, _points(route, places, heights), edges[before, after])
        for (before, after), route in zip(shown, routes, strict=True)
    ]
    deepest = max(part.layer for part in parts)
    return Drawing(
        2 * MARGIN + deepest * (WIDTH + ACROSS) + WIDTH,
        max([*heights, HEIGHT // 2 + MARGIN]) + HEIGHT // 2 + MARGIN,
        boxes,
        lines,
        collapsed,
        not collapsed and len(shares) < len(graph.nodes),
        len(edges) - len(shown),
    )


def layers_of(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the length of the longest path to each node."""
    before, after = _neighbours(count, edges)
    left = [len(sources) for sources in before]
    layers = [0] * count
    ready = [node for node in range(count) if not left[node]]
    for node in ready:
        for other in after[node]:
            layers[other] = max(layers[other], layers[node] + 1)
            left[other] -= 1
            if not left[other]:
                ready.append(other)
    return layers


def siblings(graph: FlowGraph, layers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the jobs in shares of equal ones, by their oldest job.

    Jobs are equal if their names, queues and layers are, and if each kind of neighbor of one is a kind of
    neighbor of the other: kinds are refined until that holds. Few equal jobs are not folded.
    """
    pairs = [(edge.before, edge.after) for edge in graph.edges]
    sides = _neighbours(len(graph.nodes), pairs)
    kinds: list[int] = [0] * len(graph.nodes)
    count = 0
    while True:
        known: dict[object, int] = {}
        kinds = [
            known.setdefault(
                (
                    layers[at],
                    node.queue,
                    node.name,
                    *(frozenset(kinds[one] for one in near[at]) for near in sides),
                ),
                len(known),
            )
            for at, node in enumerate(graph.nodes)
        ]
        if len(known) == count:
            break
        count = len(known)
    shares: dict[int, list[int]] = {}
    for at, kind in enumerate(kinds):
        shares.setdefault(kind, []).append(at)
    folded = [tuple(share) for share in shares.values() if len(share) >= MIN_FOLDED]
    single = [(at,) for share in shares.values() if len(share) < MIN_FOLDED for at in share]
    return sorted([*folded, *single])


def worst(states: Iterable[State | None]) -> State | None:
    """Return the state that stands for several jobs: the one that a person should see first."""
    return min(states, key=lambda state: len(WORST) if state is None else WORST.index(state))


def causes(graph: FlowGraph) -> list[FlowNode]:
    """Return the jobs that failed by themselves, if others failed because of them; the first first."""
    failed = [node for node in graph.nodes if node.state is State.FAILED]
    first = sorted((node for node in failed if node.reason != CAUSED), key=lambda node: node.finished_at)
    return first if len(first) < len(failed) else []


def label_of(box: GraphNode, graph: FlowGraph) -> str:
    """Return the name of a box: that of its job, or of its equal jobs with their number."""
    nodes = [graph.nodes[at] for at in box.nodes]
    name = nodes[0].name or nodes[0].id
    if len(nodes) == 1:
        return name
    return f"{name} × {len(nodes)}" if len({node.name for node in nodes}) == 1 else several(box)


def states_of(box: GraphNode, graph: FlowGraph) -> str:
    """Return the states of the jobs of a box, with their numbers if it has several."""
    found = Counter(graph.nodes[at].state for at in box.nodes)
    if len(box.nodes) == 1:
        return word(box.state)
    return ", ".join(f"{found[state]} {word(state)}" for state in (*State, None) if found[state])


def svg(graph: FlowGraph, drawing: Drawing, url: Link, each: str = "") -> SafeString:
    """Return a diagram with links to its jobs.

    Args:
        each: URL of the diagram with a box for each job, to which boxes of several jobs link.
    """
    count, roots = len(graph.nodes), {node.key for node in causes(graph)}
    title = ngettext("Workflow of %(count)d job", "Workflow of %(count)d jobs", count) % {"count": count}
    return format_html(
        '<svg class="djq-workflow" viewBox="0 0 {0} {1}" width="{0}" height="{1}" role="group" '
        'aria-labelledby="djq-workflow-title djq-workflow-desc"><title id="djq-workflow-title">{2}</title>'
        '<desc id="djq-workflow-desc">{3}</desc>{4}{5}</svg>',
        str(drawing.width),
        str(drawing.height),
        title,
        _("Jobs run from left to right. The table below lists the same jobs."),
        format_html_join("", "{}", ((_line(line),) for line in drawing.lines)),
        format_html_join("", "{}", ((_box(box, graph, url, each, roots),) for box in drawing.in_order())),
    )


def word(state: State | None) -> str:
    """Return the label of a state."""
    return _("removed") if state is None else str(JobState(state.value).label)


def several(box: GraphNode) -> str:
    """Return the label of a box with several jobs."""
    count = len(box.nodes)
    return ngettext("%(count)d job", "%(count)d jobs", count) % {"count": count}


def _shared(
    graph: FlowGraph, layers: Sequence[int], shares: Sequence[tuple[int, ...]]
) -> tuple[list[_GraphPart], dict[tuple[int, int], bool]]:
    """Return a box for each share of the jobs, and their dependencies with whether each is unmet."""
    parts = [
        _GraphPart(layers[share[0]], worst(graph.nodes[at].state for at in share), share) for share in shares
    ]
    return parts, _edges_between(graph, parts)


def _bands(
    graph: FlowGraph, layers: Sequence[int], limit: int
) -> tuple[list[_GraphPart], dict[tuple[int, int], bool]]:
    """Return a box for each layer and state, and their dependencies.

    In a deep graph, several layers form a band, and edges within a band are dropped.
    """
    bands = min(max(layers) + 1, max(1, limit // (len(State) + 1)))
    groups: dict[tuple[int, str], list[int]] = {}
    for place, node in enumerate(graph.nodes):
        groups.setdefault((layers[place] * bands // (max(layers) + 1), node.state or ""), []).append(place)
    parts = [
        _GraphPart(band, State(state) if state else None, tuple(groups[band, state]))
        for band, state in sorted(groups)
    ]
    return parts, _edges_between(graph, parts)


def _edges_between(graph: FlowGraph, parts: Sequence[_GraphPart]) -> dict[tuple[int, int], bool]:
    part_of = {place: index for index, part in enumerate(parts) for place in part.nodes}
    edges: dict[tuple[int, int], bool] = {}
    for edge in graph.edges:
        pair = part_of[edge.before], part_of[edge.after]
        if parts[pair[0]].layer < parts[pair[1]].layer:
            edges[pair] = edges.get(pair, False) or edge.unmet
    return edges


def _layered(
    parts: Sequence[_GraphPart], edges: Sequence[tuple[int, int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ordered items of each layer, and the items that each edge passes through.

    Items are boxes and, with higher numbers, dummy nodes where edges cross a layer.
    """
    layers: list[list[int]] = [[] for _ in range(max(part.layer for part in parts) + 1)]
    for index, part in enumerate(parts):
        layers[part.layer].append(index)
    spans = [parts[after].layer - parts[before].layer for before, after in edges]
    bends = sum(span - 1 for span in spans) <= MAX_BENDS
    count, routes = len(parts), []
    for (before, after), span in zip(edges, spans, strict=True):
        between = range(count, count + span - 1) if bends else range(0)
        for step, thing in enumerate(between, parts[before].layer + 1):
            layers[step].append(thing)
        count += len(between)
        routes.append([before, *between, after])
    steps = [pair for route in routes for pair in pairwise(route)]
    return _ordered(layers, count, steps), routes


def _ordered(layers: list[list[int]], count: int, steps: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the layers in the order with the fewest crossings that was found."""
    before, after = _neighbours(count, steps)
    best, fewest = [list(layer) for layer in layers], _crossings(layers, after)
    for sweep in range(SWEEPS):
        if not fewest:
            break
        neighbours, order = (before, layers) if sweep % 2 == 0 else (after, layers[::-1])
        places = {thing: place for layer in layers for place, thing in enumerate(layer)}
        for layer in order:
            ranks: dict[int, float] = {}
            for place, thing in enumerate(layer):
                mean = _mean([places[other] for other in neighbours[thing]])
                ranks[thing] = place if mean is None else mean
            layer.sort(key=ranks.__getitem__)
            places.update((thing, place) for place, thing in enumerate(layer))
        crossings = _crossings(layers, after)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    return best


def _crossings(layers: Sequence[Sequence[int]], after: Neighbours) -> int:
    """Return how often edges between adjacent layers cross."""
    total = 0
    for layer, following in pairwise(layers):
        places = {thing: place for place, thing in enumerate(following)}
        earlier: list[int] = []
        for thing in layer:
            targets = sorted(places[other] for other in after[thing] if other in places)
            total += sum(len(earlier) - bisect_right(earlier, end) for end in targets)
            for end in targets:
                insort(earlier, end)
    return total


def _placed(
    layers: Sequence[Sequence[int]], routes: Sequence[Sequence[int]], boxes: int
) -> tuple[dict[int, int], list[int]]:
    """Return the layer of each item and the height of its center."""
    layer_of = {thing: number for number, layer in enumerate(layers) for thing in layer}
    steps = [pair for route in routes for pair in pairwise(route)]
    before, after = _neighbours(len(layer_of), steps)
    sizes = [HEIGHT if thing < boxes else THIN for thing in range(len(layer_of))]
    heights = [0.0] * len(layer_of)
    for layer in layers:
        _spread(layer, [0.0] * len(layer), sizes, heights)
    for sweep in range(SWEEPS):
        neighbours, order = (before, layers) if sweep % 2 == 0 else (after, layers[::-1])
        for layer in order:
            means = [_mean([heights[other] for other in neighbours[thing]]) for thing in layer]
            wanted = [
                heights[thing] if mean is None else mean for thing, mean in zip(layer, means, strict=True)
            ]
            _spread(layer, wanted, sizes, heights)
    top = min(height - size / 2 for height, size in zip(heights, sizes, strict=True))
    return layer_of, [round(height - top) + MARGIN for height in heights]


def _spread(
    layer: Sequence[int], wanted: Sequence[float], sizes: Sequence[int], heights: list[float]
) -> None:
    """Place the items of a layer as close to their wanted heights as order and sizes allow."""
    offsets, offset = [], 0.0
    for at, thing in enumerate(layer):
        if at:
            offset += (sizes[layer[at - 1]] + sizes[thing]) / 2 + DOWN
        offsets.append(offset)
    blocks: list[tuple[float, int]] = []
    for want, offset in zip(wanted, offsets, strict=True):
        blocks.append((want - offset, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (mean, many), (other, more) = blocks.pop(), blocks.pop()
            blocks.append(((mean * many + other * more) / (many + more), many + more))
    means = [mean for mean, many in blocks for _ in range(many)]
    for thing, mean, offset in zip(layer, means, offsets, strict=True):
        heights[thing] = mean + offset


def _points(
    route: Sequence[int], layer_of: Mapping[int, int], heights: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return the points of an edge, which is straight inside layers."""
    points = []
    for at, thing in enumerate(route):
        left = MARGIN + layer_of[thing] * (WIDTH + ACROSS)
        if at:
            points.append((left, heights[thing]))
        if at < len(route) - 1:
            points.append((left + WIDTH, heights[thing]))
    return tuple(points)


def _neighbours(count: int, edges: Sequence[tuple[int, int]]) -> tuple[list[list[int]], list[list[int]]]:
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for one, other in edges:
        after[one].append(other)
        before[other].append(one)
    return before, after


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def _box(box: GraphNode, graph: FlowGraph, url: Link, each: str, roots: Collection[JobKey]) -> SafeString:
    nodes = [graph.nodes[at] for at in box.nodes]
    failed = [node for node in nodes if node.key in roots]
    one = nodes[0] if len(nodes) == 1 else failed[0] if len(failed) == 1 else None
    name, states = label_of(box, graph), states_of(box, graph)
    if failed and len(nodes) == 1:
        states = _("%(state)s, root cause") % {"state": states}
    where = f", {nodes[0].queue} {nodes[0].id}" if len(nodes) == 1 else ""
    inner = format_html(
        '<title>{}</title><rect x="{}" y="{}" width="{}" height="{}" rx="6"></rect>'
        '<text x="{}" y="{}">{}</text><text class="djq-workflow-state" x="{}" y="{}">{} {}</text>',
        f"{name}, {states}{where}",
        str(box.x),
        str(box.y),
        str(WIDTH),
        str(HEIGHT),
        str(box.x + PADDING),
        str(box.y + FIRST),
        _fitting(name),
        str(box.x + PADDING),
        str(box.y + SECOND),
        SYMBOLS[box.state],
        states if len(states) <= MAX_STATES else f"{states[: MAX_STATES - 1]}…",
    )
    kind = f"djq-workflow-box djq-workflow-{box.state or 'removed'}"
    if graph.root in box.nodes:
        kind += " djq-workflow-current"
    if failed:
        kind += " djq-workflow-cause"
    target = each if one is None else "" if one.state is None else url(one)
    if not target:
        return format_html('<g class="{}">{}</g>', kind, inner)
    return format_html('<a class="{}" href="{}">{}</a>', kind, target, inner)


def _fitting(name: str) -> str:
    """Return a name that fits into a box: the last part of a long dotted name."""
    last = name if len(name) <= MAX_CHARACTERS else name.rpartition(".")[2] or name
    return last if len(last) <= MAX_CHARACTERS else f"{last[: MAX_CHARACTERS - 1]}…"


def _line(line: GraphEdge) -> SafeString:
    return format_html(
        '<path class="djq-workflow-line{}" d="{}"></path>',
        " djq-workflow-unmet" if line.unmet else "",
        _path(line.points),
    )


def _path(points: Sequence[tuple[int, int]]) -> str:
    """Return a path that curves between layers, crosses them straight, and ends in an arrow."""
    (x, y), *others = points
    path = [f"M{x} {y}"]
    for left, top in others:
        bend = ACROSS // 2
        curve = f"C{x + bend} {y} {left - bend} {top} {left} {top}"
        path.append(f"H{left}" if top == y else curve)
        x, y = left, top
    path.append(f"M{x - ARROW} {y - ARROW}L{x} {y}L{x - ARROW} {y + ARROW}")
    return "".join(path)
