"""Local times and instants: where clocks are set forward or back, the two are not one to one.

Instants are whole UTC seconds since 1970; local times are naive datetimes.
"""

from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

from djqueue.core.errors import OptionError

DAY = 86_400
SECOND = timedelta(seconds=1)
START = datetime(1970, 1, 1)  # noqa: DTZ001 - a local time


def parse_timezone(name: str) -> tzinfo:
    """The zone of an IANA name. Raises OptionError."""
    if name == "UTC":
        return UTC  # also where no database of time zones is installed
    try:
        return ZoneInfo(name)
    # A folder of the database is an OSError; a name that leads out of it, a ValueError.
    except (KeyError, ValueError, OSError, TypeError):
        raise OptionError(f"timezone: {name!r} is not the name of a time zone") from None


def offset(zone: tzinfo, at: int) -> int:
    """Seconds by which the zone's clocks are ahead of UTC."""
    ahead = datetime.fromtimestamp(at, zone).utcoffset()
    assert ahead is not None
    return int(ahead.total_seconds())


def local_time(zone: tzinfo, at: int) -> datetime:
    """What the zone's clocks show."""
    return START + timedelta(seconds=at + offset(zone, at))


def instant(zone: tzinfo, local: datetime, after: int | None = None) -> int:
    """When the clocks show a local time.

    One that is skipped is the moment at which the clocks go on; of one that comes twice the first is
    meant, or the second if the first is not later than `after`.
    """
    shown = (local - START) // SECOND
    before, behind = (_assumed(zone, local, fold) for fold in (0, 1))
    first = shown - before
    if before == behind:
        return first
    if before > behind:  # twice
        return shown - behind if after is not None and first <= after else first
    change = next_change(zone, shown - behind, first)
    assert change is not None
    return change


def next_change(zone: tzinfo, after: int, until: int) -> int | None:
    """The first instant, later than `after` and not later than `until`, with another offset than before."""
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
