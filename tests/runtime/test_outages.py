"""Unavailable storages: results are kept, and reported after the outage."""

import asyncio
import logging
import threading

import pytest

from djqueue import Queue, Worker
from djqueue.core.errors import StorageUnavailableError
from djqueue.runtime.events import OutageLog
from djqueue.storage.base import Storage
from tests.runtime.running import HANDLER, messages, reached, working
from tests.runtime.storages import FailingStorage
from tests.support import PATIENCE, aeventually


@pytest.fixture
def storage() -> FailingStorage:
    return FailingStorage()


async def test_results_are_kept_until_the_storage_is_available_again(storage, queue, caplog, monkeypatch):
    monkeypatch.setattr("djqueue.runtime.events.OUTAGE_LOG_DELAY", 0)
    done = asyncio.Event()

    async def handler(job):
        await done.wait()
        return job.payload

    ids = [result.id for result in queue.enqueue_many(range(5), name=HANDLER)]
    async with working(storage, handler, concurrency=5) as worker:
        await aeventually(lambda: worker.running == 5)
        storage.away.set()
        done.set()
        await aeventually(lambda: storage.refused.count("finish") >= 4)
        assert worker.running == 0
        assert queue.counts()["active"] == 5
        storage.away.clear()
        for job_id in ids:
            await reached(queue, job_id, "completed")
        await aeventually(lambda: any("available again" in line for line in messages(caplog)))

    assert [queue.get_result(job_id) for job_id in ids] == [0, 1, 2, 3, 4]

    told = [line for line in messages(caplog) if "the storage" in line]
    assert len(told) == 2
    assert "has been unavailable" in told[0]
    assert "switched off" in told[0]
    assert "available again" in told[1]
    assert not [record for record in caplog.records if record.exc_info], "an outage needs no traceback"


async def test_short_outage_is_logged_once_when_it_is_over(storage, queue, caplog):
    caplog.set_level("INFO", "djqueue")
    async with working(storage, lambda job: None, heartbeat=0.01):
        storage.away.set()
        queue.enqueue(name=HANDLER)
        await aeventually(lambda: {"finish", "sweep"} <= set(storage.refused))
        storage.away.clear()
        await aeventually(lambda: queue.counts()["completed"] == 1)
        again = "available again after"
        await aeventually(lambda: any(again in line for line in messages(caplog, logging.INFO)))

    told = [line for line in messages(caplog, logging.INFO) if "available" in line]
    assert len(told) == 1
    assert "available again after" in told[0]


def test_outage_ends_when_every_failed_operation_works_again(caplog):
    now = 0
    outages = OutageLog("w", lambda: now)
    away = StorageUnavailableError("away")

    def lines():
        return [line.partition("storage ")[2] for line in messages(caplog)]

    outages.failed("claim and finish", away)
    now = 6_000
    outages.failed("renew", away)
    assert len(lines()) == 1
    for moment in (7_000, 8_000, 9_000):
        now = moment
        outages.worked("claim and finish")  # As a limiter that refuses does, while its queue is away.
        outages.failed("renew", away)
        outages.failed("claim and finish", away)
    assert len(lines()) == 1, lines()
    now = 10_000
    outages.worked("claim and finish")
    now = 11_000
    outages.worked("renew")
    assert lines()[1:] == ["is available again after 10.0 s; reporting the jobs that finished meanwhile"]


def test_operation_without_retry_does_not_prolong_an_outage(caplog):
    now = 0
    outages = OutageLog("w", lambda: now)
    outages.failed("report", StorageUnavailableError("away"))
    now = 20_000
    outages.failed("renew", StorageUnavailableError("away"))
    now = 21_000
    outages.worked("renew")
    assert "available again after 21.0 s" in messages(caplog)[-1]


