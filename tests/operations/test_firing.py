"""Schedules fire on every storage, and each slot is enqueued once."""

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from random import Random
from threading import Barrier
from typing import Any

import pytest
from django.db import connection
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djqueue import job, models, signals
from djqueue.client import announcing, registry
from djqueue.codecs import MSGPACK, decode
from djqueue.core.errors import QueueFullError, StorageUnavailableError
from djqueue.core.job import Batch, Claimed, EnqueueResult, Incident, Outcome
from djqueue.core.procfs import host_name, start_mark
from djqueue.core.states import State
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.operations.cronjobs import MIN_RETENTION
from djqueue.operations.firing import DEAD_TAKEOVER_AFTER, IDS_KNOWN_FOR, TAKEOVER_AFTER, Firing
from djqueue.storage.base import Storage
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.memory import MemoryStorage
from djqueue.storage.redis import RedisStorage
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import (
    QUEUE,
    claim,
    completing,
    counts,
    enqueue,
    failing,
    finish,
    retrying,
)
from tests.support import PATIENCE
from tests.tables import refusing

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


@pytest.fixture(params=["memory", "database", "redis"])
def storage(request: pytest.FixtureRequest, tables: None, clock: FakeClock) -> Iterator[Storage]:
    made: Storage
    if request.param == "memory":
        made = MemoryStorage(clock=clock)
    elif request.param == "database":
        made = DatabaseStorage(clock=clock)
    else:
        server = request.getfixturevalue("redis_server" if request.param == "redis" else "redis_cluster")
        server.clean()
        made = RedisStorage(url=server.url, timeout=PATIENCE)
    made.connect()
    yield made
    made.close()


@pytest.fixture
def firing(storage: Storage, clock: FakeClock) -> Firing:
    return another(storage, clock)


on_memory = pytest.mark.parametrize("storage", ["memory"], indirect=True)
"""For what concerns the rows alone."""


def another(storage: Storage, clock: FakeClock) -> Firing:
    """Of another process, as it were."""
    return Firing(storage, "default", clock=clock)


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


def goes_to(firing: Firing, clock: FakeClock, now: int) -> None:
    """Let it become `now`, and do what time does."""
    clock.advance(now - clock.now())
    firing.fire()


def claimed_jobs(storage: Storage) -> list[Claimed]:
    return claim(storage, 100, names=[NAME])


def ids(storage: Storage, queue: str = QUEUE) -> list[str]:
    """Of all jobs of a queue, oldest first."""
    return [record.id for record in storage.reads.page(queue, None, 100)]


# Slots.


def test_a_cron_job_is_enqueued_once_for_each_slot(
    storage: Storage, firing: Firing, clock: FakeClock
) -> None:
    a_cron_job()
    firing.fire()
    assert ids(storage) == []

    goes_to(firing, clock, FIRST - 1)
    assert ids(storage) == []

    for number in range(3):
        goes_to(firing, clock, FIRST + number * EVERY)
        firing.fire()
        goes_to(firing, clock, FIRST + number * EVERY + MINUTE)
        assert len(ids(storage)) == number + 1

    assert ids(storage) == [f"cron:mine:{FIRST + number * EVERY}" for number in range(3)]


@on_memory
def test_fired_slot_is_signaled_once(storage: Storage, firing: Firing, clock: FakeClock) -> None:
    told: list[Incident] = []
    storage.on_incidents = told.extend
    a_cron_job()
    firing.fire()
    for _ in range(2):
        goes_to(firing, clock, FIRST)

    assert told == [Incident(QUEUE, f"cron:mine:{FIRST}", NAME, "fired", "mine")]


def test_a_job_has_the_name_the_queue_and_the_arguments_of_its_row(
    storage: Storage, firing: Firing, clock: FakeClock
) -> None:
    a_cron_job(queue="mail", args=[1, "two", None], kwargs={"to": ["ann"], "n": 2.5})
    firing.fire()
    goes_to(firing, clock, FIRST)

    [claimed] = claimed_jobs(storage)

    assert (claimed.queue, claimed.name) == ("mail", NAME)
    assert decode(claimed.payload, MSGPACK) == {
        "args": [1, "two", None],
        "kwargs": {"to": ["ann"], "n": 2.5},
    }
    assert finish(storage, completing(claimed)) == [True]


def test_row_without_a_queue_uses_the_default_queue_and_options(
    storage: Storage, firing: Firing, clock: FakeClock, settings: Any
) -> None:
    settings.DJQUEUE = {"DEFAULTS": {"queue": "bulk", "priority": 7, "max_attempts": 1}}
    a_cron_job()
    firing.fire()
    goes_to(firing, clock, FIRST)

    [claimed] = claimed_jobs(storage)

    assert (claimed.queue, claimed.options.priority, claimed.options.max_attempts) == ("bulk", 7, 1)


@on_memory
def test_each_row_has_its_own_times(storage: Storage, firing: Firing, clock: FakeClock) -> None:
    a_cron_job("often", schedule="* * * * *")
    a_cron_job("seldom", schedule="@hourly")
    a_cron_job("far away", schedule="0 0 * * *", timezone="Asia/Kolkata")  # at 18:30 UTC
    firing.fire()

    hour = FIRST + 45 * MINUTE
    for now in (*range(FIRST - MINUTE, FIRST + 5 * MINUTE, MINUTE), hour):
        goes_to(firing, clock, now)
    goes_to(firing, clock, hour + (19 * 60 + 30) * MINUTE)

    found = ids(storage)
    assert sum(job_id.startswith("cron:often:") for job_id in found) == 6 + 1 + 1
    assert [job_id for job_id in found if "seldom" in job_id] == [
        f"cron:seldom:{hour}",
        f"cron:seldom:{hour + 60 * MINUTE}",
    ]
    assert [job_id for job_id in found if "away" in job_id] == [
        f"cron:far away:{hour + (18 * 60 + 30 + 60) * MINUTE}"
    ]


