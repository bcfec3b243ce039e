"""Blackouts: days and hours, in local time, during which a schedule does not run."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta, tzinfo
from functools import lru_cache

from djqueue.core.errors import OptionError

from .zones import instant, local_time, next_change

WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY = timedelta(days=1)
MAX_ADJACENT = 1_000
"""Maximum number of windows without a gap between them: almost three years of days."""
MAX_WINDOWS = 200
"""Maximum number of windows of one schedule."""
FORMS = "dates (2026-12-24, 2026-12-24..2027-01-02, 12-25), weekdays (sat,sun, mon-fri), hours (22:00-06:00)"


@dataclass(frozen=True, slots=True)
class BlackoutWindow:
    """Hours on certain days. An end that is not later than the beginning is on the next day."""

    first: date | None = None
    last: date | None = None
    """First and last date, both included."""
    yearly: tuple[int, int] | None = None
    """A (month, day) of every year."""
    weekdays: frozenset[int] | None = None
    begin: int = 0
    """Minutes since midnight."""
    end: int = 1_440

    def around(self, moment: datetime) -> tuple[datetime, datetime] | None:
        """Return the beginning and the end of the window around a local time; None if there is none."""
        today = moment.date()
        for day in (today, today - DAY) if self.end > 1_440 else (today,):
            if self._is_on(day):
                midnight = datetime.combine(day, time())
                begin, end = (midnight + timedelta(minutes=m) for m in (self.begin, self.end))
                if begin <= moment < end:
                    return begin, end
        return None

    def _is_on(self, day: date) -> bool:
        if self.first is not None and not self.first <= day <= (self.last or self.first):
            return False
        if self.yearly is not None and (day.month, day.day) != self.yearly:
            return False
        return self.weekdays is None or day.weekday() in self.weekdays


@lru_cache(maxsize=1024)
def parse_blackouts(lines: tuple[str, ...]) -> tuple[BlackoutWindow, ...]:
    """Parse windows, one per line: days, hours, or both.

    Raises:
        OptionError: A line is invalid, or there are too many.
    """
    if len(lines) > MAX_WINDOWS:
        raise OptionError(f"blackouts: {len(lines)} windows; at most {MAX_WINDOWS} are allowed")
    return tuple(map(_window, lines))


def blackout_end(windows: Sequence[BlackoutWindow], zone: tzinfo, at: int) -> int | None:
    """Return when, in UTC seconds, the blackout around an instant ends; the instant itself if there is none.

    None if the blackout lasts for years or never ends.
    """
    for _ in range(MAX_ADJACENT):
        windows_around = _around(windows, local_time(zone, at))
        if not windows_around:
            return at
        # Continue from the latest end, or from a clock change before it.
        end = max(instant(zone, end, after=at) for _, end in windows_around)
        at = next_change(zone, at, end) or end
    return None


def blackout_begin(windows: Sequence[BlackoutWindow], zone: tzinfo, at: int) -> int:
    """Return when, in UTC seconds, the blackout around an instant began; the instant if there is none."""
    for _ in range(MAX_ADJACENT):
        windows_around = _around(windows, local_time(zone, at - 1))
        if not windows_around:
            break
        at = min(at - 1, *(instant(zone, begin) for begin, _ in windows_around))
    return at


def _around(windows: Iterable[BlackoutWindow], moment: datetime) -> list[tuple[datetime, datetime]]:
    return [found for window in windows if (found := window.around(moment)) is not None]


def _window(line: str) -> BlackoutWindow:
    if not isinstance(line, str) or not line.strip() or len(line) > 100:
        raise _refused(line)
    *days, last = line.lower().split()
    hours = _hours(last)
    if hours is None:
        days, hours = [*days, last], (0, 1_440)
    if len(days) > 1:
        raise _refused(line)
    try:
        return replace(_days(days[0]) if days else BlackoutWindow(), begin=hours[0], end=hours[1])
    except ValueError:
        raise _refused(line) from None


def _refused(line: object) -> OptionError:
    return OptionError(
        f"blackouts: {line!r} is invalid; expected {FORMS}, or days and hours separated by a space"
    )


def _days(text: str) -> BlackoutWindow:
    if re.fullmatch(r"\d\d-\d\d", text):
        day = date.fromisoformat(f"2000-{text}")  # 2000 is a leap year.
        return BlackoutWindow(yearly=(day.month, day.day))
    if text[:1].isdigit():
        first, dots, last = text.partition("..")
        begin, end = _date(first), _date(last if dots else first)
        if end < begin:
            raise ValueError
        return BlackoutWindow(first=begin, last=end)
    days: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        one, other = WEEKDAYS.index(first), WEEKDAYS.index(last if dash else first)
        days.update(day % 7 for day in range(one, other + 1 if other >= one else other + 8))
    return BlackoutWindow(weekdays=frozenset(days))


def _date(text: str) -> date:
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        raise ValueError
    return date.fromisoformat(text)


def _hours(text: str) -> tuple[int, int] | None:
    """Return the minutes of the beginning and the end; None if the text has no hours."""
    match = re.fullmatch(r"(\d\d):(\d\d)-(\d\d):(\d\d)", text)
    if match is None:
        return None
    begin_hour, begin_minute, end_hour, end_minute = map(int, match.groups())
    begin, end = begin_hour * 60 + begin_minute, end_hour * 60 + end_minute
    if begin >= 1_440 or end > 1_440 or begin_minute > 59 or end_minute > 59:
        return None
    return begin, end if end > begin else end + 1_440
