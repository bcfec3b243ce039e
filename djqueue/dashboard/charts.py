"""Small SVG charts: lines, bars and the lifecycle of a job; and the annotations of larger charts.

Charts consist of attributes and classes only, because a strict content security policy forbids inline styles.
"""

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from django.db import Error, connections, transaction
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.logs import Log
from djqueue.core.metrics import MINUTE, Bucket
from djqueue.core.states import PENDING, TERMINAL, State
from djqueue.core.units import to_datetime
from djqueue.dashboard import rendering, tables
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.tables import alias_of
from djqueue.models import Annotation, JobState

logger = Log("djqueue.dashboard")
CHART_WIDTH, CHART_HEIGHT = 72, 24
"""Size of a sparkline, in pixels."""
BAR_STEP = 6
"""Pixels from one bar to the next."""
STAGE_WIDTH, STAGE_HEIGHT = 128, 54
"""Size of a state's box, in pixels."""
STAGE_GAP, MARGIN, ARC = 16, 4, 26
"""Space between boxes, around the diagram, and above the boxes for the arrow back."""
MAX_ANNOTATIONS = 50
"""Maximum annotations of one chart, newest first."""
ANNOTATIONS_FRESH = 5_000
"""Milliseconds before annotations are read again."""
NEWEST_ANNOTATIONS = """\
SELECT at, label FROM djqueue_annotation WHERE at >= %s AND at < %s ORDER BY at DESC, id DESC LIMIT %s"""


class Stage(NamedTuple):
    """A box of the diagram."""

    label: str
    lines: tuple[str, ...]
    """Durations or times."""
    kind: str
    """past | now | good | bad | none (not reached)"""


class Life(NamedTuple):
    """The lifecycle of a job so far."""

    stages: tuple[Stage, ...]
    returns: int
    """Number of times the job went back from active to waiting."""


class ChartAnnotation(NamedTuple):
    """An annotation of a chart."""

    at: int
    """UTC milliseconds."""
    label: str


def sparkline(values: Sequence[float], label: str) -> SafeString:
    """Return a line chart of numbers, oldest first, with a baseline of zero; empty without numbers."""
    if not values:
        return SafeString("")
    return format_html(
        '<svg class="djq-spark" viewBox="0 0 {} {}" width="{}" height="{}" role="img" aria-label="{}" '
        'preserveAspectRatio="none"><polyline points="{}"></polyline></svg>',
        CHART_WIDTH,
        CHART_HEIGHT,
        CHART_WIDTH,
        CHART_HEIGHT,
        label,
        " ".join(f"{x:g},{y:g}" for x, y in points(values, CHART_WIDTH, CHART_HEIGHT)),
    )


def bars(kinds: Sequence[tuple[str, float]], label: str) -> SafeString:
    """Return a bar chart, oldest first, of kinds and heights from 0 to 1; empty without bars."""
    if not kinds:
        return SafeString("")
    width = BAR_STEP * len(kinds)
    rects = format_html_join(
        "",
        '<rect class="djq-bar-{}" x="{}" y="{}" width="{}" height="{}"></rect>',
        (
            (kind, index * BAR_STEP, CHART_HEIGHT - tall, BAR_STEP - 2, tall)
            for index, (kind, share) in enumerate(kinds)
            if (tall := max(2, round(min(1.0, max(0.0, share)) * CHART_HEIGHT)))
        ),
    )
    return format_html(
        '<svg class="djq-bars" viewBox="0 0 {} {}" width="{}" height="{}" role="img" '
        'aria-label="{}">{}</svg>',
        width,
        CHART_HEIGHT,
        width,
        CHART_HEIGHT,
        label,
        rects,
    )


def points(values: Sequence[float], width: int, height: int) -> list[tuple[float, float]]:
    """Return the coordinates of numbers above a baseline of zero, with margins of one pixel."""
    limit = max(values) or 1
    step = width / max(1, len(values) - 1)
    room = height - 2
    return [
        (round(index * step, 1), round(height - 1 - max(0.0, value) / limit * room, 1))
        for index, value in enumerate(values)
    ]


def life(record_state: State, events: Iterable[tuple[str, int]], run_at: int = 0) -> Life:
    """Return the lifecycle of a job.

    Args:
        events: The timeline in order: pairs of event and UTC milliseconds.
        run_at: Start time of a delayed job, in UTC milliseconds.
    """
    waited = ran = runs = 0
    first = last = 0
    is_running = False
    for word, at in events:
        first = first or at
        if last:
            ran, waited = (ran + at - last, waited) if is_running else (ran, waited + at - last)
        is_running = word == "started"
        runs += is_running
        last = at
    label = str(JobState(record_state).label)
    is_pending, is_over = record_state in PENDING, record_state in TERMINAL
    if is_pending and record_state is State.DELAYED and run_at:
        pending: tuple[str, ...] = (_("until"), _clock(run_at))
    elif runs or is_over:
        pending = (rendering.duration(waited),)
    else:
        pending = (_("since"), _clock(last)) if last else ()
    running = (
        ngettext("%(count)d attempt", "%(count)d attempts", runs) % {"count": runs},
        rendering.duration(ran) if not (record_state is State.ACTIVE and runs == 1) else _clock(last),
    )
    end = {State.COMPLETED: "good", State.FAILED: "bad", State.CANCELLED: "past"}
    over = (_clock(last), _("after %s") % rendering.duration(last - first))
    return Life(
        (
            Stage(_("enqueued"), (_clock(first),) if first else (), "past"),
            Stage(label if is_pending else _("waiting"), pending, "now" if is_pending else "past"),
            Stage(
                str(JobState.ACTIVE.label),
                running if runs else (),
                "now" if record_state is State.ACTIVE else "past" if runs else "none",
            ),
            Stage(label if is_over else _("end"), over if is_over else (), end.get(record_state, "none")),
        ),
        max(0, runs - 1) + (1 if is_pending and runs else 0),
    )


