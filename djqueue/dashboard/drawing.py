"""Small SVG charts, made of attributes only: a strict content security policy forbids inline styles."""

from collections.abc import Sequence

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

WIDTH, HEIGHT = 72, 24
"""Size of a sparkline, in pixels."""


def sparkline(values: Sequence[float], label: str) -> SafeString:
    """Return a line chart of numbers, oldest first, with a baseline of zero; empty without numbers."""
    if not values:
        return SafeString("")
    return format_html(
        '<svg class="djq-spark" viewBox="0 0 {} {}" width="{}" height="{}" role="img" aria-label="{}" '
        'preserveAspectRatio="none"><polyline points="{}"></polyline></svg>',
        WIDTH,
        HEIGHT,
        WIDTH,
        HEIGHT,
        label,
        " ".join(f"{x:g},{y:g}" for x, y in points(values, WIDTH, HEIGHT)),
    )


BAR = 6
"""Pixels from one bar to the next."""


def bars(kinds: Sequence[tuple[str, float]], label: str) -> SafeString:
    """Return a bar chart, oldest first, of kinds and heights from 0 to 1; empty without bars."""
    if not kinds:
        return SafeString("")
    width = BAR * len(kinds)
    rects = format_html_join(
        "",
        '<rect class="djq-bar-{}" x="{}" y="{}" width="{}" height="{}"></rect>',
        (
            (kind, index * BAR, HEIGHT - tall, BAR - 2, tall)
            for index, (kind, share) in enumerate(kinds)
            if (tall := max(2, round(min(1.0, max(0.0, share)) * HEIGHT)))
        ),
    )
    return format_html(
        '<svg class="djq-bars" viewBox="0 0 {} {}" width="{}" height="{}" role="img" '
        'aria-label="{}">{}</svg>',
        width,
        HEIGHT,
        width,
        HEIGHT,
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
