"""When a cron line comes next."""

from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from .core.durations import to_datetime, to_milliseconds
from .core.errors import OptionError

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


def next_run(expression: str, timezone: str, after_ms: int) -> int | None:
    """The first time of a schedule after a time, both in UTC milliseconds.

    expression: five cron fields, six with the seconds first, or an alias such as `@daily`.
    timezone: an IANA name, as "Europe/Berlin"; where its clocks change, lines of five fields keep to
        what Debian's cron does: a time that is skipped runs as the clock goes on, one that comes
        twice runs once.

    None if no such time comes within fifty years. Raises OptionError, naming the line or the zone.
    """
    zone = parse_timezone(timezone)
    try:
        for moment in _parse(expression, to_datetime(after_ms).astimezone(zone)):
            at = to_milliseconds(moment)
            # Within an hour that comes twice, the line's answer may lie in the first of the two.
            if at > after_ms:
                return at
    except OverflowError:  # the calendar ends with the year 9999
        pass
    return None


def check_expression(expression: str) -> None:
    """Raise OptionError if this is no schedule."""
    _parse(expression, datetime(2000, 1, 1, tzinfo=UTC))


def parse_timezone(name: str) -> tzinfo:
    """The zone of an IANA name. Raises OptionError."""
    if name == "UTC":
        return UTC  # also where no database of time zones is installed
    try:
        return ZoneInfo(name)
    # A folder of the database is an OSError; a name that leads out of it, a ValueError.
    except (KeyError, ValueError, OSError, TypeError):
        raise OptionError(f"timezone: {name!r} is not the name of a time zone") from None


def _parse(expression: str, start: datetime) -> CronSim:
    if not isinstance(expression, str) or len(expression) > LONGEST_LINE:
        raise OptionError(f"schedule: expected a text of up to {LONGEST_LINE} characters")
    line = expression.strip()
    if line.startswith("@"):
        if line.lower() not in ALIASES:
            raise OptionError(f"schedule: {expression!r} is not known; there are {', '.join(ALIASES)}")
        line = ALIASES[line.lower()]
    try:
        return CronSim(line, start)
    except CronSimError as error:
        raise OptionError(f"schedule: {expression!r} is not a cron line: {error}") from None