@on_memory
def test_schedule_with_the_longest_name_is_enqueued(
    storage: Storage, firing: Firing, clock: FakeClock
) -> None:
    a_cron_job("n" * 200)
    firing.fire()
    goes_to(firing, clock, FIRST)

    assert ids(storage) == [f"cron:{'n' * 200}:{FIRST}"]


def test_executions_and_times_are_recorded(storage: Storage, firing: Firing, clock: FakeClock) -> None:
    row = a_cron_job()
    assert times(row) == (0, None, None)

    firing.fire()
    assert times(row) == (0, None, FIRST)

    goes_to(firing, clock, FIRST + 10)
    assert times(row) == (1, FIRST, FIRST + EVERY)

    firing.fire()
    assert times(row) == (1, FIRST, FIRST + EVERY)

    goes_to(firing, clock, FIRST + EVERY)
    assert times(row) == (2, FIRST + EVERY, FIRST + 2 * EVERY)


def test_slot_is_enqueued_while_the_previous_job_waits(
    storage: Storage, firing: Firing, clock: FakeClock
) -> None:
    a_cron_job()
    firing.fire()
    goes_to(firing, clock, FIRST)
    goes_to(firing, clock, FIRST + EVERY)

    assert counts(storage) == {State.WAITING: 2}


# Schedulers that come and go.


class Died(BaseException):
    """As a killed process: nothing is cleaned up."""


def dies(*_: object) -> None:
    raise Died