def test_successful_work_ends_an_outage_of_operations_without_retry(caplog):
    caplog.set_level(logging.INFO)
    now = 0
    outages = OutageLog("w", lambda: now)
    outages.failed("claim and finish", StorageUnavailableError("away"))
    outages.failed("report", StorageUnavailableError("away"))
    now = 1_000
    outages.worked("claim and finish")
    assert messages(caplog, logging.INFO) == []
    now = 5_000
    outages.worked("claim and finish")
    assert "available again after 1.0 s" in messages(caplog, logging.INFO)[-1]


def test_lasting_outage_is_logged_once_a_minute(caplog):
    now = 0
    outages = OutageLog("w", lambda: now)

    for second in range(200):
        now = 1_000 * second
        outages.failed("claim and finish", StorageUnavailableError("away"))

    assert [line.split()[8] for line in messages(caplog)] == ["5.0", "65.0", "125.0", "185.0"]


def test_outages_and_faults_that_come_and_go_are_logged_once_a_minute(caplog):
    caplog.set_level(logging.INFO)
    now = 0
    outages = OutageLog("w", lambda: now)

    for tenth in range(1_200):
        now = 100 * tenth
        for error in (StorageUnavailableError("away"), ZeroDivisionError("a fault")):
            outages.failed("claim and finish", error)
            outages.worked("claim and finish")

    lines = messages(caplog, logging.INFO)
    assert len([line for line in lines if "available again" in line]) == 2
    assert len([line for line in lines if "the storage failed" in line]) == 2
    assert len([line for line in lines if "works again" in line]) == 2


async def test_unexpected_storage_error_is_logged_once_with_its_traceback(
    storage, queue, caplog, monkeypatch
):
    monkeypatch.setattr("djqueue.runtime.maintenance.INTERVAL", 0.01)
    tries = []

    def broken():
        tries.append(1)
        raise ZeroDivisionError("a fault")

    async with working(storage, lambda job: None):
        storage.sweep = broken
        await aeventually(lambda: len(tries) >= 3)

    told = [record for record in caplog.records if "failed (sweep)" in record.getMessage()]
    assert len(told) == 1
    assert told[0].exc_info


async def test_unavailable_storage_is_retried_with_backoff(storage, queue):
    async with working(storage, lambda job: None, maintain=False):
        storage.away.set()
        for number in range(200):
            queue.enqueue(number, name=HANDLER)
            await asyncio.sleep(0)
        await aeventually(lambda: storage.refused.count("finish") >= 2)
        assert storage.refused.count("finish") <= 5
        storage.away.clear()
        await aeventually(lambda: queue.counts()["completed"] == 200)


async def test_jobs_are_claimed_after_an_outage_without_a_wake_up(storage, queue):
    async with working(storage, lambda job: None):
        storage.away.set()
        job_id = queue.enqueue(name=HANDLER).id
        await aeventually(lambda: "finish" in storage.refused)
        storage.away.clear()
        await reached(queue, job_id, "completed")


async def test_sweeps_continue_after_an_outage(storage, queue, monkeypatch):
    monkeypatch.setattr("djqueue.runtime.maintenance.INTERVAL", 0.01)
    swept = threading.Event()
    async with working(storage, lambda job: None):
        storage.away.set()
        await aeventually(lambda: storage.refused.count("sweep") >= 3)
        storage.away.clear()
        storage.sweep = swept.set
        assert await asyncio.to_thread(swept.wait, PATIENCE)


async def test_worker_without_maintenance_never_sweeps(storage, queue, monkeypatch):
    monkeypatch.setattr("djqueue.runtime.maintenance.INTERVAL", 0.001)
    storage.away.set()
    async with working(storage, lambda job: None, maintain=False):
        await aeventually(lambda: "finish" in storage.refused)
        storage.away.clear()

    assert "sweep" not in storage.refused


