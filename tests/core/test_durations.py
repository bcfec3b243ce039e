"""Times as users write them, in whole milliseconds."""

import math
from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djqueue.core.errors import OptionError
from djqueue.core.units import MAX_DURATION, instant, milliseconds, to_datetime, to_milliseconds


@given(st.integers(0, MAX_DURATION))
def test_whole_milliseconds_are_kept(whole):
    assert milliseconds("delay", timedelta(milliseconds=whole)) == whole
    assert milliseconds("delay", whole / 1_000) == whole


@given(st.floats(0, MAX_DURATION / 1_000))
def test_fractions_of_a_millisecond_are_rounded_up(seconds):
    found = milliseconds("delay", seconds)
    exact = Fraction(seconds) * 1_000

    assert found >= 1 or seconds == 0
    assert abs(found - math.ceil(exact)) <= 1
    assert found > exact - Fraction(1, 1_000)


@given(st.timedeltas(timedelta(0), timedelta(days=36_500)))
def test_a_timedelta_is_never_cut_short(value):
    found = milliseconds("delay", value)

    assert timedelta(milliseconds=found - 1) < value <= timedelta(milliseconds=found)


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, -math.inf, -1, -1e-9, MAX_DURATION, 1e300, 10**400),
        *(timedelta.max, timedelta.min, True, None, "5", b"", [], 1j),
    ],
    ids=repr,
)
def test_invalid_duration_is_rejected_with_the_option_name(value):
    with pytest.raises(OptionError, match=r"^ttl: "):
        milliseconds("ttl", value)


def test_longest_duration_is_a_hundred_years():
    assert milliseconds("ttl", MAX_DURATION // 1_000) == MAX_DURATION
    assert milliseconds("ttl", timedelta(milliseconds=MAX_DURATION)) == MAX_DURATION
    with pytest.raises(OptionError, match="at most 100 years"):
        milliseconds("ttl", timedelta(milliseconds=MAX_DURATION + 1))


@given(st.datetimes(datetime(1970, 1, 2), datetime(9997, 12, 30), timezones=st.timezones()))
def test_datetime_survives_conversion_to_milliseconds(value):
    found = instant("run_at", value)

    assert to_datetime(found) <= value < to_datetime(found + 1)
    assert to_milliseconds(to_datetime(found)) == found


@pytest.mark.parametrize(
    "zone", [UTC, timezone(timedelta(hours=-23)), ZoneInfo("Pacific/Kiritimati")], ids=str
)
def test_time_that_some_time_zone_cannot_show_is_rejected(zone):
    for value in (datetime(9999, 12, 31, 23, 59), datetime(9998, 1, 2)):
        with pytest.raises(OptionError, match=r"^run_at: must be before the year 9998; got "):
            instant("run_at", value.replace(tzinfo=zone))


def test_times_before_1970_become_1970():
    east = timezone(timedelta(hours=14))

    assert instant("run_at", datetime(1, 1, 1, tzinfo=east)) == 0
    assert instant("run_at", datetime(1969, 12, 31, tzinfo=UTC)) == 0


@pytest.mark.parametrize("value", [datetime(2024, 1, 1), 5, None, "2024-01-01", math.nan], ids=repr)
def test_invalid_time_is_rejected_with_the_option_name(value):
    with pytest.raises(OptionError, match=r"^run_at: "):
        instant("run_at", value)