def life_svg(job_life: Life) -> SafeString:
    """Return the diagram as SVG, using attributes only. Its label describes it as text."""
    top = MARGIN + (ARC if job_life.returns else 0)
    step = STAGE_WIDTH + STAGE_GAP
    width = MARGIN * 2 + step * len(job_life.stages) - STAGE_GAP
    parts = []
    for index, stage in enumerate(job_life.stages):
        x = MARGIN + index * step
        middle = x + STAGE_WIDTH // 2
        lines = format_html_join(
            "",
            '<text class="djq-life-note" x="{}" y="{}" text-anchor="middle">{}</text>',
            ((middle, top + 32 + 14 * line, text) for line, text in enumerate(stage.lines[:2])),
        )
        parts.append(
            format_html(
                '<g class="djq-life-{}"><rect x="{}" y="{}" width="{}" height="{}" rx="6"></rect>'
                '<text x="{}" y="{}" text-anchor="middle">{}</text>{}</g>',
                stage.kind,
                x,
                top,
                STAGE_WIDTH,
                STAGE_HEIGHT,
                middle,
                top + 17,
                stage.label,
                lines,
            )
        )
        if index:
            was_there = job_life.stages[index].kind != "none"
            parts.append(
                _arrow(x - STAGE_GAP + 2, top + STAGE_HEIGHT // 2, x - 2, "past" if was_there else "none")
            )
    if job_life.returns:
        parts.append(
            _back(
                MARGIN + step + STAGE_WIDTH // 2, MARGIN + 2 * step + STAGE_WIDTH // 2, top, job_life.returns
            )
        )
    return format_html(
        '<svg class="djq-life" viewBox="0 0 {} {}" width="{}" role="img" aria-label="{}">{}</svg>',
        width,
        top + STAGE_HEIGHT + MARGIN,
        width,
        describe_life(job_life),
        format_html_join("", "{}", ((part,) for part in parts)),
    )


def describe_life(job_life: Life) -> str:
    """Return the diagram as text."""
    reached = [stage for stage in job_life.stages if stage.kind != "none"]
    return "; ".join(" ".join((stage.label, *stage.lines)) for stage in reached)


def annotations_within(series: Sequence[Bucket]) -> list[ChartAnnotation]:
    """Return the annotations of the period of a chart, oldest first; none if the table doesn't exist."""
    if not series:
        return []
    start, end = series[0].start, series[-1].start + series[-1].step
    return annotations_between(start, end)


def annotation_parts(_request: HttpRequest) -> Hashable:
    """Return the annotations of the last hour: see `reading.Parts`."""
    end = (SYSTEM_CLOCK.now() // MINUTE + 1) * MINUTE
    return tuple(annotations_between(end - 60 * MINUTE, end))


def _arrow(start: int, y: int, end: int, kind: str) -> SafeString:
    return format_html(
        '<path class="djq-life-arrow djq-life-{}" d="M{} {}H{}m-5 -4l5 4l-5 4"></path>',
        kind,
        start,
        y,
        end,
    )


def _back(to: int, start: int, top: int, times: int) -> SafeString:
    middle = (to + start) // 2
    high, low = top - ARC, top - 2
    path = f"M{start} {low}C{start} {high} {to} {high} {to} {low}m-5 -5l5 5l5 -5"
    return format_html(
        '<path class="djq-life-arrow djq-life-past" d="{}"></path>'
        '<text class="djq-life-note" x="{}" y="{}" text-anchor="middle">{}</text>',
        path,
        middle,
        top - 7,
        f"×{times}",
    )


def _clock(at: int) -> str:
    return rendering.local(to_datetime(at))[11:]


def annotations_between(start: int, end: int) -> list[ChartAnnotation]:
    """Return the annotations of a period, oldest first; none if the table doesn't exist."""
    return read_cache.read(
        ("marks", start, end), lambda: _read_annotations(start, end), ANNOTATIONS_FRESH
    ).value


def _guarded(alias: str) -> AbstractContextManager[Any]:
    """Return a savepoint inside a transaction; outside, a failed statement affects no other."""
    return transaction.atomic(using=alias) if connections[alias].in_atomic_block else nullcontext()


def _read_annotations(start: int, end: int) -> list[ChartAnnotation]:
    try:
        # A missing table must not end a transaction around the request.
        with _guarded(alias_of(Annotation)):
            newest = tables.select(Annotation, NEWEST_ANNOTATIONS, (start, end, MAX_ANNOTATIONS))
    except Error as error:
        logger.debug("Could not read the annotations; the charts show none: %s", error)
        return []
    return [ChartAnnotation(at, label) for at, label in reversed(newest)]
