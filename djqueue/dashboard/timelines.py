"""Times on an axis: the jobs of a workflow with their waits, and the runs of schedules."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from django.utils.translation import gettext as _

from djqueue.core.flow import FlowGraph, FlowNode
from djqueue.core.states import TERMINAL, State
from djqueue.dashboard import flowcharts, rendering

TICKS = 6
"""Labels of the axis."""
SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000
STEPS = (
    *(number * unit for unit in (1, 10, 100) for number in (1, 2, 5)),
    *(number * unit for unit in (SECOND, MINUTE) for number in (1, 2, 5, 10, 15, 30)),
    *(number * HOUR for number in (1, 2, 3, 6, 12, 24, 48, 120, 240)),
)
"""Milliseconds between labels."""
MAX_ROWS = 60
"""Maximum rows of the timeline of a workflow."""


class Bar(NamedTuple):
    """A minute in a row of bars."""

    left: str
    width: str
    top: str
    height: str


class PlacedBar(NamedTuple):
    """A period, or a moment if it has no width."""

    kind: str
    """Class of its color: a state, `wait` or `next`."""
    left: str
    """Start in percent of the axis, like `right` and `width`."""
    right: str
    width: str
    label: str
    url: str = ""


class TimelineRow(NamedTuple):
    """A job, equal jobs, or a schedule."""

    label: str
    url: str
    spans: list[PlacedBar]
    note: str = ""
    is_critical: bool = False


class Timeline(NamedTuple):
    """Rows over one axis."""

    rows: list[TimelineRow]
    ticks: list[tuple[str, str]]
    """Place in percent, and label."""
    now: str = ""
    """Place of the present in percent, if the axis goes beyond it."""
    more: int = 0
    """The number of rows that are left out."""


class WorkflowTimeline(NamedTuple):
    """The jobs of a workflow over time."""

    timeline: Timeline
    critical: list[FlowNode]
    """The chain of jobs that took longest: each began as soon as the one before it had ended."""
    length: int
    """Milliseconds from the first enqueue to the end."""
    waiting: int
    """Milliseconds of the critical path in which its next job was ready and had not started."""
    running: int


class Axis:
    """Places of times, in percent."""

    def __init__(self, start: int, end: int) -> None:
        self._start, self._length = start, max(1, end - start)

    def place(self, at: int) -> str:
        return f"{min(100.0, max(0.0, (at - self._start) / self._length * 100)):.2f}%"

    def width(self, start: int, end: int) -> str:
        return f"{max(0.8, (end - start) / self._length * 100):.2f}%"

    def span(self, kind: str, start: int, end: int, label: str, url: str = "") -> PlacedBar:
        """Return a period; one of no length is a moment."""
        width = self.width(start, end) if end > start else ""
        return PlacedBar(kind, self.place(start), self.place(end), width, label, url)

    def bars(self, values: Sequence[float], most: float) -> tuple[Bar, ...]:
        wide = 100 / max(1, len(values))
        return tuple(
            Bar(f"{at * wide:.2f}%", f"{wide * 0.8:.2f}%", f"{100 - tall:.1f}%", f"{tall:.1f}%")
            for at, value in enumerate(values)
            if most and (tall := value / most * 100) >= 0.5
        )


def of_workflow(
    graph: FlowGraph, drawing: flowcharts.Drawing, now: int, url: flowcharts.Link
) -> WorkflowTimeline | None:
    """Return the boxes of a diagram over time; None if the times of its jobs are not known."""
    timed = [node for node in graph.nodes if node.created_at]
    if not timed:
        return None
    start = min(node.created_at for node in timed)
    # The clock of another machine may be ahead.
    end = max(start, *(_end(node, now) for node in timed))
    axis = Axis(start, end)
    before = _dependencies(graph)
    critical = critical_path(graph, before, now)
    keys = {node.key for node in critical}
    rows = []
    for box in drawing.in_order():
        nodes = [node for at in box.nodes if (node := graph.nodes[at]).created_at]
        if nodes:
            label, address = (
                flowcharts.label_of(box, graph).rpartition(".")[2],
                url(nodes[0]) if len(nodes) == 1 else "",
            )
            is_critical = any(node.key in keys for node in nodes)
            rows.append(
                (_began(graph, box), is_critical, label, address, _spans(graph, before, box, axis, now))
            )
    rows.sort(key=lambda row: (not row[4], row[0], row[2]))
    left_out = max(0, len(rows) - MAX_ROWS)
    if left_out:
        rows = sorted(
            sorted(rows, key=lambda row: not row[1])[:MAX_ROWS], key=lambda row: (not row[4], row[0])
        )
    timeline = Timeline(
        [
            TimelineRow(label, address, spans, "", is_critical)
            for _, is_critical, label, address, spans in rows
        ],
        [(axis.place(start + at), rendering.duration(at) if at else "0") for at in _nice(end - start)],
        more=left_out,
    )
    ready, waiting, running = start, 0, 0
    for node in critical:
        began = node.started_at or _end(node, now)
        waiting += max(0, began - max(ready, node.created_at))
        running += max(0, _end(node, now) - began)
        ready = _end(node, now)
    return WorkflowTimeline(timeline, critical, end - start, waiting, running)


def critical_path(graph: FlowGraph, before: Mapping[int, Sequence[int]], now: int) -> list[FlowNode]:
    """Return the jobs that decided when the workflow ended, first to last."""
    started = [at for at, node in enumerate(graph.nodes) if node.started_at]
    path: list[FlowNode] = []
    while started:
        at = max(started, key=lambda one: (_end(graph.nodes[one], now), -one))
        path.append(graph.nodes[at])
        started = [one for one in before.get(at, ()) if graph.nodes[one].started_at]
    return path[::-1]


def _nice(length: int) -> range:
    """Return round times for the labels of an axis that begins with 0."""
    step = next((one for one in STEPS if one * TICKS >= length), length // TICKS)
    return range(0, max(1, length), step)


def _dependencies(graph: FlowGraph) -> Mapping[int, Sequence[int]]:
    before: dict[int, list[int]] = {}
    for edge in graph.edges:
        before.setdefault(edge.after, []).append(edge.before)
    return before


def _end(node: FlowNode, now: int) -> int:
    return node.finished_at or (now if node.state not in TERMINAL else node.started_at or node.created_at)


def _began(graph: FlowGraph, box: flowcharts.GraphNode) -> int:
    return min(graph.nodes[at].started_at or graph.nodes[at].created_at for at in box.nodes)


def _spans(
    graph: FlowGraph, before: Mapping[int, Sequence[int]], box: flowcharts.GraphNode, axis: Axis, now: int
) -> list[PlacedBar]:
    """Return the wait and the run of a job; of several jobs, from the first to the last of each."""
    started = [at for at in box.nodes if graph.nodes[at].started_at]
    waits = [at for at in box.nodes if graph.nodes[at].state in (State.WAITING, State.DELAYED)]
    spans = []
    if started or waits:
        ready = min(
            max([graph.nodes[at].created_at, *(graph.nodes[one].finished_at for one in before.get(at, ()))])
            for at in (*started, *waits)
        )
        begin = min((graph.nodes[at].started_at for at in started), default=now)
        if begin > ready:
            label = _("waits %(time)s") % {"time": rendering.duration(begin - ready)}
            spans.append(axis.span("wait", ready, begin, label))
    if started:
        begin = min(graph.nodes[at].started_at for at in started)
        end = max(_end(graph.nodes[at], now) for at in started)
        text = f"{flowcharts.word(box.state)}, {rendering.duration(max(0, end - begin))}"
        spans.append(axis.span(str(box.state or "none"), begin, max(end, begin + 1), text))
    return spans
