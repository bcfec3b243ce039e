"""The shutdown of a worker in every phase: no job is lost, and no job runs twice if the drain fits."""

import asyncio
import threading

import pytest

from djqueue import Worker
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.runtime import shutdown
from djqueue.runtime.executors import inline
from djqueue.runtime.loops import run_loop
from djqueue.runtime.owntasks import all_tasks
from tests.runtime.running import HANDLER, messages, new_threads, reached, record, work_off, working
from tests.support import PATIENCE, aeventually, eventually


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(shutdown, "RELEASE_AFTER", 0.05)


@pytest.mark.parametrize("is_async", [True, False])
async def test_stopping_worker_finishes_running_jobs_and_starts_no_others(storage, queue, is_async):
    go_on = threading.Event()

    def synchronous(job):
        assert go_on.wait(PATIENCE)
        return job.cancelled.is_set()

    async def asynchronous(job):
        return await asyncio.to_thread(synchronous, job)

    ids = [result.id for result in queue.enqueue_many(range(5), name=HANDLER)]
    async with working(
        storage, asynchronous if is_async else synchronous, concurrency=2, worker_id="w"
    ) as worker:
        await aeventually(lambda: worker.running == 2)
        worker.stop()
        await asyncio.sleep(0)
        assert queue.counts()["waiting"] == 3
        go_on.set()

    assert [record(queue, job_id).state for job_id in ids] == ["completed"] * 2 + ["waiting"] * 3
    assert [queue.get_result(job_id) for job_id in ids[:2]] == [False, False]
    assert worker.counters.completed == 2
    assert storage.workers.all() == []


async def test_job_running_at_the_shutdown_timeout_is_cancelled_and_released(storage, queue, caplog):
    async def handler(job):
        await asyncio.sleep(60)

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler, shutdown_timeout=0.05) as worker:
        await aeventually(lambda: worker.running == 1)

    back = record(queue, job_id)
    assert (back.state, back.attempts, back.failures, back.stalls) == ("waiting", 0, 0, 0)
    assert [entry.outcome for entry in back.history] == ["released"]
    assert worker.counters.released == 1
    assert worker.abandoned == 0
    assert any("asking" in line for line in messages(caplog))


async def test_job_interrupted_by_shutdown_runs_again_as_its_first_attempt(storage, queue):
    async def slow(job):
        await asyncio.sleep(60)

    job_id = queue.enqueue(name=HANDLER, max_attempts=1).id
    async with working(storage, slow, shutdown_timeout=0) as worker:
        await aeventually(lambda: worker.running == 1)
    await work_off(storage, lambda job: [job.attempts, job.failures])

    assert queue.get_result(job_id) == [1, 0]


async def test_stuck_handler_ends_a_replaceable_worker_after_its_other_jobs(
    storage, queue, monkeypatch, caplog
):
    monkeypatch.setattr(inline, "OVERRUN_PATIENCE", 0.01)
    go_on, leave = threading.Event(), threading.Event()

    def stuck(job):
        leave.wait(PATIENCE)

    def other(job):
        go_on.wait(PATIENCE)

    worker = Worker(storage, handlers={"stuck": stuck, "other": other})
    worker.is_replaceable = True
    late = queue.enqueue(name="stuck", timeout=0.05).id
    fine = queue.enqueue(name="other").id
    running = asyncio.create_task(worker.run())
    await aeventually(lambda: worker.stopping)
    assert record(queue, late).state == "active"
    go_on.set()
    await running
    leave.set()

    retried = record(queue, late)
    assert (retried.state, retried.failures, retried.error.message) == (
        "delayed", 1, "ran longer than its timeout of 0.05 s",
    )  # fmt: skip
    assert retried.run_at - SYSTEM_CLOCK.now() > 6_000
    assert record(queue, fine).state == "completed"
    assert worker.was_recycled
    assert worker.abandoned == 1
    [line] = [line for line in messages(caplog) if "did not stop when" in line]
    assert line.endswith("its handler runs on until this process exits, and the attempt failed (timeout)")


