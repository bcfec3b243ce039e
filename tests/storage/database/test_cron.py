"""Cron jobs: each slot of a schedule is enqueued once, whoever is the scheduler and whenever."""

import logging
from typing import Any

import pytest

from djqueue import models
from djqueue.codecs import MSGPACK, decode
from djqueue.core.durations import to_datetime, to_milliseconds
from djqueue.core.job import Claimed, Incident
from djqueue.core.states import State
from djqueue.storage.database import DatabaseStorage, cron
from djqueue.storage.database import scheduler as scheduler_module
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import QUEUE, claim, completing, counts, finish

from .conftest import MakeStorage

NAME = "digest"
MINUTE = 60_000
START = 1_700_000_000_000
"""22:13:20 UTC."""
FIRST = 1_700_000_100_000
"""22:15, the first slot of every five minutes."""
EVERY = 5 * MINUTE


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(now=START)


@pytest.fixture
def scheduler(make_storage: MakeStorage, clock: FakeClock) -> DatabaseStorage:
    return another(make_storage, clock)


def another(make_storage: MakeStorage, clock: FakeClock) -> DatabaseStorage:
    storage = make_storage(clock=clock)
    storage.standby = "never"
    storage.connect()
    return storage


def a_cron_job(name: str = "mine", **given: Any) -> models.CronJob:
    """A row of every five minutes as a migration might make it: its times are still to be worked out."""
    row = models.CronJob(name=name, **{"job_name": NAME, "schedule": "*/5 * * * *", **given})
    models.CronJob.objects.bulk_create([row])
    return row


def times(row: models.CronJob) -> tuple[int, int | None, int | None]:
    """Executions, last and next run."""
    row.refresh_from_db()
    last, following = row.last_run_at, row.next_run_at
    return (
        row.executions,
        None if last is None else to_milliseconds(last),
        None if following is None else to_milliseconds(following),
    )


def goes_to(storage: DatabaseStorage, clock: FakeClock, now: int) -> None:
    """Let it become `now`, and do what time does."""
    clock.advance(now - clock.now())
    storage.maintain()


def claimed_jobs(storage: DatabaseStorage) -> list[Claimed]:
    return claim(storage, 100, names=[NAME])


def ids(storage: DatabaseStorage, queue: str = QUEUE) -> list[str]:
    """Of all jobs of a queue, oldest first."""
    return [record.id for record in storage.page(queue, None, 100)]


# Slots.


def test_a_cron_job_is_enqueued_once_for_each_slot(scheduler: DatabaseStorage, clock: FakeClock) -> None:
    a_cron_job()
    scheduler.maintain()
    assert ids(scheduler) == []

    goes_to(scheduler, clock, FIRST - 1)
    assert ids(scheduler) == []

    for number in range(3):
        goes_to(scheduler, clock, FIRST + number * EVERY)
        scheduler.maintain()
        goes_to(scheduler, clock, FIRST + number * EVERY + MINUTE)
        assert len(ids(scheduler)) == number + 1

    assert ids(scheduler) == [f"cron:mine:{FIRST + number * EVERY}" for number in range(3)]


def test_a_job_has_the_name_the_queue_and_the_arguments_of_its_row(
    scheduler: DatabaseStorage, clock: FakeClock
) -> None:
    a_cron_job(queue="mail", args=[1, "two", None], kwargs={"to": ["ann"], "n": 2.5})
    scheduler.maintain()
    goes_to(scheduler, clock, FIRST)

    [claimed] = claimed_jobs(scheduler)

    assert (claimed.queue, claimed.name) == ("mail", NAME)
    assert decode(claimed.payload, MSGPACK) == {
        "args": [1, "two", None],
        "kwargs": {"to": ["ann"], "n": 2.5},
    }
    assert finish(scheduler, completing(claimed)) == [True]


