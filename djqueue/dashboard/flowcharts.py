"""Workflow diagrams: a layout in layers, in which every edge points forward, drawn as SVG.

The layout follows Sugiyama, Tagawa and Toda ("Methods for Visual Understanding of Hierarchical System
Structures", 1981): layers by the longest path, a dummy node in every layer that a long edge crosses, and the
order within a layer by the mean position of the neighbors (barycenter), sweeping back and forth. Heights are
then moved towards the means of the neighbors as far as order and distance allow (isotonic regression by
pooling adjacent violators). The SVG has attributes and classes only, as content security policies require.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from djqueue.core.flow import FlowGraph, FlowNode
from djqueue.core.states import State
from djqueue.models import JobState

T = TypeVar("T")
WIDTH, HEIGHT = 168, 46
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
MAX_CHARACTERS = 22
"""Maximum characters of a name in a box."""
PADDING, FIRST, SECOND = 10, 19, 36
"""Offsets of the texts in a box, in pixels: left padding and two baselines."""
ARROW = 5


class GraphNode(NamedTuple):
    """A box: one job, or several of the same layer and state."""

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
    """Whether some boxes stand for several jobs."""
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


def draw(graph: FlowGraph, limit: int = MAX_NODES) -> Drawing:
    """Lay out a graph. The result is deterministic."""
    parts, edges, collapsed = _parts(graph, limit)
    shown = sorted(edges, key=lambda edge: (parts[edge[1]].layer - parts[edge[0]].layer, edge))[:MAX_LINES]
    shown.sort()
    layers, routes = _layered(parts, shown)
    places, heights = _placed(layers, routes, len(parts))
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


def svg(graph: FlowGraph, drawing: Drawing, url: Callable[[FlowNode], str]) -> SafeString:
    """Return a diagram with links to its jobs.

    Args:
        url: Returns the URL of a job's page.
    """
    count = len(graph.nodes)
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
        format_html_join("", "{}", ((_box(box, graph, url),) for box in drawing.in_order())),
    )


def word(state: State | None) -> str:
    """Return the label of a state."""
    return _("removed") if state is None else str(JobState(state.value).label)


def several(box: GraphNode) -> str:
    """Return the label of a box with several jobs."""
    count = len(box.nodes)
    return ngettext("%(count)d job", "%(count)d jobs", count) % {"count": count}


def _parts(graph: FlowGraph, limit: int) -> tuple[list[_GraphPart], dict[tuple[int, int], bool], bool]:
    """Return the boxes, their dependencies with whether each is unmet, and whether nodes were grouped."""
    pairs = [(edge.before, edge.after) for edge in graph.edges]
    layers = layers_of(len(graph.nodes), pairs)
    if len(graph.nodes) <= limit:
        single = [
            _GraphPart(layer, node.state, (place,))
            for place, (layer, node) in enumerate(zip(layers, graph.nodes, strict=True))
        ]
        return single, {(edge.before, edge.after): edge.unmet for edge in graph.edges}, False
    # In a deep graph, several layers form a band, and edges within a band are dropped.
    bands = min(max(layers) + 1, max(1, limit // (len(State) + 1)))
    bands_of = [layer * bands // (max(layers) + 1) for layer in layers]
    groups: dict[tuple[int, str], list[int]] = {}
    for place, node in enumerate(graph.nodes):
        groups.setdefault((bands_of[place], node.state or ""), []).append(place)
    parts = [
        _GraphPart(band, State(state) if state else None, tuple(groups[band, state]))
        for band, state in sorted(groups)
    ]
    part_of = {place: index for index, part in enumerate(parts) for place in part.nodes}
    edges: dict[tuple[int, int], bool] = {}
    for edge in graph.edges:
        pair = part_of[edge.before], part_of[edge.after]
        if parts[pair[0]].layer < parts[pair[1]].layer:
            edges[pair] = edges.get(pair, False) or edge.unmet
    return parts, edges, True


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


def _box(box: GraphNode, graph: FlowGraph, url: Callable[[FlowNode], str]) -> SafeString:
    node = graph.nodes[box.nodes[0]] if len(box.nodes) == 1 else None
    state = word(box.state)
    name = several(box) if node is None else node.name or node.id
    inner = format_html(
        '<title>{}</title><rect x="{}" y="{}" width="{}" height="{}" rx="6"></rect>'
        '<text x="{}" y="{}">{}</text><text class="djq-workflow-state" x="{}" y="{}">{} {}</text>',
        f"{name}, {state}" if node is None else f"{name}, {state}, {node.queue} {node.id}",
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
        state,
    )
    kind = f"djq-workflow-box djq-workflow-{box.state or 'removed'}"
    if graph.root in box.nodes:
        kind += " djq-workflow-current"
    if node is None or node.state is None:
        return format_html('<g class="{}">{}</g>', kind, inner)
    return format_html('<a class="{}" href="{}">{}</a>', kind, url(node), inner)


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
