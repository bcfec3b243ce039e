"""Slots of schedules: intervals, limits, jitter, blackouts, and missed runs."""

import time
from datetime import UTC, datetime
from functools import cache
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djqueue.core.errors import OptionError
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.schedules import Schedule
from djqueue.schedules.blackouts import parse_blackouts
from djqueue.schedules.schedule import AT_ONCE, LATE, plan

MINUTE = 60_000
HOUR = 60 * MINUTE
START = to_milliseconds(datetime(2026, 10, 24, tzinfo=UTC))
"""A Saturday; in the night that follows, Berlin's clocks are set back."""


def slots(schedule: Schedule, after: int, until: int) -> list[int]:
    found: list[int] = []
    slot = schedule.next_slot(after)
    while slot is not None and slot <= until:
        found.append(slot)
        slot = schedule.next_slot(slot)
    return found


def shown(schedule: Schedule, days: int = 1, zone: str = "UTC") -> list[str]:
    """The slots of some days, as that zone's clocks show them."""
    times = (
        to_datetime(slot).astimezone(ZoneInfo(zone))
        for slot in slots(schedule, START - 1, START + days * 24 * HOUR - 1)
    )
    return [f"{time:%d %H:%M}" for time in times]


# Intervals and limits.


def test_interval_slots_count_from_1970_by_default() -> None:
    schedule = Schedule(every=7_000)
    assert [schedule.next_slot(after) for after in (0, 6_999, 7_000, 7_001)] == [7_000, 7_000, 14_000, 14_000]


def test_interval_slots_count_from_start_at() -> None:
    schedule = Schedule(every=7_000, start_at=3_500)
    assert slots(schedule, 0, 20_000) == [3_500, 10_500, 17_500]


@given(st.integers(1_000, 10**9), st.integers(0, 10**12), st.integers(0, 10**12))
def test_interval_slots_do_not_drift(every: int, start: int, after: int) -> None:
    slot = Schedule(every=every, start_at=start).next_slot(after)
    assert slot is not None
    assert (slot - start) % every == 0
    assert max(after, start - 1) < slot <= max(after, start - 1) + every


def test_slots_include_start_at_and_end_at() -> None:
    schedule = Schedule(cron="0 * * * *", start_at=START + HOUR, end_at=START + 3 * HOUR)
    assert slots(schedule, 0, START + 9 * HOUR) == [START + number * HOUR for number in (1, 2, 3)]


def test_jitter_is_stable_and_differs_by_slot_and_name() -> None:
    schedule = Schedule(every=HOUR, jitter=HOUR)
    shares = {
        (name, slot): schedule.fires_at(slot, name) - slot
        for name in "ab"
        for slot in range(0, 50 * HOUR, HOUR)
    }
    assert all(0 <= share <= HOUR for share in shares.values())
    assert len(set(shares.values())) > 90
    assert shares == {key: schedule.fires_at(key[1], key[0]) - key[1] for key in shares}
    assert Schedule(every=HOUR).fires_at(5, "a") == 5


# Blackouts.


@pytest.mark.parametrize(
    ("windows", "left"),
    [
        (["08:00-20:00"], [0, 4, 20]),
        (["20:00-08:00"], [8, 12, 16]),
        (["sat 00:00-12:00"], [12, 16, 20]),
        (["fri 22:00-06:00"], [8, 12, 16, 20]),
        (["mon-fri"], [0, 4, 8, 12, 16, 20]),
        (["fri-sun"], []),
        (["sat-mon"], []),
        (["sun-fri"], [0, 4, 8, 12, 16, 20]),
        (["2026-10-24"], []),
        (["2026-10-20..2026-10-23", "10-24 08:00-24:00"], [0, 4]),
        (["12-24", "02-29"], [0, 4, 8, 12, 16, 20]),
        (["00:00-08:01", "08:00-16:00", "15:00-17:00"], [20]),
        (["2026-10-23 23:00-04:00"], [4, 8, 12, 16, 20]),
    ],
)
def test_slots_in_a_blackout_are_skipped(windows: list[str], left: list[int]) -> None:
    schedule = Schedule(cron="0 */4 * * *", blackouts=tuple(windows))
    assert shown(schedule) == [f"24 {hour:02}:00" for hour in left]


