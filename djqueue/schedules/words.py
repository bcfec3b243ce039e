"""Schedules as users write them in code."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from djqueue.core.errors import OptionError
from djqueue.core.suggest import FOREIGN_TIMES, nearest
from djqueue.core.units import instant, milliseconds

from .schedule import Schedule


def parse_schedule(given: Mapping[str, Any]) -> Schedule:
    """Return the schedule that options of `@job` describe.

    Raises:
        OptionError: An option is invalid. The message names it.
    """
    values = {}
    for name, value in given.items():
        if name not in PARSERS:
            meant = FOREIGN_TIMES.get(name)
            hint = f"; did you mean {meant!r}?" if meant else nearest(name, PARSERS)
            raise OptionError(f"unknown option {name!r}{hint}")
        values[name] = PARSERS[name](name, value)
    schedule = Schedule(**{name: value for name, value in values.items() if value is not None})
    for name, problem in schedule.problems().items():
        raise OptionError(f"{name}: {problem}")
    return schedule


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise OptionError(f"{name}: expected a string, got {value!r}")
    return value


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value >= 2**31:
        raise OptionError(f"{name}: expected a whole number, got {value!r}")
    return value


def _lines(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise OptionError(f"{name}: expected a list of strings, got {value!r}")
    return tuple(_text(name, line) for line in value)


def _optional(parse: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else parse(name, value)


PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "cron": _optional(_text),
    "every": _optional(milliseconds),
    "timezone": _text,
    "start_at": _optional(instant),
    "end_at": _optional(instant),
    "max_executions": _optional(_count),
    "jitter": milliseconds,
    "overlap": _text,
    "missed": _text,
    "missed_window": milliseconds,
    "blackouts": _lines,
    "on_blackout": _text,
}