async def test_stuck_handler_keeps_its_slot_and_is_logged_if_worker_is_not_replaceable(
    storage, queue, monkeypatch, caplog
):
    monkeypatch.setattr(inline, "OVERRUN_PATIENCE", 0.01)
    monkeypatch.setattr(inline, "OVERRUN_LOG_INTERVAL", 0.01)
    leave = threading.Event()
    job_id = queue.enqueue(name=HANDLER, timeout=0.05).id
    async with working(storage, lambda job: leave.wait(PATIENCE)) as worker:
        await aeventually(lambda: sum("keeps its slot" in line for line in messages(caplog)) > 1)
        assert worker.running == 1
        leave.set()
        await reached(queue, job_id, "completed")


async def test_handler_cancelled_by_shutdown_may_still_complete(storage, queue):
    async def handler(job):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "saved what there was"

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler, shutdown_timeout=0) as worker:
        await aeventually(lambda: worker.running == 1)

    assert queue.get_result(job_id) == "saved what there was"


async def test_sync_handler_is_notified_of_the_shutdown(storage, queue):
    started = threading.Event()

    def handler(job):
        started.set()
        assert job.cancelled.wait(PATIENCE)
        raise InterruptedError

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler, shutdown_timeout=0):
        assert await asyncio.to_thread(started.wait, PATIENCE)

    assert (record(queue, job_id).state, record(queue, job_id).attempts) == ("waiting", 0)


async def test_thread_that_does_not_stop_is_abandoned_and_its_result_discarded(storage, queue, caplog):
    started, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def handler(job):
        started.set()
        assert go_on.wait(PATIENCE)
        job.log("nobody listens")
        job.progress(1)
        ended.set()
        return "too late"

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler, shutdown_timeout=0) as worker:
        assert await asyncio.to_thread(started.wait, PATIENCE)

    assert worker.abandoned == 1
    assert (record(queue, job_id).state, record(queue, job_id).attempts) == ("waiting", 0)
    [line] = [line for line in messages(caplog) if "did not stop" in line]
    assert job_id in line
    assert line.endswith("its handler runs on until this process exits, and the job returned to its queue")
    go_on.set()
    assert await asyncio.to_thread(ended.wait, PATIENCE)
    await work_off(storage, lambda job: "by the next worker")
    assert queue.get_result(job_id) == "by the next worker"


async def test_task_that_does_not_stop_is_abandoned(storage, queue):
    stubborn = []

    async def handler(job):
        stubborn.append(asyncio.current_task())
        while len(stubborn) == 1:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler, shutdown_timeout=0) as worker:
        await aeventually(lambda: stubborn)

    assert worker.abandoned == 1
    assert record(queue, job_id).state == "waiting"
    stubborn.append("enough")
    stubborn[0].cancel()
    await asyncio.gather(stubborn[0], return_exceptions=True)


def test_event_loop_of_the_worker_ends_although_a_task_does_not(storage, queue, monkeypatch):
    monkeypatch.setattr("djqueue.runtime.loops.LEFTOVER_GRACE", 0.05)
    let_go = []

    async def handler(job):
        while not let_go:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                # The third comes from the loop's end; the first two are the worker's and ours.
                continue

    async def main():
        worker = Worker(storage, handlers={HANDLER: handler}, shutdown_timeout=0)
        queue.enqueue(name=HANDLER)
        running = asyncio.ensure_future(worker.run())
        await aeventually(lambda: worker.running == 1)
        worker.stop()
        await running
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        return all_tasks(asyncio.get_running_loop())

    leftovers = run_loop(main(), pytest.fail)

    assert [task for task in leftovers if not task.done()]
    let_go.append(True)
    for task in leftovers:
        task._log_destroy_pending = False


async def test_second_stop_changes_nothing(storage, queue):
    go_on = asyncio.Event()

    async def handler(job):
        await go_on.wait()
        return job.cancelled.is_set()

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler) as worker:
        await aeventually(lambda: worker.running == 1)
        for _ in range(5):
            worker.stop()
        await asyncio.sleep(0)
        go_on.set()
        await reached(queue, job_id, "completed")
        await worker.astop()
        worker.stop()

    assert queue.get_result(job_id) is False
    worker.stop()