def test_a_row_without_a_queue_goes_to_the_default_one_with_the_default_options(
    scheduler: DatabaseStorage, clock: FakeClock, settings: Any
) -> None:
    settings.DJQUEUE = {"DEFAULTS": {"queue": "bulk", "priority": 7, "max_attempts": 1}}
    a_cron_job()
    scheduler.maintain()
    goes_to(scheduler, clock, FIRST)

    [claimed] = claimed_jobs(scheduler)

    assert (claimed.queue, claimed.options.priority, claimed.options.max_attempts) == ("bulk", 7, 1)


def test_each_row_has_times_of_its_own(scheduler: DatabaseStorage, clock: FakeClock) -> None:
    a_cron_job("often", schedule="* * * * *")
    a_cron_job("seldom", schedule="@hourly")
    a_cron_job("far away", schedule="0 0 * * *", timezone="Asia/Kolkata")  # at 18:30 UTC
    scheduler.maintain()

    hour = FIRST + 45 * MINUTE
    for now in range(FIRST - MINUTE, hour + 1, MINUTE):
        goes_to(scheduler, clock, now)
    goes_to(scheduler, clock, hour + (19 * 60 + 30) * MINUTE)

    found = ids(scheduler)
    assert sum(job_id.startswith("cron:often:") for job_id in found) == 47 + 1
    assert [job_id for job_id in found if "seldom" in job_id] == [
        f"cron:seldom:{hour}",
        f"cron:seldom:{hour + 60 * MINUTE}",
    ]
    assert [job_id for job_id in found if "away" in job_id] == [
        f"cron:far away:{hour + (18 * 60 + 30 + 60) * MINUTE}"
    ]


def test_a_name_of_the_greatest_length_is_enqueued(scheduler: DatabaseStorage, clock: FakeClock) -> None:
    a_cron_job("n" * 200)
    scheduler.maintain()
    goes_to(scheduler, clock, FIRST)

    assert ids(scheduler) == [f"cron:{'n' * 200}:{FIRST}"]


def test_the_executions_and_the_times_are_kept(scheduler: DatabaseStorage, clock: FakeClock) -> None:
    row = a_cron_job()
    assert times(row) == (0, None, None)

    scheduler.maintain()
    assert times(row) == (0, None, FIRST)

    goes_to(scheduler, clock, FIRST + 10)
    assert times(row) == (1, FIRST, FIRST + EVERY)

    scheduler.maintain()
    assert times(row) == (1, FIRST, FIRST + EVERY)

    goes_to(scheduler, clock, FIRST + EVERY)
    assert times(row) == (2, FIRST + EVERY, FIRST + 2 * EVERY)


def test_a_slot_that_fires_is_told_once(scheduler: DatabaseStorage, clock: FakeClock) -> None:
    told: list[Incident] = []
    scheduler.on_incidents = told.extend
    a_cron_job("mine")
    goes_to(scheduler, clock, START)
    for _ in range(2):
        goes_to(scheduler, clock, FIRST)

    assert told == [Incident(QUEUE, f"cron:mine:{FIRST}", NAME, "fired", "mine")]


def test_a_slot_is_enqueued_although_the_job_of_the_one_before_still_waits(
    scheduler: DatabaseStorage, clock: FakeClock
) -> None:
    a_cron_job()
    scheduler.maintain()
    goes_to(scheduler, clock, FIRST)
    goes_to(scheduler, clock, FIRST + EVERY)

    assert counts(scheduler) == {State.WAITING: 2}


# Schedulers that come and go.


def test_the_next_scheduler_does_not_enqueue_a_slot_again(
    scheduler: DatabaseStorage, make_storage: MakeStorage, clock: FakeClock
) -> None:
    row = a_cron_job()
    scheduler.maintain()
    goes_to(scheduler, clock, FIRST)
    scheduler.close()

    following = another(make_storage, clock)
    following.maintain()
    assert ids(following) == [f"cron:mine:{FIRST}"]
    assert times(row) == (1, FIRST, FIRST + EVERY)

    goes_to(following, clock, FIRST + EVERY)
    assert ids(following) == [f"cron:mine:{FIRST}", f"cron:mine:{FIRST + EVERY}"]


