"""`until_empty`: what holds a worker, and what does not."""

import asyncio

import pytest

from djqueue import Queue, Worker
from djqueue.core.job import ClaimRequest, Outcome
from djqueue.runtime import claiming
from tests.runtime.running import HANDLER, record, work_off
from tests.support import aeventually


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch):
    monkeypatch.setattr(claiming, "POLL_UNTIL_EMPTY", 0.01)


async def ends(worker: Worker, within: float = 5) -> None:
    await asyncio.wait_for(worker.run(), within)


def until_empty(storage, handler=lambda job: None, **options) -> Worker:
    return Worker(storage, handlers={HANDLER: handler}, until_empty=True, **options)


async def test_an_empty_storage_ends_it_at_once(storage):
    await ends(until_empty(storage))


async def test_it_runs_all_there_is_and_what_that_enqueues(storage, queue):
    def handler(job):
        if job.payload:
            queue.enqueue(job.payload - 1, name=HANDLER)

    queue.enqueue(20, name=HANDLER)
    worker = until_empty(storage, handler)
    await ends(worker)

    assert worker.counters.completed == 21


async def test_a_retry_to_come_is_waited_for(storage, queue):
    def handler(job):
        if job.attempts == 1:
            raise ValueError

    job_id = queue.enqueue(name=HANDLER, backoff=0.1).id
    await ends(until_empty(storage, handler))

    assert record(queue, job_id).state == "completed"


async def test_a_retry_that_is_far_off_is_waited_for_all_the_same(storage, queue):
    def handler(job):
        raise ValueError

    job_id = queue.enqueue(name=HANDLER, backoff=3_600, max_attempts=2).id
    worker = until_empty(storage, handler)
    running = asyncio.ensure_future(worker.run())
    await aeventually(lambda: worker.counters.retried == 1)
    for _ in range(5):
        trips = len(storage.trips)
        await aeventually(lambda t=trips: len(storage.trips) > t)
    assert not running.done()
    assert record(queue, job_id).state == "delayed"
    await worker_stopped(worker, running)


async def test_a_job_due_soon_is_waited_for(storage, queue):
    job_id = queue.enqueue(name=HANDLER, delay=0.1).id
    await ends(until_empty(storage))

    assert record(queue, job_id).state == "completed"


async def test_a_job_put_off_to_another_day_is_not(storage, queue):
    job_id = queue.enqueue(name=HANDLER, delay=61).id
    await ends(until_empty(storage))

    assert record(queue, job_id).state == "delayed"


async def test_jobs_for_others_do_not_hold_it(storage, queue):
    queue.enqueue(name="somebody.elses")
    Queue("another", storage=storage).enqueue(name=HANDLER)

    await ends(until_empty(storage, queues=["work"]))

    assert queue.counts()["waiting"] == 1


async def test_a_paused_queue_does_not_hold_it(storage, queue):
    queue.enqueue(name=HANDLER)
    queue.pause()

    await ends(until_empty(storage))

    assert queue.counts()["waiting"] == 1


async def test_a_job_that_waits_for_another_that_failed_does_not_hold_it(storage, queue):
    def handler(job):
        if job.payload == "first":
            raise ValueError

    first = queue.enqueue("first", name=HANDLER, max_attempts=1)
    second = queue.enqueue("second", name=HANDLER, depends_on=first, on_dependency_failure="wait")

    await ends(until_empty(storage, handler))

    assert record(queue, second.id).state == "blocked"


async def test_dependents_that_can_run_are_run(storage, queue):
    first = queue.enqueue("first", name=HANDLER)
    second = queue.enqueue("second", name=HANDLER, depends_on=first)

    await ends(until_empty(storage))

    assert record(queue, second.id).state == "completed"


async def test_groups_are_run_to_their_end(storage, queue):
    for number in range(10):
        queue.enqueue(number, name=HANDLER, group="one at a time")

    worker = until_empty(storage, concurrency=4)
    await ends(worker)

    assert worker.counters.completed == 10


async def test_a_job_that_another_worker_runs_is_waited_for(storage, queue):
    job_id = queue.enqueue(name=HANDLER).id
    claimed = storage.claim(ClaimRequest("another", 1, frozenset({HANDLER}))).jobs[0]
    worker = until_empty(storage)
    running = asyncio.ensure_future(worker.run())
    await aeventually(lambda: len(storage.trips) >= 5)
    assert not running.done()
    # It fails over there, and comes back to be run here.
    storage.finish([Outcome("work", job_id, claimed.token, "retry")])
    await asyncio.wait_for(running, 5)

    assert record(queue, job_id).state == "completed"
    assert worker.counters.completed == 1


async def test_several_workers_end_together(storage, queue):
    async def handler(job):
        await asyncio.sleep(0.001)
        if job.payload > 0 and job.payload % 3 == 0:
            queue.enqueue(job.payload - 1, name=HANDLER)

    queue.enqueue_many(range(100), name=HANDLER)
    workers = [until_empty(storage, handler, concurrency=5) for _ in range(3)]
    await asyncio.gather(*(ends(worker) for worker in workers))

    counts = queue.counts()
    assert (counts["waiting"], counts["active"]) == (0, 0)
    assert sum(worker.counters.completed for worker in workers) == counts["completed"] == 133


async def test_it_can_be_combined_with_max_jobs(storage, queue):
    queue.enqueue_many(range(5), name=HANDLER)

    worker = await work_off(storage, lambda job: None, max_jobs=100)

    assert worker.counters.completed == 5


async def worker_stopped(worker: Worker, running: "asyncio.Future[None]") -> None:
    worker.stop()
    await asyncio.wait_for(running, 5)
