"""The next time of a cron expression."""

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
MAX_LENGTH = 200
"""Maximum characters of an expression, so that untrusted ones are cheap to parse."""
ANY_DAY = START.replace(year=2000)


LAST_DAY, LAST_WORKDAY = CronSim.LAST, CronSim.LAST_WEEKDAY
"""Days of an expression: the last one of each month, and the last from Monday to Friday."""


class Fields(NamedTuple):
    """The values that an expression allows."""

    seconds: frozenset[int]
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    """Days of the month, `LAST_DAY` or `LAST_WORKDAY`."""
    months: frozenset[int]
    weekdays: frozenset[int | tuple[int, int]]
    """0 is Sunday; (1, 2) is the second Monday of a month, (1, `LAST_DAY`) the last."""
    is_both: bool
    """Whether a date must match both the days and the weekdays; otherwise either is enough."""


def next_run(expression: str, timezone: str, after_ms: int) -> int | None:
    """Return the first time of a cron expression after a time, both in UTC milliseconds.

    Args:
        expression: Five cron fields, six with the seconds first, or an alias such as `@daily`.
        timezone: An IANA name, such as "Europe/Berlin". When its clocks change, each local time runs once: a
            skipped one at the change, a repeated one the first time. An expression for every hour follows the
            clock instead, and runs in both hours of a repeated one.

    Returns:
        None if there is no such time within fifty years.

    Raises:
        OptionError: The expression or the time zone is invalid.
    """
    line, is_of_every_hour = read_line(expression)
    zone = parse_timezone(timezone)
    find = _as_shown if is_of_every_hour else _once_each
    try:
        at = find(line, zone, after_ms // 1_000)
    except (OverflowError, ValueError):  # After the year 9999.
        return None
    return None if at is None else at * 1_000


def check_expression(expression: str) -> None:
    """Raise OptionError if an expression is invalid."""
    read_line(expression)


def fields_of(expression: str) -> Fields:
    """Return the parsed fields of an expression. Raises OptionError."""
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
    """Return the expression without aliases, and whether every hour matches. Raises OptionError."""
    if not isinstance(expression, str) or len(expression) > MAX_LENGTH:
        raise OptionError(f"schedule: expected a string of at most {MAX_LENGTH} characters")
    line = expression.strip()
    if line.startswith("@"):
        if line.lower() not in ALIASES:
            raise OptionError(f"schedule: unknown alias {expression!r}; expected one of {', '.join(ALIASES)}")
        line = ALIASES[line.lower()]
    try:
        return line, len(CronSim(line, ANY_DAY).hours) == 24
    except CronSimError as error:
        raise OptionError(f"schedule: {expression!r} is not a valid cron expression: {error}") from None


def _once_each(line: str, zone: tzinfo, after: int) -> int | None:
    for local in _times(line, local_time(zone, after)):
        at = instant(zone, local)
        # Within a repeated hour, the answer may lie in the first of the two.
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
        # The clocks change before that time, so search again from the change.
        known, ahead, after = change, offset(zone, change), change - 1


def _times(line: str, after: datetime) -> Iterator[datetime]:
    return CronSim(line, after)
