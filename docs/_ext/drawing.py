"""The table and the diagram of `djqueue.core.states.TRANSITIONS`, as text."""

from collections.abc import Iterator
from html import escape
from math import hypot
from typing import NamedTuple

from djqueue.core.states import TRANSITIONS, State


class Row(NamedTuple):
    """One line of the table."""

    name: str
    sources: str
    targets: str
    event: str
    words: str


def table_rows(words: dict[str, str]) -> list[Row]:
    """The table's lines: transitions of one name and the same targets are one line."""
    lines: dict[tuple[str, tuple[State, ...], str], list[State]] = {}
    for transition in TRANSITIONS:
        targets = tuple(state for state in State if state in transition.targets)
        lines.setdefault((transition.name, targets, transition.event), []).append(transition.source)
    return [
        Row(name, ", ".join(sources), ", ".join(targets), event, words.get(name, ""))
        for (name, targets, event), sources in lines.items()
    ]


def read_words(lines: list[str]) -> dict[str, str]:
    """The directive's lines, `name: words`."""
    pairs = (line.partition(":") for line in lines if line.strip())
    return {name.strip(): words.strip() for name, _, words in pairs}


WIDTH, HEIGHT = 800, 450
BOX = (104, 34)
PENDING_BOX = (430, 260)
PENDING_STATES = (State.WAITING, State.DELAYED, State.BLOCKED)
PENDING = "pending"
"""The frame around these three: what all of them do is drawn once, from the frame."""
PLACES: dict[str, tuple[float, float]] = {
    PENDING: (230, 150),
    State.DELAYED: (85, 65),
    State.BLOCKED: (85, 230),
    State.WAITING: (360, 150),
    State.ACTIVE: (620, 150),
    State.COMPLETED: (735, 50),
    State.FAILED: (620, 405),
    State.CANCELLED: (200, 405),
}
VIAS: dict[tuple[str, str], tuple[float, float]] = {
    (State.ACTIVE, State.DELAYED): (440, 30),
    (State.ACTIVE, State.CANCELLED): (520, 325),
    (State.FAILED, PENDING): (425, 375),
    (State.BLOCKED, State.DELAYED): (20, 150),
    (State.BLOCKED, State.FAILED): (280, 390),
    (State.BLOCKED, State.CANCELLED): (70, 350),
    (PENDING, State.CANCELLED): (205, 330),
    (State.CANCELLED, PENDING): (275, 330),
    (State.FAILED, State.WAITING): (560, 250),
}
"""Where an edge is led, if it would go over something else."""
ANCHORS: dict[tuple[str, str], tuple[float, float]] = {
    (PENDING, State.CANCELLED): (195, 280),
    (State.CANCELLED, PENDING): (265, 280),
    (PENDING, State.FAILED): (400, 280),
    (State.FAILED, PENDING): (345, 280),
}
"""Where edges meet the frame."""
BEND = 24
"""How far the others are bent."""
LOOPS = {State.WAITING: 1, State.DELAYED: 1}
"""On which side of its box a state's edge to itself is: above (-1) or below."""
STYLE = """
.states { max-width: 100%; height: auto; font: 13px sans-serif; }
.states rect { fill: var(--color-background-secondary, #f4f4f4); stroke: currentColor; }
.states rect.frame { fill: none; stroke-dasharray: 4 4; opacity: .6; }
.states path { fill: none; stroke: currentColor; stroke-width: 1.2; opacity: .55; }
.states marker path { fill: currentColor; stroke: none; opacity: 1; }
.states text { fill: currentColor; text-anchor: middle; dominant-baseline: central; }
.states .name { font-size: 11px; paint-order: stroke; stroke-width: 5px;
  stroke: var(--color-background-primary, #fff); }
"""


def edges() -> dict[tuple[str, str], list[str]]:
    """The names of the transitions between each two places of the diagram."""
    names: dict[str, set[tuple[str, str]]] = {}
    for transition in TRANSITIONS:
        for target in transition.targets:
            names.setdefault(transition.name, set()).add((transition.source, target))
    found: dict[tuple[str, str], list[str]] = {}
    for name, pairs in names.items():
        for pair in sorted(_framed(pairs)):
            found.setdefault(pair, []).append(name)
    return found


