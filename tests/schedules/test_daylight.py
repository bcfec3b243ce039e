"""Clock changes: runs compared with an independent minute-by-minute reference."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.schedules.expressions import next_run

MINUTE = timedelta(minutes=1)
CHANGES = {
    "Europe/Berlin forward": ("Europe/Berlin", datetime(2026, 3, 29, 1)),
    "Europe/Berlin back": ("Europe/Berlin", datetime(2026, 10, 25, 1)),
    "America/New_York forward": ("America/New_York", datetime(2026, 3, 8, 7)),
    "America/New_York back": ("America/New_York", datetime(2026, 11, 1, 6)),
    "America/St_Johns, a minute after midnight": ("America/St_Johns", datetime(2010, 11, 7, 2, 31)),
    "Australia/Lord_Howe forward by half an hour": ("Australia/Lord_Howe", datetime(2026, 10, 3, 15, 30)),
    "Australia/Lord_Howe back": ("Australia/Lord_Howe", datetime(2026, 4, 4, 15)),
    "Pacific/Chatham forward": ("Pacific/Chatham", datetime(2026, 9, 26, 14)),
    "Pacific/Chatham back": ("Pacific/Chatham", datetime(2026, 4, 4, 14)),
    "Asia/Tehran, which has none any more": ("Asia/Tehran", datetime(2026, 3, 21, 20, 30)),
    "Asia/Tehran when it had": ("Asia/Tehran", datetime(2022, 3, 21, 20, 30)),
    "Africa/Casablanca for Ramadan": ("Africa/Casablanca", datetime(2026, 2, 15, 2)),
    "Africa/Casablanca after it": ("Africa/Casablanca", datetime(2026, 3, 22, 2)),
    "America/Sao_Paulo, midnight is skipped": ("America/Sao_Paulo", datetime(2018, 11, 4, 3)),
    "America/Sao_Paulo, back into the day before": ("America/Sao_Paulo", datetime(2018, 2, 18, 2)),
    "Pacific/Apia, a day is skipped": ("Pacific/Apia", datetime(2011, 12, 30, 10)),
    "Antarctica/Troll forward by two hours": ("Antarctica/Troll", datetime(2026, 3, 29, 1)),
    "Antarctica/Troll back": ("Antarctica/Troll", datetime(2026, 10, 25, 1)),
    "America/Havana, midnight is skipped": ("America/Havana", datetime(2026, 3, 8, 5)),
    "America/Havana, back to midnight": ("America/Havana", datetime(2026, 11, 1, 5)),
    "Asia/Kathmandu, which has none": ("Asia/Kathmandu", datetime(2026, 3, 29, 1)),
}
FIXED = [
    "30 2 * * *",
    "0 0 * * *",
    "15 0 * * *",
    "45 1 * * *",
    "0,30 1-3 * * *",
    "*/15 2 * * *",
    "10 */2 * * *",
    "59 23 * * *",
    "0 12 30 12 *",
    "5 0,3 * * 0",
]
HOURLY = ["*/15 * * * *", "0 * * * *", "45 * * * *", "15 */1 * * *", "30 * * * 0"]


class Line:
    """A reading of five fields of numbers, lists, ranges and steps."""

    def __init__(self, text: str) -> None:
        fields = zip(text.split(), ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6)), strict=True)
        self.minutes, self.hours, self.days, self.months, self.weekdays = (
            {value for part in field.split(",") for value in self._part(part, *bounds)}
            for field, bounds in fields
        )

    @staticmethod
    def _part(part: str, low: int, high: int) -> range:
        span, _, step = part.partition("/")
        if span != "*":
            first, _, last = span.partition("-")
            low, high = int(first), int(last or first)
        return range(low, high + 1, int(step or 1))

    def matches(self, local: datetime) -> bool:
        return (
            local.minute in self.minutes
            and local.hour in self.hours
            and local.day in self.days
            and local.month in self.months
            and local.isoweekday() % 7 in self.weekdays
        )


def expected(text: str, zone: str, begin: datetime, end: datetime) -> list[datetime]:
    """Each minute of UTC, and what a clock on the wall shows.

    A line for every hour runs whenever the clock shows its minute. Any other runs when the clock comes
    to a time, or past it, for the first time.
    """
    line = Line(text)
    is_hourly = text in HOURLY
    [(_, latest), *minutes] = clock_on_the_wall(zone, begin, end)
    found = []
    for at, shown in minutes:
        passed = [shown] if is_hourly else []
        while not is_hourly and latest < shown:
            latest += MINUTE
            passed.append(latest)
        if any(map(line.matches, passed)):
            found.append(at)
    return found


@cache
def clock_on_the_wall(zone: str, begin: datetime, end: datetime) -> list[tuple[datetime, datetime]]:
    """Each minute, with what the clock shows."""
    minutes = (begin + number * MINUTE for number in range((end - begin) // MINUTE + 1))
    return [(at, at.astimezone(ZoneInfo(zone)).replace(tzinfo=None)) for at in minutes]


def answered(text: str, zone: str, begin: datetime, end: datetime) -> Iterator[datetime]:
    at = next_run(text, zone, to_milliseconds(begin))
    while at is not None and at <= to_milliseconds(end):
        yield to_datetime(at)
        at = next_run(text, zone, at)


@pytest.mark.parametrize("change", CHANGES)
def test_runs_around_a_clock_change_match_a_minute_by_minute_reference(change: str) -> None:
    zone, moment = CHANGES[change]
    begin, end = (moment.replace(tzinfo=UTC) + timedelta(hours=hours) for hours in (-13, 26))
    for line in FIXED + HOURLY:
        assert list(answered(line, zone, begin, end)) == expected(line, zone, begin, end), line


def test_table_of_clock_changes_is_correct_for_twelve_zones() -> None:
    assert len({zone for zone, _ in CHANGES.values()}) >= 12
    for change, (zone, moment) in CHANGES.items():
        at = moment.replace(tzinfo=UTC)
        before, behind = (moment.astimezone(ZoneInfo(zone)).utcoffset() for moment in (at - MINUTE, at))
        assert (before == behind) == ("none" in change), change


@settings(max_examples=40)
@given(
    st.sampled_from(list(CHANGES.values())),
    st.sampled_from(FIXED + HOURLY),
    st.integers(-6 * 60, 6 * 60),
)
def test_next_run_from_any_moment_is_the_first_later_run(
    change: tuple[str, datetime], line: str, minutes: int
) -> None:
    zone, moment = change
    begin = moment.replace(tzinfo=UTC) - timedelta(hours=13)
    after = moment.replace(tzinfo=UTC) + minutes * MINUTE
    end = moment.replace(tzinfo=UTC) + timedelta(hours=26)
    later = [at for at in expected(line, zone, begin, end) if at > after]
    found = next(answered(line, zone, after, end), None)
    assert found == (later[0] if later else None)


@pytest.mark.parametrize(
    ("line", "expected_times"),
    [
        ("0 30 2 * * *", ["2026-10-25T00:30:00", "2026-10-26T01:30:00"]),
        ("*/30 59 2 * * *", ["2026-10-25T00:59:00", "2026-10-25T00:59:30", "2026-10-26T01:59:00"]),
        ("30 59 * * * *", ["2026-10-24T22:59:30", "2026-10-24T23:59:30", "2026-10-25T00:59:30"]),
    ],
)
def test_cron_lines_with_seconds_follow_clock_changes(line: str, expected_times: list[str]) -> None:
    begin = datetime(2026, 10, 24, 22, 30, tzinfo=UTC)
    found = answered(line, "Europe/Berlin", begin, begin + timedelta(days=3))
    wanted = [datetime.fromisoformat(text).replace(tzinfo=UTC) for text in expected_times]
    assert [next(found) for _ in wanted] == wanted


def test_cron_line_with_seconds_in_a_skipped_hour_runs_once_after_it() -> None:
    begin = datetime(2026, 3, 28, 12, tzinfo=UTC)
    found = answered("*/10 */20 2 * * *", "Europe/Berlin", begin, begin + timedelta(hours=14))
    assert list(found) == [datetime(2026, 3, 29, 1, tzinfo=UTC)]
