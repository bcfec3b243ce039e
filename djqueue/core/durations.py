"""Times as users write them, converted to whole milliseconds."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any

from .errors import OptionError
from .shown import shown

LONGEST = 100 * 365 * 86_400_000
"""A hundred years in milliseconds: the maximum duration, so that no sum exceeds 64 bits."""


def milliseconds(name: str, value: Any) -> int:
    """Return the milliseconds of a duration in seconds (int or float) or as a timedelta.

    Raises OptionError, naming the option, for NaN, infinities, negatives, other types and anything over a
    hundred years.
    """
    if isinstance(value, timedelta):
        seconds: float = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = value
    else:
        raise OptionError(f"{name}: expected seconds or a timedelta, got {shown(value)}")
    if isinstance(seconds, float) and not math.isfinite(seconds):
        raise OptionError(f"{name}: {seconds!r} is not a finite number of seconds")
    if seconds < 0:
        raise OptionError(f"{name}: must not be negative; got {shown(value)}")
    if seconds * 1_000 > LONGEST:
        raise OptionError(f"{name}: must be at most 100 years; got {shown(value)}")
    if isinstance(value, timedelta):
        return -(-value // timedelta(milliseconds=1))
    # 2.007 * 1_000 is a little more than 2007: a part below a microsecond is a rounding error.
    return math.ceil(round(seconds * 1_000, 3)) or int(seconds > 0)


def instant(name: str, value: Any) -> int:
    """Return the UTC milliseconds of an aware datetime given by a user."""
    if not isinstance(value, datetime):
        raise OptionError(f"{name}: expected an aware datetime, got {shown(value)}")
    if value.tzinfo is None or value.utcoffset() is None:
        raise OptionError(f"{name}: {shown(value)} is naive; use a datetime with a time zone")
    return max(0, to_milliseconds(value))


def to_milliseconds(value: datetime) -> int:
    """Return the UTC milliseconds of an aware datetime, exactly."""
    return (value - EPOCH) // timedelta(milliseconds=1)


def to_datetime(value: int) -> datetime:
    """Return the aware datetime, in UTC, of UTC milliseconds."""
    return EPOCH + timedelta(milliseconds=value)


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
