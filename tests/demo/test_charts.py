"""The delay chart of an airport."""

from io import BytesIO

import pytest
from PIL import Image, ImageColor

from demo_project.flights.charts import (
    COLOURS,
    PLOT_BOTTOM,
    PLOT_TOP,
    SIZE,
    Lateness,
    Sample,
    draw,
    scale_of,
    statistics_of,
)

ON_TIME = Sample(month=1, hour=5, arrival_delay=0)


def pixels(image: Image.Image, lateness: Lateness) -> int:
    colours = {colour: count for count, colour in image.getcolors(maxcolors=SIZE[0] * SIZE[1]) or []}
    return colours.get(ImageColor.getrgb(COLOURS[lateness]), 0)


LEGEND_PIXELS = pixels(draw("none", statistics_of([])), Lateness.HOUR)


@pytest.mark.parametrize(
    ("delay", "lateness"),
    [
        (-20, None),
        (14, None),
        (15, Lateness.QUARTER_HOUR),
        (59, Lateness.QUARTER_HOUR),
        (60, Lateness.HOUR),
        (179, Lateness.HOUR),
        (180, Lateness.THREE_HOURS),
        (None, Lateness.NEVER),
    ],
)
def test_flight_is_classified_by_its_arrival_delay(delay: int | None, lateness: Lateness | None) -> None:
    assert Sample(month=1, hour=5, arrival_delay=delay).lateness is lateness


def test_statistics_count_flights_by_month_and_by_hour() -> None:
    statistics = statistics_of([ON_TIME, Sample(1, 6, 75), Sample(12, 6, None), Sample(12, 6, 200)])
    january, december = statistics.by_month.bars[0], statistics.by_month.bars[-1]
    assert (january.label, january.flights, january.percent(Lateness.HOUR)) == ("Jan", 2, 50)
    assert (december.label, december.height) == ("Dec", 100)
    six = statistics.by_hour.bars[1]
    assert (six.label, six.flights, six.late) == ("6", 3, (0, 1, 1, 1))
    assert str(statistics) == "4 flights in 2013: 50.0 % late, 25.0 % cancelled or diverted"


def test_departure_outside_the_charted_hours_counts_toward_the_nearest_hour() -> None:
    statistics = statistics_of([Sample(month=7, hour=1, arrival_delay=0)])
    assert statistics.by_hour.bars[0].flights == 1


@pytest.mark.parametrize(
    ("highest", "top", "step"),
    [(0, 10, 2), (10, 10, 2), (31, 40, 10), (41.5, 50, 10), (100, 100, 20)],
)
def test_scale_covers_the_highest_bar_in_round_steps(highest: float, top: int, step: int) -> None:
    assert scale_of(highest) == (top, step)


def test_chart_is_a_png_of_the_declared_size() -> None:
    file = BytesIO()
    draw("ATL Hartsfield Jackson Atlanta Intl", statistics_of([ON_TIME])).save(file, format="PNG")
    with Image.open(file) as chart:
        chart.load()
        assert (chart.format, chart.mode, chart.size) == ("PNG", "RGB", SIZE)


def test_late_flights_are_drawn_in_the_color_of_their_class() -> None:
    punctual = draw("on time", statistics_of([ON_TIME]))
    late = draw("late", statistics_of([Sample(1, 5, 75)]))
    assert pixels(punctual, Lateness.HOUR) == LEGEND_PIXELS
    assert pixels(late, Lateness.HOUR) > LEGEND_PIXELS


def test_doubled_share_has_twice_as_many_colored_pixels() -> None:
    all_of_january = [Sample(1, 5, 75)]
    half_of_february = [Sample(2, 6, 200), Sample(2, 6, 0)]
    chart = draw("ATL", statistics_of(all_of_january + half_of_february))
    whole = pixels(chart, Lateness.HOUR) - LEGEND_PIXELS
    half = pixels(chart, Lateness.THREE_HOURS) - LEGEND_PIXELS
    assert whole / half == pytest.approx(2, rel=0.02)


def test_airport_without_flights_has_an_empty_chart_and_a_no_flights_summary() -> None:
    statistics = statistics_of([])
    assert str(statistics) == "no flights"
    assert draw("XXX", statistics).size == SIZE


def test_chart_shows_a_title_and_an_axis() -> None:
    chart = draw("ATL", statistics_of([ON_TIME]))
    title = chart.crop((0, 20, SIZE[0], 70)).convert("L")
    axis = chart.crop((0, PLOT_TOP - 10, 96, PLOT_BOTTOM + 10)).convert("L")
    for part in (title, axis):
        darkest, lightest = part.getextrema()
        assert darkest < 150
        assert lightest == 255