@pytest.mark.parametrize("ended", [False, True], ids=["still waiting", "completed"])
def test_a_slot_whose_scheduler_died_before_it_noted_it_is_enqueued_once(
    scheduler: DatabaseStorage,
    make_storage: MakeStorage,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    ended: bool,
) -> None:
    def dies(*_: object) -> None:
        raise SystemExit

    row = a_cron_job()
    scheduler.maintain()
    with monkeypatch.context() as patch:
        patch.setattr(scheduler_module.cron, "advance", dies)
        with pytest.raises(SystemExit):
            goes_to(scheduler, clock, FIRST)
    assert times(row) == (0, None, FIRST)
    if ended:
        assert finish(scheduler, *map(completing, claimed_jobs(scheduler))) == [True]
    scheduler.close()

    following = another(make_storage, clock)
    following.maintain()

    assert counts(following) == {State.COMPLETED if ended else State.WAITING: 1}
    assert times(row) == (1, FIRST, FIRST + EVERY)


def test_missed_slots_are_made_up_for_by_one(
    scheduler: DatabaseStorage, make_storage: MakeStorage, clock: FakeClock
) -> None:
    row = a_cron_job()
    scheduler.maintain()
    scheduler.close()
    clock.advance(FIRST + 10 * EVERY + MINUTE - clock.now())

    following = another(make_storage, clock)
    following.maintain()
    following.maintain()

    assert ids(following) == [f"cron:mine:{FIRST}"]
    assert times(row) == (1, FIRST, FIRST + 11 * EVERY)
    goes_to(following, clock, FIRST + 11 * EVERY)
    assert len(ids(following)) == 2


def test_a_clock_that_is_set_back_enqueues_no_slot_again(
    scheduler: DatabaseStorage, clock: FakeClock
) -> None:
    row = a_cron_job()
    scheduler.maintain()
    goes_to(scheduler, clock, FIRST)

    clock.jump(-2 * EVERY)
    scheduler.maintain()
    goes_to(scheduler, clock, FIRST + 1)

    assert ids(scheduler) == [f"cron:mine:{FIRST}"]
    assert times(row) == (1, FIRST, FIRST + EVERY)


def test_a_client_fires_nothing(make_storage: MakeStorage, clock: FakeClock) -> None:
    row = a_cron_job()
    client = make_storage(clock=clock)
    client.maintain()
    clock.advance(EVERY)
    client.maintain()

    assert times(row) == (0, None, None)
    assert models.Job.objects.count() == 0


# Rows that do not fire.


def test_a_disabled_row_does_not_fire_until_it_is_enabled(
    scheduler: DatabaseStorage, clock: FakeClock
) -> None:
    row = a_cron_job(enabled=False, next_run_at=to_datetime(FIRST))
    goes_to(scheduler, clock, FIRST + MINUTE)
    assert ids(scheduler) == []
    assert times(row) == (0, None, FIRST)

    models.CronJob.objects.update(enabled=True)
    scheduler.maintain()

    assert ids(scheduler) == [f"cron:mine:{FIRST}"]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"schedule": "every now and then"}, "'every now and then' is not a cron line"),
        ({"schedule": ""}, "'' is not a cron line"),
        ({"schedule": "@sometimes"}, "'@sometimes' is not known"),
        ({"schedule": "61 * * * *"}, "'61 * * * *' is not a cron line"),
        ({"timezone": "Atlantis/Capital"}, "'Atlantis/Capital' is not the name of a time zone"),
    ],
)
@pytest.mark.parametrize("at", [None, FIRST], ids=["new", "due"])
def test_a_row_that_cannot_be_read_is_switched_off_and_no_other(
    scheduler: DatabaseStorage,
    clock: FakeClock,
    caplog: pytest.LogCaptureFixture,
    wrong: dict[str, str],
    why: str,
    at: int | None,
) -> None:
    due = None if at is None else to_datetime(at)
    bad = a_cron_job("bad", next_run_at=due, **wrong)
    good = a_cron_job("good", next_run_at=to_datetime(FIRST))
    goes_to(scheduler, clock, FIRST)
    scheduler.maintain()

    assert ids(scheduler) == [f"cron:good:{FIRST}"]
    bad.refresh_from_db()
    good.refresh_from_db()
    assert (bad.enabled, bad.executions, good.enabled) == (False, 0, True)
    [record] = [record for record in caplog.records if record.name == "djqueue.cron"]
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("The cron job bad is switched off: ")
    assert why in record.getMessage()