async def test_hurried_stop_skips_the_shutdown_timeout(storage, queue):
    async def handler(job):
        await asyncio.sleep(60)

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler, shutdown_timeout=600) as worker:
        await aeventually(lambda: worker.running == 1)
        worker.stop()
        await asyncio.sleep(0)
        assert worker.running == 1
        await asyncio.wait_for(worker.astop(hurry=True), PATIENCE)

    assert record(queue, job_id).state == "waiting"


async def test_worker_stopped_before_it_runs_claims_nothing(storage, queue):
    queue.enqueue(name=HANDLER)
    worker = Worker(storage, handlers={HANDLER: lambda job: None})
    worker.stop()

    await asyncio.wait_for(worker.run(), PATIENCE)

    assert queue.counts()["waiting"] == 1


async def test_idle_worker_stops_without_waiting_for_the_shutdown_timeout(storage, queue):
    async with working(storage, lambda job: None) as worker:
        await aeventually(lambda: storage.trips)
        await asyncio.wait_for(worker.astop(), PATIENCE)


async def test_handler_can_stop_its_worker(storage, queue):
    async def handler(job):
        worker.stop()

    worker = Worker(storage, handlers={HANDLER: handler}, concurrency=1)
    queue.enqueue_many(range(3), name=HANDLER)
    await asyncio.wait_for(worker.run(), PATIENCE)

    assert worker.counters.completed == 1


async def test_cancelling_the_run_task_is_a_hurried_stop(storage, queue):
    async def handler(job):
        await asyncio.sleep(60)

    job_id = queue.enqueue(name=HANDLER).id
    worker = Worker(storage, handlers={HANDLER: handler}, shutdown_timeout=600)
    running = asyncio.ensure_future(worker.run())
    await aeventually(lambda: worker.running == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, PATIENCE)

    assert (record(queue, job_id).state, record(queue, job_id).attempts) == ("waiting", 0)
    assert storage.workers.all() == []


async def test_cancelled_job_is_not_released_by_a_stopping_worker(storage, queue):
    async def handler(job):
        await asyncio.sleep(60)

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler, shutdown_timeout=0) as worker:
        await aeventually(lambda: worker.running == 1)
        queue.cancel(job_id)

    assert record(queue, job_id).state == "cancelled"


async def test_stopping_worker_is_listed_as_stopping(storage, queue):
    go_on = asyncio.Event()

    async def handler(job):
        await go_on.wait()

    queue.enqueue(name=HANDLER)
    async with working(storage, handler, heartbeat=0.01) as worker:
        await aeventually(lambda: worker.running == 1)
        worker.stop()
        await aeventually(lambda: storage.workers.all()[0].state == "stopping")
        go_on.set()


def test_stopped_worker_leaves_no_threads(storage, queue):
    before = threading.enumerate()
    go_on = threading.Barrier(4)
    queue.enqueue_many(range(4), name=HANDLER)

    with Worker(storage, handlers={HANDLER: lambda job: go_on.wait(PATIENCE)}, concurrency=4) as worker:
        eventually(lambda: worker.counters.completed == 4)

    eventually(lambda: not new_threads(before))


async def test_jobs_run_exactly_once_across_many_worker_restarts(storage, queue):
    """A rolling deploy: workers come and go while jobs run; each job runs exactly once."""
    ran: list[int] = []

    async def asynchronous(job):
        await asyncio.sleep(0)
        ran.append(job.payload)

    def synchronous(job):
        ran.append(job.payload)

    handlers = {"asynchronous": asynchronous, "synchronous": synchronous}
    for number in range(600):
        queue.enqueue(number, name=("asynchronous", "synchronous")[number % 2])
    for _ in range(40):
        worker = Worker(storage, handlers=handlers, concurrency=5)
        running = asyncio.ensure_future(worker.run())
        before = len(ran)
        await aeventually(lambda b=before: len(ran) > b + 3 or len(ran) == 600)
        worker.stop()
        await running
    await work_off(storage, handlers)

    assert sorted(ran) == list(range(600))
    assert queue.counts()["completed"] == 600
