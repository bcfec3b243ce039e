"""Leases: renewed during any handler; a lost lease discards the attempt."""

import asyncio
import threading
import time

import pytest

from djqueue import Queue, Worker
from djqueue.core.job import ClaimRequest
from djqueue.core.policies import QueuePolicy
from djqueue.testing.clock import FakeClock
from tests.runtime.running import HANDLER, messages, reached, record, working
from tests.runtime.storages import FailingStorage, RecordingStorage
from tests.support import PATIENCE, aeventually, eventually

SHORT = QueuePolicy(lease=150)
LONG = QueuePolicy(lease=60_000)


@pytest.fixture
def storage() -> RecordingStorage:
    """A storage whose clock only tests move on."""
    return RecordingStorage(default_policy=LONG, clock=FakeClock())


def wait_for_renewals(storage: RecordingStorage, count: int) -> None:
    """Return when the leases have been renewed so many times more."""
    before = len(storage.renewals)
    eventually(lambda: len(storage.renewals) >= before + count)


def outlast_lease(storage: RecordingStorage) -> None:
    """Let three halves of a lease pass, with renewals between them."""
    for _ in range(3):
        storage.engine.clock.advance(LONG.lease // 2)
        wait_for_renewals(storage, 2)  # The first may have begun before.


@pytest.mark.parametrize("is_async", [True, False])
async def test_job_that_runs_longer_than_its_lease_runs_once(storage, queue, is_async):
    async def asynchronous(job):
        await asyncio.to_thread(outlast_lease, storage)
        return job.attempts

    def synchronous(job):
        outlast_lease(storage)
        return job.attempts

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, asynchronous if is_async else synchronous, heartbeat=0.01):
        done = await reached(queue, job_id, "completed")

    assert (done.attempts, done.stalls) == (1, 0)
    assert done.finished_at - done.started_at > LONG.lease


async def test_handler_that_blocks_the_event_loop_keeps_its_lease(storage, queue):
    """The heartbeat has a thread of its own; so has the maintenance that looks for stalled jobs."""

    async def handler(job):
        outlast_lease(storage)
        return job.attempts

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler, heartbeat=0.01):
        done = await reached(queue, job_id, "completed")

    assert (done.attempts, done.stalls) == (1, 0)
    assert done.finished_at - done.started_at > LONG.lease


async def test_all_leases_of_a_worker_are_renewed_in_one_call(storage, queue):
    done = asyncio.Event()

    async def handler(job):
        await done.wait()

    queue.enqueue_many(range(20), name=HANDLER)
    async with working(storage, handler, concurrency=20, heartbeat=0.01) as worker:
        await aeventually(lambda: worker.running == 20)
        await aeventually(lambda: 20 in storage.renewals)
        done.set()


async def test_queue_with_short_lease_shortens_the_heartbeat_interval(storage):
    relaxed = RecordingStorage(policies={"brief": SHORT})
    brief = Queue("brief", storage=relaxed)

    async def handler(job):
        await asyncio.to_thread(wait_for_renewals, relaxed, 8)

    async with working(relaxed, handler, heartbeat=600):
        await reached(brief, brief.enqueue(name=HANDLER).id, "completed")


async def test_lost_lease_cancels_the_handler_and_discards_its_result(storage, queue, caplog):
    async def handler(job):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return job.cancelled.is_set()

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler, heartbeat=0.01) as worker:
        await aeventually(lambda: worker.running == 1)
        queue.obliterate(force=True)
        await aeventually(lambda: worker.counters.lost == 1)
        assert worker.running == 0

    assert queue.get_job(job_id) is None
    assert worker.counters.completed == 0
    assert any("its result was discarded" in line for line in messages(caplog))


async def test_sync_handler_with_lost_lease_is_notified_and_keeps_its_slot(storage, queue):
    """A thread cannot be stopped: as long as it works, its slot is taken."""
    told, go_on = threading.Event(), threading.Event()

    def handler(job):
        assert job.cancelled.wait(PATIENCE)
        told.set()
        assert go_on.wait(PATIENCE)

    queue.enqueue(name=HANDLER)
    async with working(storage, handler, concurrency=1, heartbeat=0.01) as worker:
        await aeventually(lambda: worker.running == 1)
        queue.obliterate(force=True)
        assert await asyncio.to_thread(told.wait, PATIENCE)
        later = queue.enqueue(name="other").id
        assert worker.running == 1
        assert record(queue, later).state == "waiting"
        go_on.set()
        await aeventually(lambda: worker.running == 0 and worker.counters.lost == 1)


async def test_result_with_stale_token_is_rejected_and_logged(storage, queue, caplog):
    """The job ends before the heartbeat could notice: the storage's answer says so."""

    async def handler(job):
        storage.queues.obliterate("work", force=True)
        return "of no interest"

    queue.enqueue(name=HANDLER)
    async with working(storage, handler) as worker:
        await aeventually(lambda: worker.counters.lost == 1)

    assert queue.counts()["completed"] == 0
    assert any("Lost the lease" in line for line in messages(caplog))


async def test_job_of_crashed_worker_runs_again_and_counts_one_stall(storage, queue):
    """The crash: a worker that neither ends its job nor sends a heartbeat."""
    job_id = queue.enqueue(name=HANDLER).id
    assert len(storage.claim(ClaimRequest("crashed", 1, frozenset({HANDLER}))).jobs) == 1
    storage.engine.clock.advance(LONG.lease + 1)

    async with working(storage, lambda job: [job.attempts, job.stalls]):
        await reached(queue, job_id, "completed")

    assert queue.get_result(job_id) == [2, 1]


async def test_worker_is_listed_while_it_runs(storage, queue):
    done = asyncio.Event()

    async def handler(job):
        await done.wait()

    async with working(storage, handler, worker_id="here:1", queues=["work"], concurrency=4, heartbeat=0.01):
        queue.enqueue(name=HANDLER)
        await aeventually(lambda: [info.active for info in storage.workers.all()] == [1])
        info = storage.workers.all()[0]
        assert (info.id, info.queues, info.names) == ("here:1", ("work",), (HANDLER,))
        assert (info.concurrency, info.state) == (4, "running")
        assert info.started_at <= time.time() * 1_000
        assert info.seen_at == storage.engine.clock.now()
        done.set()

    assert storage.workers.all() == []


async def test_heartbeat_continues_after_a_storage_outage(caplog, monkeypatch):
    monkeypatch.setattr("djqueue.runtime.events.OUTAGE_LOG_DELAY", 0)
    storage = FailingStorage(default_policy=QueuePolicy(lease=60_000))
    queue = Queue("work", storage=storage)
    done = asyncio.Event()

    async def handler(job):
        await done.wait()
        return "kept"

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler, heartbeat=0.01) as worker:
        await aeventually(lambda: worker.running == 1)
        storage.away.set()
        await aeventually(lambda: storage.refused.count("renew") >= 2)
        storage.away.clear()
        done.set()
        await reached(queue, job_id, "completed")

    assert len([line for line in messages(caplog) if "has been unavailable" in line]) == 1


def test_worker_ids_are_unique(storage):
    ids = {Worker(storage, handlers={HANDLER: print}).id for _ in range(10)}

    assert len(ids) == 10
    assert all(len(worker_id) <= 255 for worker_id in ids)
