"""Cron lines in words: every valid line is described, and invalid ones are rejected quickly."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from djqueue.core.errors import OptionError
from djqueue.dashboard.views.schedules import describe_cron
from djqueue.schedules.expressions import fields_of, read_line


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("* * * * *", "Every minute"),
        ("*/15 * * * *", "Every 15 minutes"),
        ("*/7 * * * *", "At minutes 0, 7, 14, 21, 28, 35, 42, 49 and 56"),
        ("@hourly", "Every hour"),
        ("0 */6 * * *", "At 00:00, 06:00, 12:00 and 18:00, every day"),
        ("30 2 * * *", "At 02:30, every day"),
        ("0 9,17 * * 1-5", "At 09:00 and 17:00, Monday to Friday"),
        ("*/10 8-17 * * mon,wed", "Every 10 minutes, in hours 8 to 17, on Monday and Wednesday"),
        ("@weekly", "At 00:00, on Sunday"),
        ("0 0 * * 7", "At 00:00, on Sunday"),
        ("0 0 1,15 * *", "At 00:00, on days 1 and 15 of the month"),
        ("0 0 L * *", "At 00:00, on the last day of the month"),
        ("0 0 LW * *", "At 00:00, on the last workday of the month"),
        ("0 0 * * 5L", "At 00:00, on the last Friday of the month"),
        ("0 0 * * 1#2", "At 00:00, on Monday no. 2 of the month"),
        ("0 0 13 * 5", "At 00:00, on day 13 of the month, or on Friday"),
        ("0 0 */15 * 5", "At 00:00, on days 1, 16 and 31 of the month if that is on Friday"),
        ("@yearly", "At 00:00, on day 1 of the month, in January"),
        ("*/5 * * * * *", "Every 5 seconds"),
        ("10 0 3 * * *", "At second 10, in minute 0, in hour 3, every day"),
        ("5 * * * *", "At minute 5"),
        ("10,20 0-4 * * * *", "At seconds 10 and 20, in minutes 0 to 4"),
    ],
)
def test_cron_line_is_described_in_words(line, said):
    assert describe_cron(line) == said


@pytest.mark.parametrize(
    "line",
    ["0 0 1--100000000 * *", "*/100000000000000000000000 * * * x", "0-99999999999 * * * *", "* " * 500],
)
def test_invalid_cron_line_is_rejected_quickly(line):
    began = time.thread_time()
    with pytest.raises(OptionError, match="schedule"):
        describe_cron(line)
    assert time.thread_time() - began < 1  # seconds of this thread, however busy the machine is


@given(st.text(alphabet="0123456789*/,-#LW@ monfriJAN", max_size=60))
@example("0 0 * * 0#1")
def test_any_text_is_described_or_rejected(text):
    try:
        read_line(text)
    except OptionError:
        with pytest.raises(OptionError):
            describe_cron(text)
    else:
        said = describe_cron(text)
        assert said == said.strip()
        assert 0 < len(said) < 2_000


def field(low, high):
    one = st.integers(low, high)
    span = st.tuples(one, one).map(lambda pair: f"{min(pair)}-{max(pair)}")
    step = st.integers(1, high).map(lambda number: f"*/{number}")
    return st.one_of(st.just("*"), one.map(str), span, step, st.lists(one, min_size=2).map(comma))


def comma(values):
    return ",".join(map(str, values))


DAYS = st.one_of(field(1, 31), st.sampled_from(["L", "LW"]))
WEEKDAYS = st.one_of(field(0, 7), st.sampled_from(["5L", "1#2", "0#5", "1,3#1"]))
LINES = st.tuples(field(0, 59), field(0, 23), DAYS, field(1, 12), WEEKDAYS).map(" ".join)


def meaning(line):
    """Return the fields that decide when a line is due."""
    found = fields_of(line)
    is_any = len(found.days) == 31 or len(found.weekdays) == 7
    if is_any and not found.is_both:
        return found._replace(days=frozenset(), weekdays=frozenset(), is_both=True)
    if is_any and len(found.days) == 31 and len(found.weekdays) == 7:
        return found._replace(days=frozenset(), weekdays=frozenset(), is_both=True)
    return found._replace(is_both=found.is_both or is_any)


@given(LINES, LINES)
@example("0 0 13 * 5", "0 0 */13 * 5")
@example("0 * * * *", "0 0-23 * * *")
def test_cron_lines_with_equal_descriptions_run_at_the_same_times(line, other):
    try:
        same = describe_cron(line) == describe_cron(other)
    except OptionError:
        return
    if same:
        assert meaning(line) == meaning(other)
