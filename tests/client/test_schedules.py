"""`@job(cron=…)` and `@job(every=…)`: validation at import."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from djqueue import job
from djqueue.client import registry
from djqueue.client.declarations import declared
from djqueue.errors import OptionError
from djqueue.schedules import ALIASES

NAIVE = datetime(2026, 1, 1)
START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def nothing_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_entries", {})
    monkeypatch.setattr(registry, "_types", {})


def work() -> None: ...


def test_job_without_cron_or_every_declares_no_schedule() -> None:
    job(name="a", cron=None, every=None)(work)
    assert declared.of("a") == {}


@pytest.mark.parametrize("line", [*ALIASES, "*/5 * * * *", "30 0 3 * * 1-5", "0 9 L * *"])
def test_cron_lines_and_aliases_are_accepted(line: str) -> None:
    job(name="a", cron=line)(work)
    assert declared.of("a")["a"].schedule.cron == line


@pytest.mark.parametrize("every", [1, 1.5, 3600, timedelta(days=3)])
def test_intervals_can_be_seconds_or_timedeltas(every: Any) -> None:
    job(name="a", every=every)(work)
    seconds = every.total_seconds() if isinstance(every, timedelta) else every
    assert declared.of("a")["a"].schedule.every == seconds * 1_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cron": "every day"}, "cron: 'every day' is not a valid cron expression"),
        ({"cron": "@sometimes"}, "cron: unknown alias '@sometimes'"),
        ({"cron": "0 0 30 2 *"}, "cron: '0 0 30 2 .' is not a valid cron expression: Bad day-of-month"),
        ({"cron": "0 0 */31 2 2#5"}, "cron: has no run within fifty years"),
        ({"cron": ""}, "cron: enter a cron expression or an interval"),
        ({"cron": 5}, "cron: expected a string, got 5"),
        ({"cron": "@daily", "every": 5}, "cron: enter a cron expression or an interval .every., not both"),
        ({"every": 0}, "every: must be between 1 s and a hundred years"),
        ({"every": 0.5}, "every: must be between 1 s and a hundred years"),
        ({"every": -1}, "every: must not be negative; got -1"),
        ({"every": float("nan")}, "every: nan is not a finite number of seconds"),
        ({"every": float("inf")}, "every: inf is not a finite number of seconds"),
        ({"every": 1e300}, "every: must be at most 100 years; got 1e[+]300"),
        ({"every": "5"}, "every: expected seconds or a timedelta"),
        ({"every": True}, "every: expected seconds or a timedelta"),
        ({"cron": "@daily", "timezone": "Mars/Olympus"}, "timezone: 'Mars/Olympus' is not the name"),
        ({"cron": "@daily", "timezone": None}, "timezone: expected a string"),
        ({"cron": "@daily", "start_at": NAIVE}, "start_at: .* is naive"),
        ({"cron": "@daily", "end_at": "2026-01-01"}, "end_at: expected an aware datetime"),
        ({"every": 5, "start_at": START, "end_at": START}, "end_at: must be later than start_at"),
        (
            {"cron": "0 3 * * *", "start_at": START, "end_at": START + timedelta(hours=2)},
            "end_at: is before the first run",
        ),
        ({"every": 5, "max_executions": 0}, "max_executions: must be at least 1; got 0"),
        ({"every": 5, "max_executions": 2.5}, "max_executions: expected a whole number"),
        ({"every": 5, "jitter": 6}, "jitter: is longer than the 5 seconds between two runs"),
        ({"cron": "0 0,1 * * *", "jitter": 4_000}, "jitter: is longer than the 3600 seconds between"),
        ({"every": 5, "jitter": float("nan")}, "jitter: nan is not a finite number of seconds"),
        ({"every": 5, "jitter": -1}, "jitter: must not be negative; got -1"),
        ({"every": 5, "overlap": "never"}, "overlap: 'never' is not one of allow, skip, one_pending"),
        ({"every": 5, "missed": "two"}, "missed: 'two' is not one of skip, one, all"),
        ({"every": 5, "missed_window": 0}, "missed_window: must be between 1 s and a hundred years"),
        ({"every": 5, "blackouts": "sat,sun"}, "blackouts: expected a list of strings"),
        ({"every": 5, "blackouts": ["noon"]}, "blackouts: 'noon' is invalid; expected dates"),
        ({"every": 5, "blackouts": ["mon-sun"]}, "blackouts: every run of the schedule is in a blackout"),
        ({"every": 5, "on_blackout": "wait"}, "on_blackout: 'wait' is not one of skip, put_off"),
        ({"timezone": "UTC"}, "timezone: requires cron or every"),
        ({"overlap": "skip", "cron": None}, "overlap: requires cron or every"),
        ({"cron": "@daily", "queu": "a"}, "unknown option 'queu'"),
    ],
)
def test_wrong_schedule_option_is_rejected_by_name_and_nothing_is_registered(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=f"^({message})"):
        job(name="a", **options)(work)
    assert (declared.of("a"), registry.all()) == ({}, {})


def test_too_long_schedule_name_is_rejected() -> None:
    with pytest.raises(
        OptionError, match="name: a schedule's name must have at most 200 characters; got 201"
    ):
        job(name="n" * 201, every=5)(work)


def test_two_schedules_with_the_same_name_are_rejected() -> None:
    job(name="a")(work).schedule("mine", every=5)
    with pytest.raises(OptionError, match="name: job 'a' already has a schedule named 'mine'"):
        job(name="b")(work).schedule("mine", every=5)


def test_schedule_arguments_must_be_json_serializable() -> None:
    job_type = job(name="a")(work)
    for args in ([START], [float("nan")], [{1, 2}]):
        with pytest.raises(OptionError, match="args: the values of a schedule must be JSON-serializable"):
            job_type.schedule("mine", every=5, args=args)
    with pytest.raises(OptionError, match="kwargs: "):
        job_type.schedule("mine", every=5, kwargs={"at": START})


def test_using_rejects_schedule_options() -> None:
    with pytest.raises(OptionError, match=r"cron: set the option on the job type"):
        job(name="a")(work).using(cron="@daily")
