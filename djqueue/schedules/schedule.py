"""A schedule and its slots, the times at which it enqueues one job each.

`parse_schedule` reads a schedule from the options of `@job`; `plan` says which of its slots are due now.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

from djqueue.core.errors import OptionError
from djqueue.core.suggest import FOREIGN_TIMES, nearest
from djqueue.core.units import MAX_DURATION, instant, milliseconds

from .blackouts import blackout_begin, blackout_end, parse_blackouts
from .expressions import next_run, read_line
from .zones import parse_timezone

Overlap = Literal["allow", "skip", "one_pending"]
OVERLAP: tuple[str, ...] = get_args(Overlap)
Missed = Literal["skip", "one", "all"]
MISSED: tuple[str, ...] = get_args(Missed)
OnBlackout = Literal["skip", "put_off"]
ON_BLACKOUT: tuple[str, ...] = get_args(OnBlackout)
DAY = 86_400_000
SHORTEST = 1_000
"""Minimum milliseconds of an interval: schedulers check about once a second."""
MAX_BLACKOUTS = 1_000
"""Maximum number of consecutive blackouts that the search for a slot skips."""
SAMPLE = 32
"""Number of slots from which the shortest time between two is determined."""
LONG_AGO = 946_684_800_000
"""The year 2000, so that a schedule is valid or invalid independently of the current time."""
LATE = 60_000
"""Milliseconds by which a slot may be late and is still in time, and not missed."""
AT_ONCE = 100
"""Slots of one plan; the rest is left to the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The times at which a job is enqueued repeatedly. Times are UTC milliseconds, durations milliseconds."""

    cron: str = ""
    """Five or six cron fields, or an alias; empty if there is an interval."""
    every: int | None = None
    """An interval, counted from `start_at` or else from 1970, so that slots do not drift."""
    timezone: str = "UTC"
    start_at: int | None = None
    """Earliest time of a slot."""
    end_at: int | None = None
    """Latest time of a slot."""
    max_executions: int | None = None
    """Number of jobs after which the schedule ends."""
    jitter: int = 0
    """Maximum delay of a job after its slot."""
    overlap: str = "allow"
    """While a job is unfinished: `allow` the next | `skip` it | `one_pending`: skip it if one is waiting."""
    missed: str = "one"
    """For slots that passed while no scheduler ran: `skip` | enqueue `one` job | `all` within the window."""
    missed_window: int = DAY
    blackouts: tuple[str, ...] = ()
    """Days and hours without runs; see `blackouts`."""
    on_blackout: str = "skip"
    """For a slot within a blackout: `skip` | `put_off` to the end of the blackout."""

    def next_slot(self, after: int) -> int | None:
        """Return the first slot after a time; None if there is none.

        Slots postponed to the same time are one slot.

        Raises:
            OptionError: The schedule is invalid.
        """
        if self.start_at is not None:
            after = max(after, self.start_at - 1)
        windows, zone = parse_blackouts(self.blackouts), parse_timezone(self.timezone)
        raw = after
        if windows and self.on_blackout == "put_off":
            # An earlier slot may have been postponed to a later time.
            begin = blackout_begin(windows, zone, after // 1_000 + 1) * 1_000
            raw = min(after, max(begin - 1, self.start_at - 1 if self.start_at is not None else begin - 1))
        for _ in range(MAX_BLACKOUTS):
            time = self._next_time(raw)
            if time is None:
                return None
            raw = time
            end = blackout_end(windows, zone, raw // 1_000) if windows else None
            if windows and end is None:
                return None
            slot = raw if end is None or end * 1_000 <= raw else end * 1_000
            if slot > after and (slot == raw or self.on_blackout == "put_off"):
                return None if self.end_at is not None and slot > self.end_at else slot
            if slot != raw:
                raw = slot - 1
        return None

    def fires_at(self, slot: int, name: str) -> int:
        """Return when the job of a slot is enqueued: the slot plus a constant part of the jitter."""
        if not self.jitter:
            return slot
        digest = hashlib.sha256(f"{name}:{slot}".encode("utf-8", "surrogatepass")).digest()
        return slot + int.from_bytes(digest[:8]) % (self.jitter + 1)

    def problems(self) -> dict[str, str]:
        """Return the problems of the schedule by field."""
        problems: dict[str, str] = {}
        for field, check in CHECKS.items():
            try:
                check(self)
            except OptionError as error:
                problems[field] = str(error).partition(": ")[2]
        if not problems:
            problems.update(self._without_slots())
        if not problems and self.jitter and self.jitter > (shortest := self._shortest_interval()):
            problems["jitter"] = f"is longer than the {shortest / 1_000:g} seconds between two runs"
        return problems

    def _next_time(self, after: int) -> int | None:
        if self.every is None:
            return next_run(self.cron, self.timezone, after)
        anchor = self.start_at or 0
        return anchor + max(0, (after - anchor) // self.every + 1) * self.every

    def _without_slots(self) -> dict[str, str]:
        since = LONG_AGO if self.start_at is None else self.start_at - 1
        if self.next_slot(since) is not None:
            return {}
        first = self._next_time(since)
        if first is None:
            return {"cron": "has no run within fifty years"}
        if self.end_at is not None and first > self.end_at:
            return {"end_at": "is before the first run"}
        return {"blackouts": "every run of the schedule is in a blackout"}

    def _shortest_interval(self) -> int:
        since = LONG_AGO if self.start_at is None else self.start_at - 1
        slots: list[int] = []
        while len(slots) < SAMPLE and (slot := self.next_slot(since)) is not None:
            slots.append(slot)
            since = slot
        return min((later - earlier for earlier, later in pairwise(slots)), default=MAX_DURATION)


def parse_schedule(given: Mapping[str, Any]) -> Schedule:
    """Return the schedule that options of `@job` describe.

    Raises:
        OptionError: An option is invalid. The message names it.
    """
    values = {}
    for name, value in given.items():
        if name not in SCHEDULE_PARSERS:
            meant = FOREIGN_TIMES.get(name)
            hint = f"; did you mean {meant!r}?" if meant else nearest(name, SCHEDULE_PARSERS)
            raise OptionError(f"unknown option {name!r}{hint}")
        values[name] = SCHEDULE_PARSERS[name](name, value)
    schedule = Schedule(**{name: value for name, value in values.items() if value is not None})
    for name, problem in schedule.problems().items():
        raise OptionError(f"{name}: {problem}")
    return schedule


class SlotPlan(NamedTuple):
    """The slots to enqueue, oldest first, and the first that is not dealt with by that."""

    slots: tuple[int, ...]
    following: int | None


def plan(schedule: Schedule, name: str, slot: int, now: int) -> SlotPlan | None:
    """Return the plan for a schedule with this next slot; None if it is not due yet.

    If the slot was missed, `Schedule.missed` decides about it and about all later missed slots.
    """
    late = now - schedule.fires_at(slot, name)
    if late < 0:
        return None
    if late > LATE and schedule.missed == "one":
        return SlotPlan((slot,), _first(schedule, name, slot, now + 1))
    following: int | None = slot
    if late > LATE:
        window = schedule.missed_window if schedule.missed == "all" else 0
        following = _first(schedule, name, slot, now - max(window, LATE))
    due: list[int] = []
    while following is not None and schedule.fires_at(following, name) <= now and len(due) < AT_ONCE:
        due.append(following)
        following = schedule.next_slot(following)
    return SlotPlan(tuple(due), following)


def _cron(schedule: Schedule) -> None:
    if schedule.every is None and not schedule.cron:
        raise OptionError("cron: enter a cron expression or an interval (every)")
    if schedule.every is not None and schedule.cron:
        raise OptionError("cron: enter a cron expression or an interval (every), not both")
    if schedule.cron:
        read_line(schedule.cron)


def _every(schedule: Schedule) -> None:
    if schedule.every is not None:
        _within("every", schedule.every, SHORTEST)


def _end_at(schedule: Schedule) -> None:
    if schedule.end_at is not None and schedule.start_at is not None and schedule.end_at <= schedule.start_at:
        raise OptionError("end_at: must be later than start_at")


def _max_executions(schedule: Schedule) -> None:
    if schedule.max_executions is not None and schedule.max_executions < 1:
        raise OptionError(f"max_executions: must be at least 1; got {schedule.max_executions}")


def _choice(field: str, choices: tuple[str, ...], value: str) -> None:
    if value not in choices:
        raise OptionError(f"{field}: {value!r} is not one of {', '.join(choices)}")


def _within(field: str, value: int, minimum: int) -> None:
    if not minimum <= value <= MAX_DURATION:
        raise OptionError(f"{field}: must be between {minimum / 1_000:g} s and a hundred years")


CHECKS: dict[str, Callable[[Schedule], object]] = {
    "cron": _cron,
    "every": _every,
    "timezone": lambda schedule: parse_timezone(schedule.timezone),
    "end_at": _end_at,
    "max_executions": _max_executions,
    "jitter": lambda schedule: _within("jitter", schedule.jitter, 0),
    "overlap": lambda schedule: _choice("overlap", OVERLAP, schedule.overlap),
    "missed": lambda schedule: _choice("missed", MISSED, schedule.missed),
    "missed_window": lambda schedule: _within("missed_window", schedule.missed_window, SHORTEST),
    "blackouts": lambda schedule: parse_blackouts(schedule.blackouts),
    "on_blackout": lambda schedule: _choice("on_blackout", ON_BLACKOUT, schedule.on_blackout),
}


def _first(schedule: Schedule, name: str, slot: int, earliest: int) -> int | None:
    """Return the first slot, from this one on, whose job is not to be enqueued before a time."""
    first: int | None = slot
    while first is not None and schedule.fires_at(first, name) < earliest:
        first = schedule.next_slot(max(first, earliest - schedule.jitter - 1))
    return first


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


SCHEDULE_PARSERS: dict[str, Callable[[str, Any], Any]] = {
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
