"""Durations, times and sizes, as users write them, converted to whole milliseconds and bytes."""

import math
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

from .errors import OptionError
from .messages import shown

MAX_DURATION = 100 * 365 * 86_400_000
"""A hundred years in milliseconds: the maximum duration, so that no sum exceeds 64 bits."""


LATEST = 253_339_228_799_999
"""The last millisecond of the year 9997, in UTC milliseconds: later times overflow in some time zone, or when
something is added.
"""


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
    if seconds * 1_000 > MAX_DURATION:
        raise OptionError(f"{name}: must be at most 100 years; got {shown(value)}")
    if isinstance(value, timedelta):
        return -(-value // timedelta(milliseconds=1))
    # 2.007 * 1_000 is a little more than 2007: a part below a microsecond is a rounding error.
    return math.ceil(round(seconds * 1_000, 3)) or int(seconds > 0)


def positive_milliseconds(name: str, value: Any) -> int:
    """Return the milliseconds of a duration, as `milliseconds` does. Raises OptionError for 0, too."""
    duration = milliseconds(name, value)
    if not duration:
        raise OptionError(f"{name}: must be positive; got {shown(value)}")
    return duration


class NaiveTimes:
    """The meaning of datetimes without a time zone, which the project defines."""

    zone: Callable[[], tzinfo | None] | None = None
    """Returns the time zone that they are in; None if they are refused."""


def instant(name: str, value: Any) -> int:
    """Return the UTC milliseconds of a datetime given by a user; 0 for times before 1970."""
    if not isinstance(value, datetime):
        raise OptionError(f"{name}: expected an aware datetime, got {shown(value)}")
    if value.utcoffset() is None:
        zone = NaiveTimes.zone() if NaiveTimes.zone is not None else None
        if zone is None:
            raise OptionError(f"{name}: {shown(value)} is naive; use a datetime with a time zone")
        value = value.replace(tzinfo=zone)
    at = to_milliseconds(value)
    if at > LATEST:
        raise OptionError(f"{name}: must be before the year 9998; got {shown(value)}")
    return max(0, at)


def to_milliseconds(value: datetime) -> int:
    """Return the UTC milliseconds of an aware datetime, exactly."""
    return (value - EPOCH) // timedelta(milliseconds=1)


def to_datetime(value: int) -> datetime:
    """Return the aware datetime, in UTC, of UTC milliseconds."""
    return EPOCH + timedelta(milliseconds=value)


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
WRITTEN = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")
MAX_SIZE = 2**53
"""Maximum in bytes that Lua counts exactly: eight pebibytes."""


def parse_size(name: str, value: Any) -> int:
    """Return the bytes of a whole number or a string such as `"500 MB"` or `"1.5 GiB"`.

    Raises OptionError, naming the option, for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (written := WRITTEN.fullmatch(value)) is not None:
        number, unit = written[1].replace("_", ""), UNITS.get(written[2].lower())
        if unit is None:
            raise OptionError(
                f"{name}: unknown unit {written[2]!r}; use B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
            )
        size = int(number) * unit if number.isdecimal() else round(float(number) * unit)
    else:
        raise OptionError(f"{name}: expected a number of bytes or a string such as '500 MB', got {value!r}")
    if not 0 <= size <= MAX_SIZE:
        raise OptionError(f"{name}: must be from 0 to {MAX_SIZE} bytes; got {value!r}")
    return size
