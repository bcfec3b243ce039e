"""Cron lines: the next run."""

import time
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djqueue.core.errors import OptionError
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.schedules.expressions import ALIASES, check_expression, next_run

BERLIN = ZoneInfo("Europe/Berlin")


def after(line: str, moment: datetime, zone: str = "UTC") -> datetime | None:
    at = next_run(line, zone, to_milliseconds(moment))
    return None if at is None else to_datetime(at)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("*/15 * * * *", datetime(2026, 3, 4, 5, 15, tzinfo=UTC)),
        ("30 * * * * *", datetime(2026, 3, 4, 5, 6, 30, tzinfo=UTC)),
        ("0 0 * * MON", datetime(2026, 3, 9, tzinfo=UTC)),
        ("0 0 L * *", datetime(2026, 3, 31, tzinfo=UTC)),
        ("@hourly", datetime(2026, 3, 4, 6, tzinfo=UTC)),
        ("@daily", datetime(2026, 3, 5, tzinfo=UTC)),
        ("@Midnight", datetime(2026, 3, 5, tzinfo=UTC)),
        ("@weekly", datetime(2026, 3, 8, tzinfo=UTC)),
        ("@monthly", datetime(2026, 4, 1, tzinfo=UTC)),
        (" @yearly ", datetime(2027, 1, 1, tzinfo=UTC)),
        ("@annually", datetime(2027, 1, 1, tzinfo=UTC)),
    ],
)
def test_cron_lines_of_five_and_six_fields_and_aliases_are_parsed(line: str, expected: datetime) -> None:
    assert after(line, datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)) == expected


def test_next_run_is_later_than_the_current_one() -> None:
    noon = datetime(2026, 3, 4, 12, tzinfo=UTC)
    assert after("0 12 * * *", noon) == noon + timedelta(days=1)
    assert after("0 12 * * *", noon - timedelta(milliseconds=1)) == noon


def test_skipped_clock_time_runs_after_the_clock_change() -> None:
    evening_before = datetime(2026, 3, 28, 20, tzinfo=BERLIN)
    assert after("30 2 * * *", evening_before, "Europe/Berlin") == datetime(2026, 3, 29, 1, tzinfo=UTC)


def test_repeated_clock_time_runs_once() -> None:
    evening_before = datetime(2026, 10, 24, 20, tzinfo=BERLIN)
    first = after("30 2 * * *", evening_before, "Europe/Berlin")
    assert first == datetime(2026, 10, 25, 2, 30, fold=0, tzinfo=BERLIN).astimezone(UTC)
    assert first is not None
    following = after("30 2 * * *", first, "Europe/Berlin")
    assert following == datetime(2026, 10, 26, 2, 30, tzinfo=BERLIN).astimezone(UTC)


def test_next_run_from_the_second_repeated_hour_is_not_in_the_first() -> None:
    second_pass = datetime(2026, 10, 25, 2, 15, fold=1, tzinfo=BERLIN)
    following = after("30 2 * * *", second_pass, "Europe/Berlin")
    assert following == datetime(2026, 10, 26, 2, 30, tzinfo=BERLIN).astimezone(UTC)


def test_cron_line_without_further_runs_returns_none() -> None:
    assert after("0 0 */31 2 2#5", datetime(2026, 1, 1, tzinfo=UTC)) is None
    assert after("0 0 1 1 *", datetime(9999, 6, 1, tzinfo=UTC)) is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "* * * *",
        "* * * * * * *",
        "60 * * * *",
        "* 24 * * *",
        "0 0 31 2 *",
        "*/0 * * * *",
        "5-1 * * * *",
        "a * * * *",
        "-1 * * * *",
        "@noon",
        "@",
        "0 0 1--100000000 * *",
        "0-99999999999999999999 * * * *",
        "* " * 150,
        "1," * 120 + "1 * * * *",
    ],
)
def test_invalid_cron_line_is_rejected_quickly_with_its_text(line: str) -> None:
    started = time.thread_time()
    with pytest.raises(OptionError, match=r"^schedule: ") as refused:
        next_run(line, "UTC", 0)
    assert time.thread_time() - started < 0.5
    assert repr(line) in str(refused.value) or "characters" in str(refused.value)


@pytest.mark.parametrize("name", ["", "Europe", "Europe/Atlantis", "../UTC", "/etc/passwd", "a\0b"])
def test_invalid_time_zone_is_rejected_with_its_name(name: str) -> None:
    with pytest.raises(OptionError, match="is not the name of a time zone") as refused:
        next_run("@daily", name, 0)
    assert repr(name) in str(refused.value)


@given(st.text(alphabet="0123456789*/-,#LWMONJA @", max_size=60))
def test_random_cron_line_is_parsed_or_rejected(line: str) -> None:
    try:
        check_expression(line)
    except OptionError:
        return
    at = next_run(line, "Europe/Berlin", 0)
    assert at is None or at > 0


@given(
    st.sampled_from([*ALIASES, "*/7 * * * *", "30 2 * * *", "15 1,2,3 * * 0", "5 */5 * * * *"]),
    st.integers(
        to_milliseconds(datetime(2026, 1, 1, tzinfo=UTC)), to_milliseconds(datetime(2028, 1, 1, tzinfo=UTC))
    ),
    st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"]),
)
def test_next_run_is_the_first_later_run(line: str, moment: int, zone: str) -> None:
    at = next_run(line, zone, moment)
    assert at is not None
    assert at > moment
    assert next_run(line, zone, at - 1) == at
