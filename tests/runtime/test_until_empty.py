"""`until_empty`: jobs for which a worker waits, and jobs that it ignores."""

import asyncio

import pytest

from djqueue import Queue, Worker
from djqueue.core.job import ClaimRequest, Outcome
from djqueue.runtime import claiming
from tests.runtime.running import HANDLER, messages, record, work_off
from tests.support import PATIENCE, aeventually


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch):
    monkeypatch.setattr(claiming, "POLL_UNTIL_EMPTY", 0.01)


async def ends(worker: Worker, within: float = 5) -> None:
    await asyncio.wait_for(worker.run(), within)


def until_empty(storage, handler=lambda job: None, **options) -> Worker:
    return Worker(storage, handlers={HANDLER: handler}, until_empty=True, **options)


async def test_until_empty_ends_for_an_empty_storage(storage):
    await ends(until_empty(storage))


async def test_until_empty_runs_waiting_jobs_and_jobs_that_they_enqueue(storage, queue):
    def handler(job):
        if job.payload:
            queue.enqueue(job.payload - 1, name=HANDLER)

    queue.enqueue(20, name=HANDLER)
    worker = until_empty(storage, handler)
    await ends(worker)

    assert worker.counters.completed == 21


async def test_until_empty_waits_for_a_retry(storage, queue):
    def handler(job):
        if job.attempts == 1:
            raise ValueError

    job_id = queue.enqueue(name=HANDLER, backoff=0.1).id
    await ends(until_empty(storage, handler))

    assert record(queue, job_id).state == "completed"


async def test_until_empty_waits_for_a_distant_retry(storage, queue):
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


async def test_until_empty_waits_for_a_job_that_is_due_soon(storage, queue):
    job_id = queue.enqueue(name=HANDLER, delay=0.1).id
    await ends(until_empty(storage))

    assert record(queue, job_id).state == "completed"


async def test_until_empty_ignores_a_job_delayed_to_another_day(storage, queue):
    job_id = queue.enqueue(name=HANDLER, delay=61).id
    await ends(until_empty(storage))

    assert record(queue, job_id).state == "delayed"


async def test_until_empty_ignores_jobs_of_other_queues_and_handlers(storage, queue):
    queue.enqueue(name="somebody.elses")
    Queue("another", storage=storage).enqueue(name=HANDLER)

    await ends(until_empty(storage, queues=["work"]))

    assert queue.counts()["waiting"] == 1


async def test_until_empty_ignores_a_paused_queue(storage, queue):
    queue.enqueue(name=HANDLER)
    queue.pause()

    await ends(until_empty(storage))

    assert queue.counts()["waiting"] == 1


async def test_until_empty_ignores_held_jobs(storage, queue):
    queue.enqueue(name=HANDLER)
    queue.hold(HANDLER)

    await ends(until_empty(storage))

    assert queue.counts()["waiting"] == 1


async def test_until_empty_ignores_a_job_whose_dependency_failed(storage, queue):
    def handler(job):
        if job.payload == "first":
            raise ValueError

    first = queue.enqueue("first", name=HANDLER, max_attempts=1)
    second = queue.enqueue("second", name=HANDLER, depends_on=first, on_dependency_failure="wait")

    await ends(until_empty(storage, handler))

    assert record(queue, second.id).state == "blocked"


async def test_until_empty_runs_dependents(storage, queue):
    first = queue.enqueue("first", name=HANDLER)
    second = queue.enqueue("second", name=HANDLER, depends_on=first)

    await ends(until_empty(storage))

    assert record(queue, second.id).state == "completed"


async def test_until_empty_runs_all_jobs_of_a_group(storage, queue):
    for number in range(10):
        queue.enqueue(number, name=HANDLER, concurrency_key="one at a time")

    worker = until_empty(storage, concurrency=4)
    await ends(worker)

    assert worker.counters.completed == 10


async def test_until_empty_waits_for_a_job_of_another_worker(storage, queue):
    job_id = queue.enqueue(name=HANDLER).id
    claimed = storage.claim(ClaimRequest("another", 1, frozenset({HANDLER}))).jobs[0]
    worker = until_empty(storage)
    running = asyncio.ensure_future(worker.run())
    await aeventually(lambda: len(storage.trips) >= 5)
    assert not running.done()
    # It fails over there, and comes back to be run here.
    storage.finish([Outcome("work", job_id, claimed.token, "retry")])
    await asyncio.wait_for(running, PATIENCE)

    assert record(queue, job_id).state == "completed"
    assert worker.counters.completed == 1


async def test_several_until_empty_workers_end_together(storage, queue):
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


async def test_until_empty_can_be_combined_with_max_jobs(storage, queue):
    queue.enqueue_many(range(5), name=HANDLER)

    worker = await work_off(storage, lambda job: None, max_jobs=100)

    assert worker.counters.completed == 5


async def worker_stopped(worker: Worker, running: "asyncio.Future[None]") -> None:
    worker.stop()
    await asyncio.wait_for(running, PATIENCE)


async def test_until_empty_names_the_jobs_that_it_leaves_because_nothing_handles_them(storage, queue, caplog):
    queue.enqueue(name="shop.renamed")
    queue.enqueue(name=HANDLER)
    await ends(until_empty(storage))

    [line] = [line for line in messages(caplog) if "no live worker has a handler" in line]
    assert "Jobs named shop.renamed are waiting in queue" in line
