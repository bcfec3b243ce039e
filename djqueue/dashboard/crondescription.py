"""Cron expressions in plain language."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from django.utils.dates import MONTHS, WEEKDAYS
from django.utils.text import capfirst, get_text_list
from django.utils.translation import get_language, ngettext
from django.utils.translation import gettext as _

from djqueue.schedules.expressions import LAST_DAY, LAST_WORKDAY, Fields, fields_of

TIMES = 6
"""Maximum times of a day that are listed one by one."""


def describe(expression: str) -> str:
    """Describe a cron expression.

    Raises:
        OptionError: The expression is not valid; checked before any of it is expanded.
    """
    return _describe(expression, get_language())


@lru_cache(maxsize=1024)
def _describe(expression: str, _language: str | None) -> str:
    fields = fields_of(expression)
    parts = [_time(fields), _day(fields), _month(fields)]
    return str(capfirst(", ".join(filter(None, parts))))


def _time(fields: Fields) -> str:
    seconds, minutes, hours = (sorted(one) for one in (fields.seconds, fields.minutes, fields.hours))
    if seconds != [0]:
        at = ngettext("at second %s", "at seconds %s", len(seconds))
        parts = [_within(seconds, 60, _("every second"), _("every %s seconds"), at)]
        if len(minutes) < 60:
            parts.append(ngettext("in minute %s", "in minutes %s", len(minutes)) % _listed(minutes))
        return ", ".join(parts + _hours(hours))
    if len(minutes) * len(hours) <= TIMES and len(hours) < 24:
        times = [f"{hour:02}:{minute:02}" for hour in hours for minute in minutes]
        return _("at %s") % get_text_list(times, _("and"))
    if minutes == [0] and (step := _step(hours, 24)):
        return _("every hour") if step == 1 else _("every %s hours") % step
    at = ngettext("at minute %s", "at minutes %s", len(minutes))
    parts = [_within(minutes, 60, _("every minute"), _("every %s minutes"), at)]
    return ", ".join(parts + _hours(hours))


def _hours(hours: Sequence[int]) -> list[str]:
    if len(hours) == 24:
        return []
    return [ngettext("in hour %s", "in hours %s", len(hours)) % _listed(hours)]


def _within(values: Sequence[int], all_of: int, every: str, each: str, at: str) -> str:
    step = _step(values, all_of)
    if step:
        return every if step == 1 else each % step
    return at % _listed(values)


def _step(values: Sequence[int], all_of: int) -> int:
    """Return the step of values that repeat forever, such as those of `*/5`; 0 if there is none."""
    steps = {later - earlier for earlier, later in pairwise([*values, values[0] + all_of])}
    return steps.pop() if len(steps) == 1 and values[0] == 0 and len(values) > 1 else 0


def _day(fields: Fields) -> str:
    is_any_day, is_any_weekday = len(fields.days) == 31, len(fields.weekdays) == 7
    days, weekdays = _days(fields.days), _weekdays(fields.weekdays)
    if is_any_day and is_any_weekday:
        return _("every day") if len(fields.hours) < 24 else ""
    # Either field may match, so if one allows any day, every day matches.
    if not fields.is_both and (is_any_day or is_any_weekday):
        return _("every day")
    if is_any_weekday:
        return days
    if is_any_day:
        return weekdays
    if fields.is_both:
        return _("%(days)s if that is %(weekdays)s") % {"days": days, "weekdays": weekdays}
    return _("%(days)s, or %(weekdays)s") % {"days": days, "weekdays": weekdays}


def _days(days: Iterable[int]) -> str:
    named = {LAST_DAY: _("on the last day of the month"), LAST_WORKDAY: _("on the last workday of the month")}
    plain = sorted(set(days) - named.keys())
    day = ngettext("on day %s of the month", "on days %s of the month", len(plain))
    parts = [day % _listed(plain)] if plain else []
    parts += [text for day, text in named.items() if day in days]
    return get_text_list(parts, _("and"))


def _weekdays(weekdays: Iterable[int | tuple[int, int]]) -> str:
    # Weeks start on Monday.
    plain = sorted((one + 6) % 7 for one in weekdays if isinstance(one, int))
    parts = [_("on %s") % _listed(plain, [str(WEEKDAYS[day]) for day in range(7)])] if plain else []
    for day, which in sorted(one for one in weekdays if isinstance(one, tuple)):
        name = WEEKDAYS[(day + 6) % 7]
        if which == LAST_DAY:
            parts.append(_("on the last %(weekday)s of the month") % {"weekday": name})
        else:
            text = _("on %(weekday)s no. %(number)d of the month")
            parts.append(text % {"weekday": name, "number": which})
    return get_text_list(parts, _("and"))


def _month(fields: Fields) -> str:
    months = sorted(fields.months)
    if len(months) == 12:
        return ""
    return _("in %s") % _listed(months, ["", *(str(MONTHS[month]) for month in range(1, 13))])


def _listed(values: Sequence[int], names: Sequence[str] = ()) -> str:
    """Return values as text, with three or more in a row as a range."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][-1] == value - 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    parts: list[str] = []
    for run in runs:
        shown = [names[value] if names else str(value) for value in run]
        if len(run) > 2:
            shown = [_("%(first)s to %(last)s") % {"first": shown[0], "last": shown[-1]}]
        parts += shown
    return get_text_list(parts, _("and"))
