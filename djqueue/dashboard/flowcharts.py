"""Workflow diagrams as SVG, with attributes and classes only, as content security policies require."""

from collections.abc import Callable, Sequence

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from djqueue.core.flow import FlowGraph, FlowNode
from djqueue.core.states import State
from djqueue.models import JobState

from .graphs import ACROSS, HEIGHT, WIDTH, Drawing, GraphEdge, GraphNode

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


def svg(graph: FlowGraph, drawing: Drawing, url: Callable[[FlowNode], str]) -> SafeString:
    """Return a diagram with links to its jobs.

    Args:
        url: Returns the URL of a job's page.
    """
    count = len(graph.nodes)
    title = ngettext("Workflow of %(count)d job", "Workflow of %(count)d jobs", count) % {"count": count}
    return format_html(
        '<svg class="djq-flow" viewBox="0 0 {0} {1}" width="{0}" height="{1}" role="group" '
        'aria-labelledby="djq-flow-title djq-flow-desc"><title id="djq-flow-title">{2}</title>'
        '<desc id="djq-flow-desc">{3}</desc>{4}{5}</svg>',
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


def _box(box: GraphNode, graph: FlowGraph, url: Callable[[FlowNode], str]) -> SafeString:
    node = graph.nodes[box.nodes[0]] if len(box.nodes) == 1 else None
    state = word(box.state)
    name = several(box) if node is None else node.name or node.id
    inner = format_html(
        '<title>{}</title><rect x="{}" y="{}" width="{}" height="{}" rx="6"></rect>'
        '<text x="{}" y="{}">{}</text><text class="djq-flow-state" x="{}" y="{}">{} {}</text>',
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
    kind = f"djq-flow-box djq-flow-{box.state or 'removed'}"
    if graph.root in box.nodes:
        kind += " djq-flow-current"
    if node is None or node.state is None:
        return format_html('<g class="{}">{}</g>', kind, inner)
    return format_html('<a class="{}" href="{}">{}</a>', kind, url(node), inner)


def _fitting(name: str) -> str:
    """Return a name that fits into a box: the last part of a long dotted name."""
    last = name if len(name) <= MAX_CHARACTERS else name.rpartition(".")[2] or name
    return last if len(last) <= MAX_CHARACTERS else f"{last[: MAX_CHARACTERS - 1]}…"


def _line(line: GraphEdge) -> SafeString:
    return format_html(
        '<path class="djq-flow-line{}" d="{}"></path>',
        " djq-flow-unmet" if line.unmet else "",
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