async def test_worker_can_be_stopped_during_an_outage_and_logs_unreported_results(
    storage, queue, monkeypatch, caplog
):
    """It tries for a while to tell of its last jobs, and says what it could not tell."""
    monkeypatch.setattr("djqueue.runtime.shutdown.RELEASE_AFTER", 0.01)
    monkeypatch.setattr("djqueue.runtime.shutdown.REPORT_TIMEOUT", 0.05)
    done = asyncio.Event()

    async def handler(job):
        await done.wait()

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler, shutdown_timeout=0) as worker:
        await aeventually(lambda: worker.running == 1)
        storage.away.set()
        done.set()

    assert storage.reads.states("work", [job_id])[0] == "active"
    assert any("could not report the results" in line for line in messages(caplog))


async def test_worker_stops_although_the_storage_never_answers(monkeypatch, caplog):
    for name in ("RELEASE_AFTER", "REPORT_TIMEOUT", "CALL_TIMEOUT"):
        monkeypatch.setattr(f"djqueue.runtime.shutdown.{name}", 0.01)
    monkeypatch.setattr("djqueue.runtime.worker.UNREGISTER_TIMEOUT", 0.01)
    done, hangs = asyncio.Event(), asyncio.Event()

    class Hanging(FailingStorage):
        afinish = Storage.afinish

        async def acall(self, method, *args, **kwargs):
            if self.away.is_set():
                hangs.set()
                await asyncio.Event().wait()
            return await super().acall(method, *args, **kwargs)

    async def handler(job):
        await done.wait()

    storage = Hanging()
    Queue("work", storage=storage).enqueue(name=HANDLER)
    async with working(storage, handler, shutdown_timeout=0.01, maintain=False) as worker:
        await aeventually(lambda: worker.running == 1)
        storage.away.set()
        done.set()
        await hangs.wait()

    assert worker.abandoned == 1
    assert any("could not report the results" in line for line in messages(caplog))


async def test_idle_worker_can_be_stopped_during_an_outage(storage, queue):
    async with working(storage, lambda job: None):
        storage.away.set()
        queue.enqueue(name=HANDLER)
        await aeventually(lambda: "finish" in storage.refused)

    assert queue.counts()["waiting"] == 1


async def test_storage_unavailable_at_start_raises_in_the_caller():
    class Nowhere(FailingStorage):
        def connect(self):
            self.away.set()
            self._check("connect")

    worker = Worker(Nowhere(), handlers={HANDLER: print})

    with pytest.raises(Exception, match="switched off"):
        await worker.run()


async def test_worker_starts_if_the_storage_fails_right_after_connecting(caplog, monkeypatch):
    class LeavingStorage(FailingStorage):
        def connect(self):
            super().connect()
            self.away.set()

    storage = LeavingStorage()
    register = storage.workers.register

    def registering(info):
        storage._check("register")
        return register(info)

    monkeypatch.setattr(storage.workers, "register", registering)
    queue = Queue("work", storage=storage)
    caplog.set_level("INFO", "djqueue")
    async with working(storage, lambda job: None, worker_id="w") as worker:
        await aeventually(lambda: "register" in storage.refused and "finish" in storage.refused)
        storage.away.clear()
        await reached(queue, queue.enqueue(name=HANDLER).id, "completed")
        await aeventually(lambda: [info.id for info in storage.workers.all()] == [worker.id])
        await aeventually(lambda: any("available again" in line for line in messages(caplog, logging.INFO)))

    told = [line for line in messages(caplog, logging.INFO) if "the storage" in line]
    assert len(told) == 1, "an outage at the start is one line, as any other"


async def test_progress_and_log_lines_are_kept_in_order_during_an_outage(storage):
    queue = Queue("work", storage=storage)
    said, done = asyncio.Event(), asyncio.Event()

    async def handler(job):
        job.log("before")
        job.progress(1)
        storage.away.set()
        said.set()
        await done.wait()
        job.log("after")
        job.progress(2)

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler):
        await said.wait()
        await aeventually(lambda: "report" in storage.refused)
        done.set()
        storage.away.clear()
        await reached(queue, job_id, "completed")

    info = queue.get_job(job_id)
    assert [line for _, line in info.logs] == ["before", "after"]
    assert info.progress == 2
