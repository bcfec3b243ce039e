"""Schedules fired by the sweep of a worker."""

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from django.db import OperationalError

from djqueue import Queue, Worker, models
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.units import to_datetime
from djqueue.operations.firing import Firing
from djqueue.operations.sweeps import firing_of, scheduling
from djqueue.storage import chores
from djqueue.storage.base import Storage
from djqueue.storage.chores import chores_of
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.memory import MemoryStorage
from djqueue.storage.redis import RedisStorage
from djqueue.storage.scheduler import SchedulerStorage
from djqueue.testing.clock import FakeClock
from tests.support import PATIENCE, eventually

LONG_AGO = 1_700_000_000_000


def a_row_that_is_due() -> models.CronJob:
    row = models.CronJob(
        name="mine", job_name="work", schedule="@yearly", args=[1], next_run_at=to_datetime(LONG_AGO)
    )
    models.CronJob.objects.bulk_create([row])
    return row


@pytest.mark.parametrize("kind", ["memory", "database", "redis"])
def test_worker_fires_due_schedules(
    tables: None, kind: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr("djqueue.runtime.maintenance.INTERVAL", 0.01)
    row = a_row_that_is_due()
    makers: dict[str, Callable[[], Storage]] = {
        "memory": MemoryStorage,
        "database": DatabaseStorage,
        "redis": lambda: RedisStorage(url=request.getfixturevalue("redis_url"), timeout=PATIENCE),
    }
    storage = makers[kind]()
    seen: list[Any] = []
    try:
        with Worker(storage, handlers={"work": lambda job: seen.append(job.payload)}):
            eventually(lambda: seen)
            eventually(lambda: models.CronJob.objects.get().executions == 1)
    finally:
        storage.close()
    assert seen == [{"args": [1], "kwargs": {}}]
    assert row.name == "mine"


def test_schedules_do_not_wait_for_other_chores(tables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djqueue.runtime.maintenance.INTERVAL", 0.01)
    begun, go_on = Event(), Event()

    def hang() -> None:
        begun.set()
        go_on.wait(PATIENCE)

    monkeypatch.setitem(chores.makers, "alerts", lambda _storage: hang)
    with Worker(MemoryStorage(), handlers={"work": lambda job: None}):
        assert begun.wait(PATIENCE)
        a_row_that_is_due()
        eventually(lambda: models.CronJob.objects.get().executions == 1)
        go_on.set()


def the_scheduler(folder: Path) -> SchedulerStorage:
    storage = SchedulerStorage(folder=folder, clock=FakeClock(now=LONG_AGO))
    storage.role.starts_here = True
    storage.connect()
    return storage


def test_only_the_scheduler_process_fires_the_schedules_of_its_storage(tables: None, tmp_path: Path) -> None:
    a_row_that_is_due()
    client = SchedulerStorage(folder=tmp_path / "s", clock=FakeClock(now=LONG_AGO))
    storage = the_scheduler(tmp_path / "s")
    try:
        scheduling(client)()
        assert models.CronJob.objects.get().executions == 0
        scheduling(storage)()
        assert models.CronJob.objects.get().executions == 1
    finally:
        client.close()
        storage.close()


def test_slot_of_a_killed_scheduler_is_taken_over_at_once(
    tables: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_row_that_is_due()
    storage = the_scheduler(tmp_path / "s")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Firing, "_send", lambda *_: {}["died"])
            with pytest.raises(KeyError):
                firing_of(storage).fire()
        assert models.CronJob.objects.get().firing_at is not None
        assert firing_of(storage).fire() == 1
    finally:
        storage.close()


def test_slot_begun_by_another_memory_process_is_skipped(
    tables: None, caplog: pytest.LogCaptureFixture
) -> None:
    row = a_row_that_is_due()
    models.CronJob.objects.update(
        end_at=to_datetime(LONG_AGO), next_run_at=to_datetime(LONG_AGO), firing_at=to_datetime(LONG_AGO)
    )
    storage = MemoryStorage()
    assert firing_of(storage).fire() == 0
    assert storage.queues.names() == []
    assert (
        f"Schedule {row.name}: skipped its run at 2023-11-14T22:13:20+00:00, which may have been"
        in caplog.text
    )


def test_memory_storage_has_the_scheduling_chore() -> None:
    assert "schedules" in chores_of(MemoryStorage())


class BrokenFiring:
    def __init__(self, error: Exception) -> None:
        self.clock = FakeClock()
        self.error: Exception | None = error
        self.looks = self.left = 0

    def fire(self) -> int:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return 0

    def leave(self) -> None:
        self.left += 1


def test_missing_schedule_tables_are_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    firing = BrokenFiring(OperationalError("no such table: djqueue_cron_job"))
    monkeypatch.setattr("djqueue.operations.sweeps.firing_of", lambda _: firing)
    look = scheduling(MemoryStorage())
    look()
    look()
    assert (firing.looks, firing.left) == (1, 1)
    assert [record for record in caplog.records if record.name == "djqueue.cron"] == []

    firing.error = None
    firing.clock.advance(60_000)
    look()
    firing.error = OperationalError("server closed the connection\n\tunexpectedly")
    with pytest.raises(StorageUnavailableError, match="the connection unexpectedly"):
        look()
    assert (firing.looks, firing.left) == (3, 2)


def test_unavailable_storage_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    firing = BrokenFiring(StorageUnavailableError("away"))
    monkeypatch.setattr("djqueue.operations.sweeps.firing_of", lambda _: firing)
    with pytest.raises(StorageUnavailableError):
        scheduling(MemoryStorage())()


def test_queues_see_what_schedules_enqueue(tables: None) -> None:
    a_row_that_is_due()
    storage = MemoryStorage()
    firing_of(storage).fire()
    info = Queue("default", storage=storage).get_job(f"cron:mine:{LONG_AGO}")
    assert info is not None
    assert info.name == "work"
