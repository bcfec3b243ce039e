"""Durations as text."""

from django.utils.formats import number_format
from django.utils.translation import gettext as _

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000


def shown(milliseconds: float) -> str:
    """Return a duration in a suitable unit: 3 ms, 1.2 s, 4 min, 2.5 h, 3 d."""
    size = abs(milliseconds)
    if size < SECOND:
        return _("%s ms") % _number(milliseconds, 1)
    if size < 2 * MINUTE:
        return _("%s s") % _number(milliseconds, SECOND)
    if size < 2 * HOUR:
        return _("%s min") % _number(milliseconds, MINUTE)
    if size < 2 * DAY:
        return _("%s h") % _number(milliseconds, HOUR)
    return _("%s d") % _number(milliseconds, DAY)


def exact(milliseconds: int) -> str:
    """Return a duration in the largest unit of which it is a whole multiple: 30 s, 90 s, 1 h."""
    units = ((DAY, _("%s d")), (HOUR, _("%s h")), (MINUTE, _("%s min")), (SECOND, _("%s s")))
    for unit, text in units:
        if milliseconds and milliseconds % unit == 0:
            return text % number_format(milliseconds // unit)
    return _("%s ms") % number_format(milliseconds)


def _number(milliseconds: float, unit: int) -> str:
    value = milliseconds / unit
    places = 1 if abs(value) < 10 and unit > 1 and value != int(value) else 0
    return number_format(round(value, places), decimal_pos=places)