def test_slots_in_a_blackout_are_postponed_to_one_slot_at_its_end() -> None:
    schedule = Schedule(cron="0 */4 * * *", blackouts=("07:30-17:15",), on_blackout="put_off")
    assert shown(schedule) == ["24 00:00", "24 04:00", "24 17:15", "24 20:00"]
    asked_within = schedule.next_slot(START + 10 * HOUR)
    assert asked_within == START + 17 * HOUR + 15 * MINUTE
    assert schedule.next_slot(START + 16 * HOUR + 1) == asked_within


def test_slot_at_the_end_of_a_blackout_is_not_doubled_by_postponed_slots() -> None:
    schedule = Schedule(cron="0 */4 * * *", blackouts=("01:00-08:00",), on_blackout="put_off")
    assert shown(schedule) == ["24 00:00", "24 08:00", "24 12:00", "24 16:00", "24 20:00"]


def test_blackout_without_slots_postpones_nothing() -> None:
    schedule = Schedule(cron="0 0 * * *", blackouts=("01:00-08:00",), on_blackout="put_off")
    assert shown(schedule, days=2) == ["24 00:00", "25 00:00"]
    assert schedule.next_slot(START + 2 * HOUR) == START + 24 * HOUR


def test_blackouts_follow_the_local_time_of_the_zone() -> None:
    schedule = Schedule(
        cron="*/30 1-3 * * *", timezone="Europe/Berlin", blackouts=("02:15-03:00",), on_blackout="put_off"
    )
    # Berlin's 25th has 02:00 to 03:00 twice; at the second 02:00 it is over for a quarter of an hour.
    assert shown(schedule, 2, "Europe/Berlin") == [
        *("24 02:00", "24 03:00", "24 03:30"),
        *("25 01:00", "25 01:30", "25 02:00", "25 02:00", "25 03:00", "25 03:30"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        *("", " ", "noon", "mon,", "mon-", "sat sun", "x" * 101),
        *("2026-13-01", "2026-1-1", "2026-12-24..", "2026-12-24..2026-12-23", "02-30", "13-01"),
        *("25:00-26:00", "10:00", "10:60-11:00", "09:00 - 17:00", "mon 10:00-11:00 tue"),
    ],
)
def test_invalid_blackout_is_rejected_with_its_text(line: str) -> None:
    with pytest.raises(OptionError, match=r"^blackouts: ") as refused:
        parse_blackouts((line,))
    assert repr(line) in str(refused.value)


def test_too_many_blackouts_are_rejected() -> None:
    with pytest.raises(OptionError, match="201 windows"):
        parse_blackouts(("sat",) * 201)


WINDOWS = [
    *("22:00-06:00", "12:00-13:30", "01:20-01:50", "02:15-03:00", "sun"),
    *("sat 10:00-24:00", "2026-10-26..2026-10-27", "mon 23:00-01:00"),
]
DAYS = 18
"""Berlin's clocks are set on the second of them, New York's on the ninth."""


@cache
def blacked_out(zone: str) -> list[frozenset[str]]:
    """Read anew, minute by minute: the windows that are on."""
    found = []
    for number in range(DAYS * 24 * 60):
        local = to_datetime(START + number * MINUTE).astimezone(ZoneInfo(zone))
        minute, today = local.hour * 60 + local.minute, local.weekday()
        on = {
            "22:00-06:00": minute >= 22 * 60 or minute < 6 * 60,
            "12:00-13:30": 12 * 60 <= minute < 13 * 60 + 30,
            "01:20-01:50": 80 <= minute < 110,
            "02:15-03:00": 135 <= minute < 180,
            "sun": today == 6,
            "sat 10:00-24:00": today == 5 and minute >= 10 * 60,
            "2026-10-26..2026-10-27": (local.month, local.day) in {(10, 26), (10, 27)},
            "mon 23:00-01:00": (today == 0 and minute >= 23 * 60) or (today == 1 and minute < 60),
        }
        found.append(frozenset(window for window, is_on in on.items() if is_on))
    return found