def _framed(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The pairs, with those that concern every pending state drawn together."""
    framed = set(pairs)
    for state in State:
        if state in PENDING_STATES:
            continue
        out = {(source, str(state)) for source in PENDING_STATES}
        back = {(str(state), target) for target in PENDING_STATES}
        if out <= framed:
            framed = framed - out | {(PENDING, state)}
        if back <= framed:
            framed = framed - back | {(state, PENDING)}
    return framed


def diagram() -> str:
    """All states and transitions as an SVG."""
    parts = [
        f'<svg class="states" role="img" viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg">',
        "<title>The states of a job</title>",
        f"<style>{STYLE}</style>",
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4"',
        'markerWidth="8" markerHeight="8" orient="auto">',
        '<path d="M0,0 L8,4 L0,8 z"/></marker>',
        box(PENDING, *PENDING_BOX, "frame"),
    ]
    labels: list[str] = []
    for (source, target), names in edges().items():
        line, label = loop(source) if source == target else curve(source, target)
        parts.append(f'<path d="{line}" marker-end="url(#tip)"/>')
        labels += text(label, [name.replace("_", " ") for name in names], "name")
    parts += labels
    for state in State:
        parts.append(box(state, *BOX, "box"))
        parts += text(PLACES[state], [state], "state")
    return "\n".join([*parts, "</svg>"])


def box(place: str, width: float, height: float, kind: str) -> str:
    """A rectangle around a place."""
    x, y = PLACES[place]
    return (
        f'<rect class="{kind}" x="{x - width / 2}" y="{y - height / 2}" '
        f'width="{width}" height="{height}" rx="6"/>'
    )


def loop(state: str) -> tuple[str, tuple[float, float]]:
    """The path of an edge from a state to itself, and its label's place."""
    side = LOOPS[State(state)]
    x, y = PLACES[state][0], PLACES[state][1] + side * BOX[1] / 2
    over = y + side * 34
    return f"M{x - 14},{y} C{x - 34},{over} {x + 34},{over} {x + 14},{y}", (x, y + side * 26)


def curve(source: str, target: str) -> tuple[str, tuple[float, float]]:
    """The path of an edge, bent to its left so that the way back lies apart, and its label's place."""
    start = ANCHORS.get((source, target), PLACES[source]) if source == PENDING else PLACES[source]
    end = ANCHORS.get((source, target), PLACES[target]) if target == PENDING else PLACES[target]
    length = hypot(end[0] - start[0], end[1] - start[1])
    middle = VIAS.get(
        (source, target),
        (
            (start[0] + end[0]) / 2 + BEND * (end[1] - start[1]) / length,
            (start[1] + end[1]) / 2 - BEND * (end[0] - start[0]) / length,
        ),
    )
    if source != PENDING:
        start = border(start, middle)
    if target != PENDING:
        end = border(end, middle)
    (x1, y1), (x, y), (x2, y2) = start, middle, end
    label = ((x1 + 2 * x + x2) / 4, (y1 + 2 * y + y2) / 4)
    return f"M{x1:.0f},{y1:.0f} Q{x:.0f},{y:.0f} {x2:.0f},{y2:.0f}", label


def border(middle: tuple[float, float], towards: tuple[float, float]) -> tuple[float, float]:
    """Where the line from a box's middle leaves it."""
    dx, dy = towards[0] - middle[0], towards[1] - middle[1]
    scales = [half / abs(d) for half, d in ((BOX[0] / 2, dx), (BOX[1] / 2 + 1, dy)) if d]
    return middle[0] + dx * min(scales), middle[1] + dy * min(scales)


def text(place: tuple[float, float], lines: list[str], kind: str) -> Iterator[str]:
    """Lines of text around a place."""
    x, y = place
    for number, line in enumerate(lines):
        at = y + (number - (len(lines) - 1) / 2) * 12
        yield f'<text class="{kind}" x="{x:.0f}" y="{at:.0f}">{escape(line)}</text>'