def goes_to_its_death(
    firing: Firing, clock: FakeClock, now: int, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Let it die before it takes a step."""
    with monkeypatch.context() as patch:
        patch.setattr(Firing, step, dies)
        with pytest.raises(Died):
            goes_to(firing, clock, now)


def test_the_next_scheduler_does_not_enqueue_a_slot_again(
    storage: Storage, firing: Firing, clock: FakeClock
) -> None:
    row = a_cron_job()
    firing.fire()
    goes_to(firing, clock, FIRST)

    following = another(storage, clock)
    assert following.fire() == 0
    assert ids(storage) == [f"cron:mine:{FIRST}"]
    assert times(row) == (1, FIRST, FIRST + EVERY)

    goes_to(following, clock, FIRST + EVERY)
    assert ids(storage) == [f"cron:mine:{FIRST}", f"cron:mine:{FIRST + EVERY}"]


@pytest.mark.parametrize("end", [None, completing, failing], ids=["waiting", "completed", "failed"])
def test_slot_is_enqueued_once_if_the_scheduler_dies_before_recording(
    storage: Storage,
    firing: Firing,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[Claimed], Outcome] | None,
) -> None:
    row = a_cron_job()
    firing.fire()
    goes_to_its_death(firing, clock, FIRST, monkeypatch, "_finish")
    assert times(row) == (0, None, FIRST)
    if end is not None:
        assert finish(storage, *map(end, claimed_jobs(storage))) == [True]
    before = counts(storage)

    following = another(storage, clock)
    goes_to(following, clock, FIRST + MINUTE)
    assert times(row) == (0, None, FIRST)  # somebody is at it, it seems
    goes_to(following, clock, FIRST + TAKEOVER_AFTER)

    assert counts(storage) == before
    assert times(row) == (1, FIRST, FIRST + EVERY)


def test_slot_is_enqueued_by_the_next_scheduler_if_one_dies_before_enqueue(
    storage: Storage, firing: Firing, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = a_cron_job()
    firing.fire()
    goes_to_its_death(firing, clock, FIRST, monkeypatch, "_send")
    assert ids(storage) == []

    goes_to(another(storage, clock), clock, FIRST + TAKEOVER_AFTER)

    assert ids(storage) == [f"cron:mine:{FIRST}"]
    assert times(row) == (1, FIRST, FIRST + EVERY)


def test_slot_with_an_unknown_outcome_is_not_enqueued_again(
    storage: Storage,
    firing: Firing,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    row = a_cron_job(schedule="@yearly", next_run_at=to_datetime(FIRST))
    goes_to_its_death(firing, clock, FIRST, monkeypatch, "_finish")
    [claimed] = claimed_jobs(storage)
    finish(storage, completing(claimed))
    storage.jobs.remove(claimed.queue, [claimed.id])  # its time is over

    goes_to(another(storage, clock), clock, FIRST + IDS_KNOWN_FOR + 1)

    assert ids(storage) == []
    assert times(row)[:2] == (0, None)
    assert times(row)[2] > clock.now()
    assert "which may have been enqueued already" in caplog.text


@on_memory
def test_slots_after_one_with_an_unknown_outcome_are_enqueued(
    storage: Storage, firing: Firing, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = a_cron_job(missed="all", next_run_at=to_datetime(FIRST))
    goes_to_its_death(firing, clock, FIRST, monkeypatch, "_finish")
    storage.jobs.remove(QUEUE, ids(storage))

    goes_to(another(storage, clock), clock, FIRST + 6 * EVERY)

    assert ids(storage) == [f"cron:mine:{FIRST + number * EVERY}" for number in range(1, 7)]
    assert times(row) == (6, FIRST + 6 * EVERY, FIRST + 7 * EVERY)


def test_slots_are_enqueued_when_the_storage_is_available_again(
    storage: Storage, firing: Firing, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_away(*_: object) -> None:
        raise StorageUnavailableError("away")

    row = a_cron_job(next_run_at=to_datetime(FIRST))
    enqueue = (storage, "enqueue", is_away)
    if storage.capabilities.enqueue_directly is not None:
        enqueue = (storage, "capabilities", replace(storage.capabilities, enqueue_directly=is_away))
    for replaced in ((storage.reads, "states", is_away), enqueue):
        with monkeypatch.context() as patch:
            patch.setattr(*replaced)
            with pytest.raises(StorageUnavailableError):
                goes_to(firing, clock, FIRST)
        assert times(row) == (0, None, FIRST)

    assert firing.fire() == 1
    assert ids(storage) == [f"cron:mine:{FIRST}"]
    assert times(row) == (1, FIRST, FIRST + EVERY)


@on_memory
def test_rejected_slot_is_retried_and_delays_no_other(
    storage: Storage,
    firing: Firing,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    full = a_cron_job("full", queue="full", next_run_at=to_datetime(FIRST))
    other = a_cron_job("other", next_run_at=to_datetime(FIRST))
    enqueue = storage.enqueue

    def refuse(batches: Sequence[Batch]) -> list[EnqueueResult]:
        if any(batch.queue == "full" for batch in batches):
            raise QueueFullError("no room")
        return enqueue(batches)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "enqueue", refuse)
        goes_to(firing, clock, FIRST)
        firing.fire()
    assert times(other) == (1, FIRST, FIRST + EVERY)
    assert times(full) == (0, None, FIRST)
    assert caplog.text.count("Schedule full: enqueueing was refused, retrying: no room") == 1

    goes_to(firing, clock, FIRST + 1_000)
    assert times(full) == (1, FIRST, FIRST + EVERY)


@pytest.mark.parametrize("storage", ["database"], indirect=True)
def test_run_whose_job_the_database_refuses_is_skipped_with_the_reason_and_delays_no_other(
    storage: Storage, firing: Firing, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    bad = a_cron_job("bad", next_run_at=to_datetime(FIRST))
    other = a_cron_job("other", next_run_at=to_datetime(FIRST))

    with refusing("NEW.job_id LIKE 'cron:bad:%'"):
        goes_to(firing, clock, FIRST)
        goes_to(firing, clock, FIRST + EVERY)
    assert times(other) == (2, FIRST + EVERY, FIRST + 2 * EVERY)
    assert times(bad) == (0, None, FIRST + 2 * EVERY)
    assert bad.skipped_at == to_datetime(FIRST + EVERY)
    assert re.fullmatch("refused by the database: .*refused.*", bad.skip_reason)
    assert caplog.text.count("Schedule bad: its run was skipped, because the database refused the job") == 1

    goes_to(firing, clock, FIRST + 2 * EVERY)
    assert times(bad) == (1, FIRST + 2 * EVERY, FIRST + 3 * EVERY)


# Middleware, and signals.


class Gate:
    """A middleware that refuses what it is told to, and notes what passes."""

    seen: list[tuple[str, int]] = []
    refused: set[str] = set()
    error: Exception = PermissionError("not now")
    priority: int | None = None
    swallows = False
    late: Callable[[], object] = staticmethod(lambda: None)

    def enqueue(self, batch: Batch, call_next: Callable[[Batch], Any]) -> Any:
        self.seen.append((batch.queue, len(batch.payloads)))
        if batch.queue in self.refused:
            raise self.error
        if self.swallows:
            return [EnqueueResult(job_id, "queued", batch.queue) for job_id in batch.ids or ()]
        if self.priority is not None:
            batch = batch._replace(options=replace(batch.options, priority=self.priority))
        self.late()
        return call_next(batch)

    async def aenqueue(self, batch: Batch, call_next: Callable[[Batch], Any]) -> Any:
        return await call_next(batch)


@pytest.fixture
def gate(settings: Any, monkeypatch: pytest.MonkeyPatch) -> type[Gate]:
    monkeypatch.setattr(Gate, "seen", [])
    settings.DJQUEUE = {"MIDDLEWARE": [f"{__name__}.Gate"]}
    return Gate


@contextmanager
def told_of(storage: Storage) -> Iterator[list[tuple[str, str]]]:
    """The signals of enqueues and of schedules: (which, job)."""
    storage.on_incidents = announcing.announce_incidents
    told: list[tuple[str, str]] = []

    def enqueued(sender: object, job_id: str, options: Any, **_: Any) -> None:
        told.append(("job_enqueued", job_id))

    def fired(sender: object, job_id: str, schedule: str, **_: Any) -> None:
        told.append(("schedule_fired", job_id))

    signals.job_enqueued.connect(enqueued)
    signals.schedule_fired.connect(fired)
    try:
        yield told
        assert announcing.announcer.flush(10)
    finally:
        signals.job_enqueued.disconnect(enqueued)
        signals.schedule_fired.disconnect(fired)


def test_the_jobs_of_schedules_go_through_the_middleware(
    storage: Storage, firing: Firing, clock: FakeClock, gate: type[Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "priority", 9)
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    a_cron_job("other", queue="mail", next_run_at=to_datetime(FIRST))
    goes_to(firing, clock, FIRST)
    goes_to(firing, clock, FIRST + MINUTE)

    assert sorted(gate.seen) == [(QUEUE, 1), ("mail", 1)]
    assert [claimed.options.priority for claimed in claimed_jobs(storage)] == [9, 9]
    assert times(row) == (1, FIRST, FIRST + EVERY)


@on_memory
def test_slot_rejected_by_middleware_is_skipped_with_its_reason(
    storage: Storage,
    firing: Firing,
    clock: FakeClock,
    gate: type[Gate],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(gate, "refused", {"mail"})
    refused = a_cron_job("refused", queue="mail", next_run_at=to_datetime(FIRST))
    other = a_cron_job("other", next_run_at=to_datetime(FIRST))
    with told_of(storage) as told:
        goes_to(firing, clock, FIRST)
        firing.fire()

    assert times(refused) == (0, None, FIRST + EVERY)
    assert (refused.skipped_at, refused.skip_reason) == (to_datetime(FIRST), "PermissionError: not now")
    assert times(other) == (1, FIRST, FIRST + EVERY)
    assert told == [("job_enqueued", f"cron:other:{FIRST}"), ("schedule_fired", f"cron:other:{FIRST}")]
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "Schedule refused: the middleware raised PermissionError: not now" in record.getMessage()
    assert record.exc_info is not None

    monkeypatch.setattr(gate, "refused", set())
    goes_to(firing, clock, FIRST + EVERY)
    assert times(refused) == (1, FIRST + EVERY, FIRST + 2 * EVERY)
    assert refused.skipped_at == to_datetime(FIRST)


@on_memory
def test_unavailable_storage_is_not_a_rejection_by_middleware(
    storage: Storage, firing: Firing, clock: FakeClock, gate: type[Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_away(*_: object) -> None:
        raise StorageUnavailableError("away")

    row = a_cron_job(next_run_at=to_datetime(FIRST))
    with monkeypatch.context() as patch:
        patch.setattr(storage, "enqueue", is_away)
        with pytest.raises(StorageUnavailableError):
            goes_to(firing, clock, FIRST)
    firing.fire()

    assert times(row) == (1, FIRST, FIRST + EVERY)
    assert row.skipped_at is None


@on_memory
def test_slot_dropped_by_middleware_is_skipped(
    storage: Storage, firing: Firing, clock: FakeClock, gate: type[Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "swallows", True)
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    with told_of(storage) as told:
        goes_to(firing, clock, FIRST)

    assert (times(row), told, ids(storage)) == ((0, None, FIRST + EVERY), [], [])
    assert row.skip_reason == "not enqueued by the middleware"


@on_memory
def test_middleware_error_after_the_enqueue_loses_no_slot(
    storage: Storage,
    firing: Firing,
    clock: FakeClock,
    settings: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings.DJQUEUE = {"MIDDLEWARE": [f"{__name__}.FailsAfterwards"]}
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    goes_to(firing, clock, FIRST)

    assert times(row) == (1, FIRST, FIRST + EVERY)
    assert (row.skipped_at, ids(storage)) == (None, [f"cron:mine:{FIRST}"])
    assert "KeyError: 'late'; 1 of 1 jobs were enqueued" in caplog.text


class FailsAfterwards(Gate):
    """Raises when the job is there."""

    def enqueue(self, batch: Batch, call_next: Callable[[Batch], Any]) -> Any:
        call_next(batch)
        raise KeyError("late")


@on_memory
def test_slow_middleware_does_not_enqueue_a_slot_twice(
    storage: Storage, firing: Firing, clock: FakeClock, gate: type[Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    behind = a_cron_job("behind", next_run_at=to_datetime(FIRST))

    def another_goes_on() -> None:
        monkeypatch.setattr(gate, "late", staticmethod(lambda: None))
        goes_to(another(storage, clock), clock, FIRST + TAKEOVER_AFTER)
        finish(storage, *map(failing, claimed_jobs(storage)))  # ids that may be enqueued again

    monkeypatch.setattr(gate, "late", staticmethod(another_goes_on))
    goes_to(firing, clock, FIRST)

    assert counts(storage) == {State.FAILED: 2}
    assert times(row) == times(behind) == (1, FIRST, FIRST + EVERY)


@pytest.mark.parametrize("died", [False, True], ids=["lives", "died in between"])
def test_each_slot_is_signaled_as_one_enqueue(
    storage: Storage, firing: Firing, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, died: bool
) -> None:
    a_cron_job(next_run_at=to_datetime(FIRST))
    with told_of(storage) as told:
        if died:
            goes_to_its_death(firing, clock, FIRST, monkeypatch, "_finish")
            goes_to(another(storage, clock), clock, FIRST + TAKEOVER_AFTER)
        for _ in range(2):
            goes_to(firing, clock, FIRST + TAKEOVER_AFTER)

    assert told == [("job_enqueued", f"cron:mine:{FIRST}"), ("schedule_fired", f"cron:mine:{FIRST}")]


@on_memory
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"overlap": "skip"}, "the previous job is unfinished"),
        ({"kwargs": {}}, "duplicate of job the-one"),
    ],
)
def test_row_records_why_a_slot_was_skipped(
    storage: Storage,
    firing: Firing,
    clock: FakeClock,
    settings: Any,
    given: dict[str, Any],
    reason: str,
) -> None:
    settings.DJQUEUE = {"DEFAULTS": {"unique_key": "one"}}
    if "overlap" not in given:
        enqueue(storage, id="the-one", unique_key="one")
    row = a_cron_job(next_run_at=to_datetime(FIRST), **given)
    goes_to(firing, clock, FIRST)
    goes_to(firing, clock, FIRST + EVERY)

    row.refresh_from_db()
    assert (row.skipped_at, row.skip_reason) == (to_datetime(FIRST + EVERY), reason)


# Processes that are known to be gone.


def begun_by(row: models.CronJob, process: str) -> None:
    """As if that process had died behind its first step, at the first slot."""
    models.CronJob.objects.filter(pk=row.pk).update(firing_at=to_datetime(FIRST), firing_by=process)


@pytest.fixture(scope="module")
def gone() -> int:
    """The number of a process of this machine that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("storage", ["memory", "redis"], indirect=True)
def test_slot_of_a_dead_process_is_taken_over_soon(
    storage: Storage, firing: Firing, clock: FakeClock, gone: int
) -> None:
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    begun_by(row, f"{gone}@{host_name()}")
    goes_to(firing, clock, FIRST + DEAD_TAKEOVER_AFTER - 1)
    assert times(row) == (0, None, FIRST)  # what it has sent may be on its way

    goes_to(firing, clock, FIRST + DEAD_TAKEOVER_AFTER)

    assert times(row) == (1, FIRST, FIRST + EVERY)
    assert ids(storage) == [f"cron:mine:{FIRST}"]


@on_memory
def test_process_with_a_reused_id_is_not_mistaken_for_a_dead_one(
    storage: Storage, firing: Firing, clock: FakeClock
) -> None:
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    begun_by(row, f"{os.getpid()}@{host_name()}@1")

    goes_to(firing, clock, FIRST + DEAD_TAKEOVER_AFTER)

    assert times(row) == (1, FIRST, FIRST + EVERY)


@on_memory
@pytest.mark.parametrize("where", ["elsewhere", "rebooted", "", "nobody"])
def test_process_on_another_machine_is_not_assumed_dead(
    storage: Storage, firing: Firing, clock: FakeClock, gone: int, where: str
) -> None:
    host = {"elsewhere": "elsewhere/12345678/pid:[1]", "rebooted": f"{host_name()}0"}.get(where)
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    begun_by(row, where if host is None else f"{gone}@{host}")
    goes_to(firing, clock, FIRST + TAKEOVER_AFTER - 1)
    assert times(row) == (0, None, FIRST)

    goes_to(firing, clock, FIRST + TAKEOVER_AFTER)
    assert times(row) == (1, FIRST, FIRST + EVERY)


@pytest.mark.parametrize("storage", ["redis"], indirect=True)
def test_suspended_process_keeps_its_slot(storage: Storage, firing: Firing, clock: FakeClock) -> None:
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        process.send_signal(signal.SIGSTOP)
        begun_by(row, f"{process.pid}@{host_name()}")
        goes_to(firing, clock, FIRST + TAKEOVER_AFTER - 1)
        assert times(row) == (0, None, FIRST)
        process.kill()
    goes_to(firing, clock, FIRST + TAKEOVER_AFTER - 1)

    assert times(row) == (1, FIRST, FIRST + EVERY)


def test_row_records_the_process_that_fires_it(
    storage: Storage, firing: Firing, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    goes_to_its_death(firing, clock, FIRST, monkeypatch, "_send")
    row.refresh_from_db()
    assert row.firing_by == f"{os.getpid()}@{host_name()}{start_mark(os.getpid())}"

    goes_to(another(storage, clock), clock, FIRST + TAKEOVER_AFTER)
    row.refresh_from_db()
    assert (row.firing_at, row.firing_by) == (None, "")


@on_memory
def test_slot_whose_row_was_marked_slowly_is_enqueued_in_the_same_pass(
    storage: Storage, firing: Firing, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    begin = firing._begin

    def slowly(attempts: Any) -> Any:
        begun = begin(attempts)
        clock.advance(10_000)
        return begun

    monkeypatch.setattr(firing, "_begin", slowly)
    goes_to(firing, clock, FIRST)
    assert times(row) == (1, FIRST, FIRST + EVERY)


def test_slot_taken_over_is_not_counted_as_missed(
    storage: Storage, firing: Firing, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = a_cron_job(missed="skip", next_run_at=to_datetime(FIRST))
    goes_to_its_death(firing, clock, FIRST, monkeypatch, "_finish")

    goes_to(another(storage, clock), clock, FIRST + TAKEOVER_AFTER)

    assert ids(storage) == [f"cron:mine:{FIRST}"]
    assert times(row) == (1, FIRST, FIRST + EVERY)


@pytest.mark.dialect
@pytest.mark.parametrize("storage", ["memory", "database", "redis", "cluster"], indirect=True)
def test_concurrent_schedulers_enqueue_each_slot_once(storage: Storage, clock: FakeClock) -> None:
    queues = [f"queue {number}" for number in range(5)]
    rows = [a_cron_job(f"mine {queue}", queue=queue, next_run_at=to_datetime(FIRST)) for queue in queues]
    clock.advance(FIRST - clock.now())
    together = Barrier(4, timeout=PATIENCE)

    def look() -> int:
        try:
            firing = another(storage, clock)
            fired = 0
            for _ in range(3):
                together.wait()
                fired += firing.fire()
            return fired
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(look) for _ in range(4)]
        fired = sum(future.result() for future in futures)

    assert fired == 5
    assert [ids(storage, queue) for queue in queues] == [[f"cron:mine {queue}:{FIRST}"] for queue in queues]
    assert [times(row) for row in rows] == [(1, FIRST, FIRST + EVERY)] * 5


@pytest.mark.dialect
@pytest.mark.parametrize("storage", ["memory", "redis"], indirect=True)
def test_crashing_schedulers_neither_lose_nor_duplicate_slots(
    storage: Storage, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = Random(5)
    rows = [
        a_cron_job(name, schedule="* * * * *", missed="all", next_run_at=to_datetime(FIRST))
        for name in ("one", "two", "three")
    ]
    clock.advance(FIRST - clock.now())

    def may_die() -> None:
        if chance.random() < 0.15:
            raise Died

    def look() -> None:
        try:
            with suppress(Died):
                another(storage, clock).fire()
        finally:
            connection.close()

    with monkeypatch.context() as patch, ThreadPoolExecutor(4) as pool:
        for step in ("_send", "_finish"):
            before(step, may_die, patch)
        for _ in range(20):
            for future in [pool.submit(look) for _ in range(4)]:
                future.result()
            clock.advance(20_000)
    for _ in range(2):
        goes_to(another(storage, clock), clock, clock.now() + TAKEOVER_AFTER)

    found = ids(storage)
    for row in rows:
        executions, last, _ = times(row)
        assert last is not None
        slots = range(FIRST, last + 1, MINUTE)
        assert executions == len(slots) > 5
        assert sorted(one for one in found if f":{row.name}:" in one) == [
            f"cron:{row.name}:{slot}" for slot in slots
        ]


def test_clock_set_back_enqueues_no_slot_again(storage: Storage, firing: Firing, clock: FakeClock) -> None:
    row = a_cron_job()
    firing.fire()
    goes_to(firing, clock, FIRST)

    clock.jump(-2 * EVERY)
    firing.fire()
    goes_to(firing, clock, FIRST + 1)

    assert ids(storage) == [f"cron:mine:{FIRST}"]
    assert times(row) == (1, FIRST, FIRST + EVERY)


@on_memory
def test_schedules_continue_after_the_clock_was_temporarily_ahead(
    storage: Storage, firing: Firing, clock: FakeClock
) -> None:
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    clock.advance(FIRST - clock.now())
    ahead = 10_000 * EVERY
    clock.jump(ahead)
    firing.fire()
    assert times(row) == (1, FIRST, FIRST + ahead + EVERY)

    clock.jump(-ahead)
    firing.fire()
    goes_to(firing, clock, FIRST + EVERY)

    assert sorted(ids(storage)) == [f"cron:mine:{FIRST}", f"cron:mine:{FIRST + EVERY}"]


# Missed slots, and jobs that are not done yet.


@on_memory
@pytest.mark.parametrize(
    ("missed", "numbers"),
    [("one", [0]), ("skip", []), ("all", [5, 6, 7, 8, 9, 10])],
)
def test_missed_slots_follow_the_policy_of_the_row(
    storage: Storage, firing: Firing, clock: FakeClock, missed: str, numbers: list[int]
) -> None:
    row = a_cron_job(missed=missed, missed_window=timedelta(minutes=27))
    firing.fire()

    goes_to(another(storage, clock), clock, FIRST + 10 * EVERY + MINUTE + 1)
    firing.fire()

    slots = [FIRST + number * EVERY for number in numbers]
    assert ids(storage) == [f"cron:mine:{slot}" for slot in slots]
    assert times(row) == (len(slots), slots[-1] if slots else None, FIRST + 11 * EVERY)
    goes_to(firing, clock, FIRST + 11 * EVERY)
    assert ids(storage)[-1] == f"cron:mine:{FIRST + 11 * EVERY}"


@on_memory
def test_slots_less_than_a_minute_late_are_not_missed(
    storage: Storage, firing: Firing, clock: FakeClock
) -> None:
    row = a_cron_job(schedule="", every=timedelta(seconds=1), missed="skip", next_run_at=to_datetime(FIRST))
    goes_to(firing, clock, FIRST + 4_500)

    assert len(ids(storage)) == 5
    assert times(row) == (5, FIRST + 4_000, FIRST + 5_000)


def test_many_missed_slots_are_enqueued_over_several_calls(
    storage: Storage, firing: Firing, clock: FakeClock
) -> None:
    row = a_cron_job(schedule="", every=timedelta(seconds=1), missed="all", next_run_at=to_datetime(FIRST))
    goes_to(firing, clock, FIRST + 250_000)

    assert times(row) == (251, FIRST + 250_000, FIRST + 251_000)
    assert counts(storage) == {State.WAITING: 251}


def test_slot_is_skipped_while_the_previous_job_is_unfinished(
    storage: Storage, firing: Firing, clock: FakeClock
) -> None:
    row = a_cron_job(overlap="skip", next_run_at=to_datetime(FIRST))
    goes_to(firing, clock, FIRST)
    goes_to(firing, clock, FIRST + EVERY)  # it waits
    [claimed] = claimed_jobs(storage)
    goes_to(firing, clock, FIRST + 2 * EVERY)  # it is active
    assert times(row) == (1, FIRST, FIRST + 3 * EVERY)

    finish(storage, completing(claimed))
    goes_to(firing, clock, FIRST + 3 * EVERY)

    assert times(row) == (2, FIRST + 3 * EVERY, FIRST + 4 * EVERY)
    assert [job.id for job in claimed_jobs(storage)] == [f"cron:mine:{FIRST + 3 * EVERY}"]


def test_one_job_can_wait_while_another_is_active(storage: Storage, firing: Firing, clock: FakeClock) -> None:
    row = a_cron_job(overlap="one_pending", next_run_at=to_datetime(FIRST))
    goes_to(firing, clock, FIRST)
    [first] = claimed_jobs(storage)
    for number in (1, 2):
        goes_to(firing, clock, FIRST + number * EVERY)
    assert counts(storage) == {State.ACTIVE: 1, State.WAITING: 1}

    [second] = claimed_jobs(storage)
    finish(storage, retrying(first, delay=10 * EVERY))
    goes_to(firing, clock, FIRST + 3 * EVERY)

    # The first one waits again, and the second one is active.
    assert counts(storage) == {State.ACTIVE: 1, State.DELAYED: 1}
    assert times(row)[0] == 2
    assert second.id == f"cron:mine:{FIRST + EVERY}"


@on_memory
def test_new_overlap_policy_includes_the_last_job(storage: Storage, firing: Firing, clock: FakeClock) -> None:
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    goes_to(firing, clock, FIRST)
    models.CronJob.objects.update(overlap="skip")
    goes_to(firing, clock, FIRST + EVERY)

    assert times(row) == (1, FIRST, FIRST + 2 * EVERY)


@on_memory
def test_schedule_ends_after_its_maximum_number_of_jobs(
    storage: Storage, firing: Firing, clock: FakeClock
) -> None:
    row = a_cron_job(max_executions=3, missed="all", next_run_at=to_datetime(FIRST))
    goes_to(firing, clock, FIRST)
    goes_to(firing, clock, FIRST + 9 * EVERY)
    goes_to(firing, clock, FIRST + 20 * EVERY)

    assert len(ids(storage)) == 3
    assert times(row) == (3, FIRST + 2 * EVERY, None)
    assert not row.enabled


@on_memory
def test_a_schedule_keeps_to_its_start_and_its_end(
    storage: Storage, firing: Firing, clock: FakeClock
) -> None:
    row = a_cron_job(start_at=to_datetime(FIRST + EVERY), end_at=to_datetime(FIRST + 2 * EVERY + MINUTE))
    firing.fire()
    for number in range(5):
        goes_to(firing, clock, FIRST + number * EVERY)

    assert ids(storage) == [f"cron:mine:{FIRST + number * EVERY}" for number in (1, 2)]
    assert times(row) == (2, FIRST + 2 * EVERY, None)
    assert not row.enabled


@on_memory
def test_jitter_delays_each_slot_by_a_fixed_part(storage: Storage, firing: Firing, clock: FakeClock) -> None:
    row = a_cron_job(jitter=timedelta(minutes=4), next_run_at=to_datetime(FIRST))
    at = row.timing().fires_at(FIRST, "mine")
    assert FIRST < at <= FIRST + 4 * MINUTE

    goes_to(firing, clock, at - 1)
    assert ids(storage) == []
    goes_to(firing, clock, at)
    assert ids(storage) == [f"cron:mine:{FIRST}"]
    assert times(row) == (1, FIRST, FIRST + EVERY)


def test_slot_rejected_by_a_unique_key_is_not_counted(
    storage: Storage, firing: Firing, clock: FakeClock, settings: Any
) -> None:
    settings.DJQUEUE = {"DEFAULTS": {"unique_key": "one"}}
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    goes_to(firing, clock, FIRST)
    goes_to(firing, clock, FIRST + EVERY)

    assert times(row) == (1, FIRST, FIRST + 2 * EVERY)
    assert ids(storage) == [f"cron:mine:{FIRST}"]


def test_scheduled_job_has_the_options_of_its_job_type(
    storage: Storage, firing: Firing, clock: FakeClock
) -> None:
    def send(to: str) -> None: ...

    job(name=NAME, queue="mail", priority=7, max_attempts=1, timeout=9, result_ttl=1)(send)
    try:
        a_cron_job(next_run_at=to_datetime(FIRST))
        a_cron_job("other", queue="elsewhere", next_run_at=to_datetime(FIRST))
        goes_to(firing, clock, FIRST)
    finally:
        registry._types.pop(NAME)

    jobs = sorted(claimed_jobs(storage), key=lambda claimed: claimed.queue)
    assert [claimed.queue for claimed in jobs] == ["elsewhere", "mail"]
    for claimed in jobs:
        assert (claimed.options.priority, claimed.options.max_attempts) == (7, 1)
        assert (claimed.options.timeout, claimed.options.result_ttl) == (9_000, 1_000)
        assert claimed.options.kept == MIN_RETENTION


# Rows that do not fire.


@on_memory
def test_a_disabled_row_does_not_fire_until_it_is_enabled(
    storage: Storage, firing: Firing, clock: FakeClock
) -> None:
    row = a_cron_job(enabled=False, next_run_at=to_datetime(FIRST))
    goes_to(firing, clock, FIRST + MINUTE)
    assert ids(storage) == []
    assert times(row) == (0, None, FIRST)

    models.CronJob.objects.update(enabled=True)
    firing.fire()

    assert ids(storage) == [f"cron:mine:{FIRST}"]


@on_memory
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"schedule": "every now and then"}, "'every now and then' is not a valid cron expression"),
        ({"schedule": "@sometimes"}, "unknown alias '@sometimes'"),
        ({"schedule": "61 * * * *"}, "'61 * * * *' is not a valid cron expression"),
        ({"timezone": "Atlantis/Capital"}, "'Atlantis/Capital' is not the name of a time zone"),
    ],
)
@pytest.mark.parametrize("at", [None, FIRST], ids=["new", "due"])
def test_invalid_row_is_disabled_without_affecting_others(
    storage: Storage,
    firing: Firing,
    clock: FakeClock,
    caplog: pytest.LogCaptureFixture,
    wrong: dict[str, str],
    why: str,
    at: int | None,
) -> None:
    due = None if at is None else to_datetime(at)
    bad = a_cron_job("bad", next_run_at=due, **wrong)
    good = a_cron_job("good", next_run_at=to_datetime(FIRST))
    goes_to(firing, clock, FIRST)
    firing.fire()

    assert ids(storage) == [f"cron:good:{FIRST}"]
    bad.refresh_from_db()
    good.refresh_from_db()
    assert (bad.enabled, bad.executions, good.enabled) == (False, 0, True)
    [record] = [record for record in caplog.records if record.name == "djqueue.cron"]
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("Schedule bad was disabled: ")
    assert why in record.getMessage()


