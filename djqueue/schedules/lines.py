"""When a cron line comes next."""

from collections.abc import Iterator
from datetime import datetime, tzinfo
from functools import lru_cache
from typing import NamedTuple

from cronsim import CronSim, CronSimError

from djqueue.core.errors import OptionError

from .zones import SECOND, START, instant, local_time, next_change, offset, parse_timezone

ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
LONGEST_LINE = 200
"""Characters: a line of someone else's making must not cost more than it is worth to read."""
ANY_DAY = START.replace(year=2000)


LAST_DAY, LAST_WORKDAY = CronSim.LAST, CronSim.LAST_WEEKDAY
"""Among the days of a line: the last one of each month, and the last from Monday to Friday."""


class Fields(NamedTuple):
    """The values that a line allows."""

    seconds: frozenset[int]
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    """Of the month; or `LAST_DAY`, or `LAST_WORKDAY`."""
    months: frozenset[int]
    weekdays: frozenset[int | tuple[int, int]]
    """0 is Sunday; (1, 2) is the second Monday of a month, (1, `LAST_DAY`) the last."""
    is_both: bool
    """Whether a day must be among the days and the weekdays; else one of them is enough."""


def next_run(expression: str, timezone: str, after_ms: int) -> int | None:
    """The first time of a cron line after a time, both in UTC milliseconds.

    expression: five cron fields, six with the seconds first, or an alias such as `@daily`.
    timezone: an IANA name, as "Europe/Berlin". Where its clocks change, each local time runs once: one
        that is skipped as the clocks go on, one that comes twice when it comes first. A line for every
        hour goes by what the clocks show instead: an hour that comes twice is two hours of it.

    None if no such time comes within fifty years. Raises OptionError, naming the line or the zone.
    """
    line, is_of_every_hour = read_line(expression)
    zone = parse_timezone(timezone)
    find = _as_shown if is_of_every_hour else _once_each
    try:
        at = find(line, zone, after_ms // 1_000)
    except (OverflowError, ValueError):  # the calendar ends with the year 9999
        return None
    return None if at is None else at * 1_000


def check_expression(expression: str) -> None:
    """Raise OptionError if this is no schedule."""
    read_line(expression)


def fields_of(expression: str) -> Fields:
    """What a line says, field by field. Raises OptionError."""
    line, _ = read_line(expression)
    parsed = CronSim(line, ANY_DAY)
    return Fields(
        frozenset(parsed.seconds),
        frozenset(parsed.minutes),
        frozenset(parsed.hours),
        frozenset(parsed.days),
        frozenset(parsed.months),
        frozenset(_weekday(one) for one in parsed.weekdays),
        parsed.day_and,
    )


def _weekday(one: int | tuple[int, int]) -> int | tuple[int, int]:
    return one % 7 if isinstance(one, int) else (one[0] % 7, one[1])


@lru_cache(maxsize=1024)
def read_line(expression: str) -> tuple[str, bool]:
    """The fields of a line or an alias, and whether it is of every hour. Raises OptionError."""
    if not isinstance(expression, str) or len(expression) > LONGEST_LINE:
        raise OptionError(f"schedule: expected a text of up to {LONGEST_LINE} characters")
    line = expression.strip()
    if line.startswith("@"):
        if line.lower() not in ALIASES:
            raise OptionError(f"schedule: {expression!r} is not known; there are {', '.join(ALIASES)}")
        line = ALIASES[line.lower()]
    try:
        return line, len(CronSim(line, ANY_DAY).hours) == 24
    except CronSimError as error:
        raise OptionError(f"schedule: {expression!r} is not a cron line: {error}") from None


def _once_each(line: str, zone: tzinfo, after: int) -> int | None:
    for local in _times(line, local_time(zone, after)):
        at = instant(zone, local)
        # Within an hour that comes twice, the line's answer may lie in the first of the two.
        if at > after:
            return at
    return None


def _as_shown(line: str, zone: tzinfo, after: int) -> int | None:
    known, ahead = after, offset(zone, after)
    while True:
        local = next(_times(line, START + (after + ahead) * SECOND), None)
        if local is None:
            return None
        at = (local - START) // SECOND - ahead
        change = next_change(zone, known, at)
        if change is None:
            return at
        # The clocks are set before that, and show something else from there on.
        known, ahead, after = change, offset(zone, change), change - 1


def _times(line: str, after: datetime) -> Iterator[datetime]:
    return CronSim(line, after)