def test_arguments_that_no_payload_can_hold_switch_a_row_off(
    scheduler: DatabaseStorage, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    row = a_cron_job(args=[2**70], next_run_at=to_datetime(FIRST))
    goes_to(scheduler, clock, FIRST)

    row.refresh_from_db()
    assert (row.enabled, row.executions) == (False, 0)
    assert ids(scheduler) == []
    assert "The cron job mine is switched off" in caplog.text


def test_a_row_deleted_since_it_was_read_fires_nothing(
    scheduler: DatabaseStorage, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_cron_job(next_run_at=to_datetime(FIRST))
    found = cron.due_slots

    def found_and_deleted(alias: str, now: int) -> list[cron.Slot]:
        slots = found(alias, now)
        models.CronJob.objects.all().delete()
        return slots

    monkeypatch.setattr(scheduler_module.cron, "due_slots", found_and_deleted)
    goes_to(scheduler, clock, FIRST)

    assert ids(scheduler) == []


# Rows that change.


def test_a_changed_schedule_takes_effect(
    scheduler: DatabaseStorage, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "SYSTEM_CLOCK", clock)  # by which rows are saved
    row = models.CronJob.objects.create(name="mine", job_name=NAME, schedule="@yearly", args=["old"])
    goes_to(scheduler, clock, FIRST)
    assert ids(scheduler) == []

    row.refresh_from_db()
    row.schedule, row.args = "*/5 * * * *", ["new"]
    row.save()
    scheduler.maintain()
    assert ids(scheduler) == []
    goes_to(scheduler, clock, FIRST + EVERY)

    [claimed] = claimed_jobs(scheduler)
    assert claimed.id == f"cron:mine:{FIRST + EVERY}"
    assert decode(claimed.payload, MSGPACK)["args"] == ["new"]
    assert times(row) == (1, FIRST + EVERY, FIRST + 2 * EVERY)


def test_a_schedule_changed_while_its_slot_is_enqueued_keeps_the_new_time(
    scheduler: DatabaseStorage, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    changed = FIRST + 3 * MINUTE
    found = cron.due_slots

    def found_and_changed(alias: str, now: int) -> list[cron.Slot]:
        slots = found(alias, now)
        if slots and slots[0].at == FIRST:
            models.CronJob.objects.update(schedule="18 * * * *", next_run_at=to_datetime(changed))
        return slots

    monkeypatch.setattr(scheduler_module.cron, "due_slots", found_and_changed)
    goes_to(scheduler, clock, FIRST)
    assert times(row)[2] == changed

    goes_to(scheduler, clock, changed)
    assert ids(scheduler) == [f"cron:mine:{FIRST}", f"cron:mine:{changed}"]
    assert times(row)[2] == changed + 60 * MINUTE


def test_a_row_disabled_while_its_slot_is_enqueued_stays_disabled(
    scheduler: DatabaseStorage, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    advance = cron.advance

    def disabled_before(alias: str, slot: cron.Slot) -> None:
        models.CronJob.objects.update(enabled=False)
        advance(alias, slot)

    monkeypatch.setattr(scheduler_module.cron, "advance", disabled_before)
    goes_to(scheduler, clock, FIRST)
    goes_to(scheduler, clock, FIRST + EVERY)

    row.refresh_from_db()
    assert not row.enabled
    assert ids(scheduler) == [f"cron:mine:{FIRST}"]


def test_a_schedule_that_has_no_further_time_ends_after_its_last(
    scheduler: DatabaseStorage, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    monkeypatch.setattr(cron, "next_run", lambda *_: None)
    goes_to(scheduler, clock, FIRST)
    scheduler.maintain()

    row.refresh_from_db()
    assert not row.enabled
    assert times(row) == (1, FIRST, None)
    assert ids(scheduler) == [f"cron:mine:{FIRST}"]
