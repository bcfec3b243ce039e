"""A worker warns about jobs that no live worker can run, and does not repeat itself."""

from random import Random

import pytest

from djqueue import Queue, Worker
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.workers import WorkerInfo
from djqueue.runtime.maintenance import (
    UNHANDLED_CHECK_INTERVAL,
    UNHANDLED_LOG_INTERVAL,
    Maintenance,
    UnhandledWatch,
)
from djqueue.storage.memory import MemoryStorage
from djqueue.testing.clock import FakeClock
from tests.runtime.running import working
from tests.support import aeventually


def messages(caplog) -> list[str]:
    """The worker's; hints about names come on a thread of their own, at any time."""
    return [entry.getMessage() for entry in caplog.records if entry.name == "djqueue.worker"]


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def watched(clock):
    storage = MemoryStorage(clock=clock)
    storage.workers.register(WorkerInfo("w1", "host", 7, None, ("handler",), 4, 1))
    worker = Worker(storage, handlers={}, worker_id="w1", clock=clock)
    return storage, UnhandledWatch(storage, worker.events, clock, None)


def test_unhandled_job_name_is_logged_once_with_advice(watched, clock, caplog):
    storage, watch = watched
    queue = Queue("emails", storage=storage)
    queue.enqueue_many([1, 2], name="shop.new")
    queue.enqueue(1, name="handler")
    for _ in range(3):
        clock.advance(UNHANDLED_CHECK_INTERVAL)
        watch.look()
    [line] = messages(caplog)
    assert line.startswith(
        "Jobs named shop.new are waiting in queue emails (2), and no live worker has a handler for them."
    )
    assert "Deploy the code" in line

    queue.enqueue(1, name="shop.newer")
    clock.advance(UNHANDLED_CHECK_INTERVAL)
    watch.look()
    assert len(messages(caplog)) == 2


def test_unhandled_jobs_are_checked_every_ten_seconds_and_not_at_worker_start(watched, clock, caplog):
    storage, watch = watched
    Queue("emails", storage=storage).enqueue(1, name="shop.new")
    clock.advance(UNHANDLED_CHECK_INTERVAL - 1)
    watch.look()
    assert messages(caplog) == []
    clock.advance(1)
    watch.look()
    assert len(messages(caplog)) == 1
    Queue("emails", storage=storage).enqueue(1, name="shop.newer")
    watch.look()
    assert len(messages(caplog)) == 1


def test_unhandled_job_name_is_logged_again_after_an_hour(watched, clock, caplog):
    storage, watch = watched
    Queue("emails", storage=storage).enqueue(1, name="shop.new")
    clock.advance(UNHANDLED_CHECK_INTERVAL)
    watch.look()
    clock.advance(UNHANDLED_LOG_INTERVAL - 1)
    watch.look()
    assert len(messages(caplog)) == 1
    clock.advance(UNHANDLED_CHECK_INTERVAL)
    watch.look()
    assert len(messages(caplog)) == 2


async def test_running_worker_logs_unhandled_jobs(storage, queue, caplog, monkeypatch):
    monkeypatch.setattr("djqueue.runtime.maintenance.UNHANDLED_CHECK_INTERVAL", 0)
    queue.enqueue(1, name="shop.new")
    async with working(storage, lambda job: None):
        await aeventually(lambda: any("named shop.new are waiting" in line for line in messages(caplog)))


def test_first_sweep_after_a_failed_one_renews_leases_before(clock):
    calls, failures = [], [StorageUnavailableError("away"), None, None]

    class Failing(MemoryStorage):
        def maintain(self):
            calls.append("sweep")
            if (failure := failures.pop(0)) is not None:
                raise failure

    def renew():
        calls.append("renew")
        raise StorageUnavailableError("not yet")

    storage = Failing(clock=clock)
    worker = Worker(storage, handlers={}, worker_id="w1", clock=clock)
    maintenance = Maintenance(storage, worker.events, Random(1), renew=renew)
    with pytest.raises(StorageUnavailableError, match="away"):
        maintenance._sweep()
    maintenance._sweep()
    maintenance._sweep()

    assert calls == ["sweep", "renew", "sweep", "sweep"]