@settings(max_examples=50)
@given(
    st.lists(st.sampled_from(WINDOWS), unique=True, max_size=4),
    st.sampled_from(["UTC", "Europe/Berlin", "America/New_York"]),
    st.sampled_from(["skip", "put_off"]),
    st.sampled_from([17 * MINUTE, 3 * HOUR, 26 * HOUR]),
    st.integers(0, 5 * 24 * 60),
)
def test_slots_match_a_minute_by_minute_reference(
    windows: list[str], zone: str, on_blackout: str, every: int, minutes: int
) -> None:
    schedule = Schedule(
        every=every, start_at=START, timezone=zone, blackouts=tuple(windows), on_blackout=on_blackout
    )
    is_on = [not window.isdisjoint(windows) for window in blacked_out(zone)]
    last = (DAYS - 6) * 24 * 60
    expected: set[int] = set()
    for raw in range(0, last, every // MINUTE):
        at = raw
        while on_blackout == "put_off" and is_on[at]:
            at += 1
        if minutes < at < last and not is_on[at]:
            expected.add(START + at * MINUTE)
    found = slots(schedule, START + minutes * MINUTE, START + last * MINUTE - 1)
    assert found == sorted(expected)


# What is due.


def reference(schedule: Schedule, slot: int, now: int) -> tuple[list[int], int]:
    """Every slot from this one on, one after the other."""
    due = [slot]
    while due[-1] <= now + schedule.jitter:
        due.append(schedule.next_slot(due[-1]) or 0)
    fires = {one: schedule.fires_at(one, "mine") for one in due}
    is_missed = now - fires[slot] > LATE
    if is_missed and schedule.missed == "one":
        return [slot], next(one for one in due if fires[one] > now)
    oldest = fires[slot] if not is_missed else now - LATE
    if is_missed and schedule.missed == "all":
        oldest = now - max(LATE, schedule.missed_window)
    left = due[next(place for place, one in enumerate(due) if fires[one] >= oldest) :]
    fired = []
    for one in left:
        if fires[one] > now or len(fired) == AT_ONCE:
            return fired, one
        fired.append(one)
    raise AssertionError


@settings(max_examples=200)
@given(
    every=st.sampled_from([1_000, 7_000, MINUTE, 5 * MINUTE, HOUR]),
    share=st.sampled_from([0, 0.5, 1]),
    missed=st.sampled_from(["skip", "one", "all"]),
    window=st.sampled_from([1_000, 10 * MINUTE, 3 * HOUR]),
    number=st.integers(0, 1_000),
    late=st.integers(-10_000, 4 * HOUR) | st.integers(-2_000, 2 * MINUTE),
)
def test_due_slots_match_a_reference_over_all_slots(
    late: int, number: int, window: int, **given: Any
) -> None:
    every = given["every"]
    schedule = Schedule(
        every=every, jitter=int(every * given["share"]), missed=given["missed"], missed_window=window
    )
    slot = START + number * every - START % every
    now = slot + late
    found = plan(schedule, "mine", slot, now)
    if schedule.fires_at(slot, "mine") > now:
        assert found is None
    else:
        assert found is not None
        assert (list(found.slots), found.following) == reference(schedule, slot, now)


def test_year_of_missed_seconds_is_handled_in_one_call() -> None:
    now = START + 365 * 24 * HOUR
    for missed in ("skip", "one", "all"):
        schedule = Schedule(every=1_000, missed=missed, missed_window=HOUR)
        found = plan(schedule, "mine", START, now)
        assert found is not None
        assert len(found.slots) <= AT_ONCE
        assert found.following is not None
        assert found.following >= now - HOUR


def test_ended_schedule_has_no_further_slot() -> None:
    schedule = Schedule(every=HOUR, end_at=START + HOUR)
    assert plan(schedule, "mine", START + HOUR, START + HOUR) == ((START + HOUR,), None)
    assert plan(schedule, "mine", START, START + 9 * HOUR) == ((START,), None)


def test_error_names_the_invalid_schedule_value() -> None:
    for wrong in ({"cron": "x"}, {"cron": "@daily", "timezone": "x"}, {"every": 1_000, "blackouts": ("x",)}):
        with pytest.raises(OptionError, match="'x'"):
            Schedule(**wrong).next_slot(0)


def test_schedule_without_slots_outside_blackouts_is_rejected_quickly() -> None:
    begun = time.thread_time()
    schedule = Schedule(cron="0 3 * * *", blackouts=("02:00-04:00",))
    assert schedule.problems() == {"blackouts": "every run of the schedule is in a blackout"}
    assert time.thread_time() - begun < 5
