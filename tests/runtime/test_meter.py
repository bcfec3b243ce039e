"""Durations of waits and attempts that workers report."""

import pytest

from djqueue.core.backoff import Backoff
from djqueue.core.engine import EngineWorkers
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.metrics import RunStats
from djqueue.runtime import reports
from djqueue.runtime.worker import Worker
from djqueue.storage.memory import MemoryStorage
from djqueue.testing.factories import QUEUE, a_completed_job, enqueue, enqueue_many
from tests.support import eventually


class Told(MemoryStorage):
    """Keeps what it is told, unless it is away."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[RunStats] = []
        self.away = 0
        self.workers = ToldWorkers(self)


class ToldWorkers(EngineWorkers):
    """Hands statistics to the storage."""

    def __init__(self, storage: Told) -> None:
        super().__init__(storage.engine.context)
        self._storage = storage

    def record_runs(self, stats):
        if self._storage.away:
            self._storage.away -= 1
            raise StorageUnavailableError("away")
        self._storage.told += stats


async def ok(job):
    return None


async def fail(job):
    raise ValueError("no")


HANDLERS = {"ok": ok, "fail": fail}


def test_worker_reports_durations_by_job_name_when_it_stops():
    storage = Told()
    enqueue_many(storage, 5, name="ok")
    enqueue(storage, name="fail", max_attempts=1)

    with Worker(storage, handlers=HANDLERS, until_empty=True) as worker:
        worker.join()

    told = {one.name: one for one in storage.told}
    assert told.keys() == {"ok", "fail"}
    assert told["ok"][:6] == (QUEUE, "ok", 5, 0, 0, 0)
    assert told["fail"][2:6] == (0, 0, 1, 0)
    assert (told["ok"].wait.total, told["ok"].run.total) == (5, 5)


def test_waiting_times_count_first_attempts_of_jobs_without_dependencies():
    storage = Told()
    enqueue(storage, name="fail", max_attempts=3, backoff=Backoff(kind="linear", base=1, jitter=0.0))
    done = a_completed_job(storage, queue="before")
    enqueue(storage, name="ok", depends_on=(("before", done),))

    with Worker(storage, handlers=HANDLERS, until_empty=True) as worker:
        worker.join()

    told = {one.name: one for one in storage.told}
    assert (told["fail"].wait.total, told["fail"].run.total) == (1, 3)
    assert (told["fail"].retried, told["fail"].failed) == (2, 1)
    assert (told["ok"].wait.total, told["ok"].run.total) == (0, 1)


def test_worker_reports_durations_periodically_and_repeats_failed_reports(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reports, "METRICS_INTERVAL", 0.01)
    storage = Told()
    storage.away = 2
    enqueue_many(storage, 3, name="ok")

    with Worker(storage, handlers=HANDLERS):
        eventually(lambda: sum(one.completed for one in storage.told) == 3)
        enqueue_many(storage, 2, name="ok")
        eventually(lambda: sum(one.run.total for one in storage.told) == 5)
