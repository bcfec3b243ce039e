"""Conversion between local times and instants, including clock changes.

Instants are whole UTC seconds since 1970; local times are naive datetimes.
"""

from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

from djqueue.core.errors import OptionError

DAY = 86_400
SECOND = timedelta(seconds=1)
START = datetime(1970, 1, 1)  # noqa: DTZ001 - a local time


def parse_timezone(name: str) -> tzinfo:
    """Return the zone of an IANA name. Raises OptionError."""
    if name == "UTC":
        return UTC  # Works without a database of time zones.
    try:
        return ZoneInfo(name)
    # OSError: a folder of the database; ValueError: a path outside of it.
    except (KeyError, ValueError, OSError, TypeError):
        raise OptionError(f"timezone: {name!r} is not the name of a time zone") from None


def offset(zone: tzinfo, at: int) -> int:
    """Return the seconds by which a zone is ahead of UTC."""
    ahead = datetime.fromtimestamp(at, zone).utcoffset()
    assert ahead is not None
    return int(ahead.total_seconds())


def local_time(zone: tzinfo, at: int) -> datetime:
    """Return the local time of an instant."""
    return START + timedelta(seconds=at + offset(zone, at))


def instant(zone: tzinfo, local: datetime, after: int | None = None) -> int:
    """Return the instant of a local time.

    A skipped local time is the instant of the clock change. A repeated one is the first instant, or the
    second if the first is not later than `after`.
    """
    shown = (local - START) // SECOND
    before, behind = (_assumed(zone, local, fold) for fold in (0, 1))
    first = shown - before
    if before == behind:
        return first
    if before > behind:  # The local time is repeated.
        return shown - behind if after is not None and first <= after else first
    change = next_change(zone, shown - behind, first)
    assert change is not None
    return change


def next_change(zone: tzinfo, after: int, until: int) -> int | None:
    """Return the first instant after `after` and not after `until` at which the offset changes; else None."""
    ahead = offset(zone, after)
    low = after
    while low < until:
        high = min(low + DAY, until)
        if offset(zone, high) != ahead:
            while high - low > 1:
                middle = (low + high) // 2
                if offset(zone, middle) == ahead:
                    low = middle
                else:
                    high = middle
            return high
        low = high
    return None


def _assumed(zone: tzinfo, local: datetime, fold: int) -> int:
    ahead = local.replace(tzinfo=zone, fold=fold).utcoffset()
    assert ahead is not None
    return int(ahead.total_seconds())
