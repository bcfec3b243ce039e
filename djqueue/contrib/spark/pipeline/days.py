"""Days and hours as commands and functions take them: UTC, the first included, the last not."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta

from djqueue.core.errors import OptionError


def days(since: date, until: date) -> Iterator[date]:
    """Each day from one to before another. Raises OptionError if there is none."""
    if until <= since:
        raise OptionError(
            f"the range from {since} until {until} contains no day; until is the day after the last one"
        )
    for number in range((until - since).days):
        yield since + timedelta(days=number)


def midnight(day: date) -> datetime:
    """The begin of a day."""
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def whole_hour(at: datetime) -> datetime:
    """The begin of the hour in which a time lies."""
    return at.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
