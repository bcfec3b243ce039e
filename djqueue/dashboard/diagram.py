"""The lifecycle diagram of a job: the states passed, the time in each, and the current one."""

from collections.abc import Iterable
from typing import NamedTuple

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from djqueue.core.states import PENDING, TERMINAL, State
from djqueue.core.units import to_datetime
from djqueue.models import JobState

from . import rendering, spans

WIDTH, HEIGHT = 116, 54
"""Size of a state's box, in pixels."""
GAP, MARGIN, ARC = 16, 4, 26
"""Space between boxes, around the diagram, and above the boxes for the arrow back."""


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
        pending = (spans.shown(waited),)
    else:
        pending = (_("since"), _clock(last)) if last else ()
    running = (
        ngettext("%(count)d attempt", "%(count)d attempts", runs) % {"count": runs},
        spans.shown(ran) if not (record_state is State.ACTIVE and runs == 1) else _clock(last),
    )
    end = {State.COMPLETED: "good", State.FAILED: "bad", State.CANCELLED: "past"}
    over = (_clock(last), _("after %s") % spans.shown(last - first))
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


def draw(found: Life) -> SafeString:
    """Return the diagram as SVG, using attributes only. Its label describes it as text."""
    top = MARGIN + (ARC if found.returns else 0)
    step = WIDTH + GAP
    width = MARGIN * 2 + step * len(found.stages) - GAP
    parts = []
    for index, stage in enumerate(found.stages):
        x = MARGIN + index * step
        middle = x + WIDTH // 2
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
                WIDTH,
                HEIGHT,
                middle,
                top + 17,
                stage.label,
                lines,
            )
        )
        if index:
            was_there = found.stages[index].kind != "none"
            parts.append(_arrow(x - GAP + 2, top + HEIGHT // 2, x - 2, "past" if was_there else "none"))
    if found.returns:
        parts.append(_back(MARGIN + step + WIDTH // 2, MARGIN + 2 * step + WIDTH // 2, top, found.returns))
    return format_html(
        '<svg class="djq-life" viewBox="0 0 {} {}" width="{}" role="img" aria-label="{}">{}</svg>',
        width,
        top + HEIGHT + MARGIN,
        width,
        describe(found),
        format_html_join("", "{}", ((part,) for part in parts)),
    )


def describe(found: Life) -> str:
    """Return the diagram as text."""
    reached = [stage for stage in found.stages if stage.kind != "none"]
    return "; ".join(" ".join((stage.label, *stage.lines)) for stage in reached)


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