@on_memory
def test_row_with_unserializable_arguments_is_disabled(
    storage: Storage, firing: Firing, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    row = a_cron_job(args=[2**70], next_run_at=to_datetime(FIRST))
    goes_to(firing, clock, FIRST)

    row.refresh_from_db()
    assert (row.enabled, row.executions) == (False, 0)
    assert ids(storage) == []
    assert "Schedule mine was disabled" in caplog.text


def before(step: str, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have something done each time before a step is taken."""
    original = getattr(Firing, step)

    def wrapped(self: Firing, *args: Any) -> Any:
        action()
        return original(self, *args)

    monkeypatch.setattr(Firing, step, wrapped)


def test_row_deleted_after_it_was_read_fires_nothing(
    storage: Storage, firing: Firing, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_cron_job(next_run_at=to_datetime(FIRST))
    before("_begin", models.CronJob.objects.all().delete, monkeypatch)
    goes_to(firing, clock, FIRST)

    assert ids(storage) == []


@on_memory
def test_row_deleted_after_its_enqueue_stays_deleted(
    storage: Storage, firing: Firing, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_cron_job(next_run_at=to_datetime(FIRST))
    before("_finish", models.CronJob.objects.all().delete, monkeypatch)
    goes_to(firing, clock, FIRST)

    assert ids(storage) == [f"cron:mine:{FIRST}"]
    assert not models.CronJob.objects.exists()


# Rows that change.


@on_memory
def test_a_changed_schedule_takes_effect(
    storage: Storage, firing: Firing, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.schedules, "SYSTEM_CLOCK", clock)  # by which rows are saved
    row = models.CronJob.objects.create(name="mine", job_name=NAME, schedule="@yearly", args=["old"])
    goes_to(firing, clock, FIRST)
    assert ids(storage) == []

    row.refresh_from_db()
    row.schedule, row.args = "*/5 * * * *", ["new"]
    row.save()
    firing.fire()
    assert ids(storage) == []
    goes_to(firing, clock, FIRST + EVERY)

    [claimed] = claimed_jobs(storage)
    assert claimed.id == f"cron:mine:{FIRST + EVERY}"
    assert decode(claimed.payload, MSGPACK)["args"] == ["new"]
    assert times(row) == (1, FIRST + EVERY, FIRST + 2 * EVERY)


@on_memory
def test_schedule_changed_by_bulk_update_takes_effect(
    storage: Storage, firing: Firing, clock: FakeClock
) -> None:
    row = a_cron_job(schedule="@yearly")
    firing.fire()
    models.CronJob.objects.filter(name="mine").update(schedule="*/5 * * * *")
    assert times(row)[2] is None

    firing.fire()
    assert times(row) == (0, None, FIRST)


@pytest.mark.dialect
@on_memory
def test_editing_a_row_keeps_the_values_of_the_scheduler(
    storage: Storage, firing: Firing, clock: FakeClock
) -> None:
    a_cron_job(next_run_at=to_datetime(FIRST))
    edited = models.CronJob.objects.get()
    goes_to(firing, clock, FIRST)

    edited.args = ["new"]
    edited.save()

    assert times(edited) == (1, FIRST, FIRST + EVERY)
    assert edited.args == ["new"]


@on_memory
@pytest.mark.parametrize("step", ["_begin", "_send", "_finish"])
def test_a_schedule_changed_while_its_slot_is_fired_keeps_the_new_time(
    storage: Storage, firing: Firing, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    changed = FIRST + 3 * MINUTE

    def change() -> None:
        models.CronJob.objects.filter(schedule="*/5 * * * *").update(
            schedule="18 * * * *", next_run_at=to_datetime(changed)
        )

    before(step, change, monkeypatch)
    goes_to(firing, clock, FIRST)
    old = [] if step == "_begin" else [FIRST]
    assert times(row) == (len(old), FIRST if old else None, changed)

    goes_to(firing, clock, changed)
    assert ids(storage) == [f"cron:mine:{slot}" for slot in (*old, changed)]
    assert times(row) == (len(old) + 1, changed, changed + 60 * MINUTE)


@pytest.mark.dialect
@on_memory
def test_a_row_disabled_while_its_slot_is_enqueued_stays_disabled(
    storage: Storage, firing: Firing, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = a_cron_job(next_run_at=to_datetime(FIRST))
    before("_finish", lambda: models.CronJob.objects.update(enabled=False), monkeypatch)
    goes_to(firing, clock, FIRST)
    goes_to(firing, clock, FIRST + EVERY)

    row.refresh_from_db()
    assert not row.enabled
    assert ids(storage) == [f"cron:mine:{FIRST}"]


@on_memory
def test_schedule_without_further_times_ends(storage: Storage, firing: Firing, clock: FakeClock) -> None:
    row = a_cron_job(next_run_at=to_datetime(FIRST), end_at=to_datetime(FIRST))
    goes_to(firing, clock, FIRST)
    firing.fire()

    row.refresh_from_db()
    assert not row.enabled
    assert times(row) == (1, FIRST, None)
    assert ids(storage) == [f"cron:mine:{FIRST}"]


# Against a model.


class Model:
    """One schedule, every slot of which is looked at by itself; of its jobs it knows the ends."""

    def __init__(self, overlap: str, missed: str) -> None:
        self.overlap = overlap
        self.missed = missed
        self.next = FIRST
        self.jobs: dict[int, State] = {}

    def look(self, now: int) -> None:
        due = list(range(self.next, now + 1, EVERY))
        if not due:
            return
        self.next = due[-1] + EVERY
        if now - due[0] > MINUTE:
            due = {
                "one": due[:1],
                "skip": [slot for slot in due if now - slot <= MINUTE],
                "all": [slot for slot in due if now - slot <= 4 * EVERY],
            }[self.missed]
        for slot in due:
            states = set(self.jobs.values())
            refused = {
                "allow": set(),
                "skip": {State.WAITING, State.ACTIVE},
                "one_pending": {State.WAITING},
            }[self.overlap]
            if states.isdisjoint(refused):
                self.jobs[slot] = State.WAITING


STEPS = st.sampled_from([0, MINUTE, EVERY, EVERY + 2 * MINUTE, 3 * EVERY, 7 * EVERY])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    overlap=st.sampled_from(["allow", "skip", "one_pending"]),
    missed=st.sampled_from(["one", "skip", "all"]),
    steps=st.lists(STEPS | st.sampled_from(["claim", "complete"]), max_size=12),
)
def test_enqueued_jobs_match_a_model_of_every_slot(
    tables: None, overlap: str, missed: str, steps: list[int | str]
) -> None:
    models.CronJob.objects.all().delete()
    clock = FakeClock(now=FIRST - 1)
    storage, model = MemoryStorage(clock=clock), Model(overlap, missed)
    firing = Firing(storage, "default", clock=clock)
    window = timedelta(milliseconds=4 * EVERY)
    a_cron_job(overlap=overlap, missed=missed, missed_window=window, next_run_at=to_datetime(FIRST))
    active: list[Claimed] = []
    for step in steps:
        if isinstance(step, int):
            clock.advance(step)
            firing.fire()
            model.look(clock.now())
        elif step == "claim":
            for claimed in claim(storage, 1, names=[NAME]):
                active.append(claimed)
                model.jobs[int(claimed.id.rpartition(":")[2])] = State.ACTIVE
        elif active:
            claimed = active.pop(0)
            finish(storage, completing(claimed))
            model.jobs[int(claimed.id.rpartition(":")[2])] = State.COMPLETED

    found = {
        int(record.id.rpartition(":")[2]): record.state for record in storage.reads.page(QUEUE, None, 100)
    }
    assert found == model.jobs
    row = models.CronJob.objects.get()
    assert (row.executions, row.next_run_at) == (len(model.jobs), to_datetime(model.next))
