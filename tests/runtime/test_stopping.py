"""Timeouts and cancellation: notifications to a running handler, and the outcome of its job."""

import asyncio
import threading
from datetime import UTC, datetime, timedelta

import pytest

from djqueue import Queue, current_job, job
from djqueue.core.policies import QueuePolicy
from djqueue.errors import JobCancelledError
from tests.runtime.running import HANDLER, messages, reached, record, work_off, working
from tests.runtime.storages import RecordingStorage
from tests.support import PATIENCE, aeventually


async def test_async_handler_is_cancelled_at_its_timeout(storage, queue):
    ends = []

    async def handler(job):
        try:
            await asyncio.sleep(60)
        finally:
            ends.append(job.cancelled.is_set())

    job_id = queue.enqueue(name=HANDLER, timeout=0.03, max_attempts=1).id
    await work_off(storage, handler)

    failed = record(queue, job_id)
    assert (failed.state, failed.reason) == ("failed", "timeout")
    assert failed.error.type == "djqueue.core.errors.JobTimeoutError"
    assert "await asyncio.sleep(60)" in failed.error.traceback
    assert ends == [True]


async def test_timeout_uses_an_attempt_and_is_retried(storage, queue):
    async def handler(job):
        if job.attempts == 1:
            await asyncio.sleep(60)
        return "second"

    job_id = queue.enqueue(name=HANDLER, timeout=0.03, max_attempts=2, backoff=0).id
    await work_off(storage, handler)

    assert queue.get_result(job_id) == "second"
    assert record(queue, job_id).failures == 1


async def test_sync_handler_is_notified_of_its_timeout_and_may_raise(storage, queue, caplog):
    def handler(job):
        assert job.cancelled.wait(PATIENCE)
        raise RuntimeError("gave up")

    job_id = queue.enqueue(name=HANDLER, timeout=0.03, max_attempts=1).id
    await work_off(storage, handler)

    failed = record(queue, job_id)
    assert failed.reason == "timeout"
    assert "gave up" in failed.error.traceback
    assert any("runs in a thread" in line for line in messages(caplog))


async def test_sync_handler_that_returns_after_its_timeout_completes(storage, queue, caplog):
    def handler(job):
        assert job.cancelled.wait(PATIENCE)
        return "late"

    job_id = queue.enqueue(name=HANDLER, timeout=0.03, max_attempts=1).id
    worker = await work_off(storage, handler)

    assert queue.get_result(job_id) == "late"
    assert worker.counters.completed == 1
    assert any("past its timeout" in line for line in messages(caplog))


async def test_async_handler_that_suppresses_cancellation_completes(storage, queue):
    async def handler(job):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "stubborn"

    job_id = queue.enqueue(name=HANDLER, timeout=0.03, max_attempts=1).id
    await work_off(storage, handler)

    assert queue.get_result(job_id) == "stubborn"


async def test_job_that_ends_in_time_is_not_notified_of_its_timeout(storage, queue):
    async def handler(job):
        await asyncio.sleep(0)
        return job.cancelled.is_set()

    job_id = queue.enqueue(name=HANDLER, timeout=60).id
    await work_off(storage, handler)

    assert queue.get_result(job_id) is False


async def test_deadline_is_the_start_plus_the_timeout(storage, queue):
    seen = []
    queue.enqueue(name=HANDLER, timeout=100)
    queue.enqueue(name=HANDLER)
    before = datetime.now(UTC)

    await work_off(storage, lambda job: seen.append(job.deadline), concurrency=1)

    assert before <= seen[0] - timedelta(seconds=100) <= datetime.now(UTC)
    assert seen[1] is None


async def test_timeout_inside_a_handler_is_not_the_timeout_of_the_job(storage, queue):
    async def handler(job):
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            return "own timeout"

    job_id = queue.enqueue(name=HANDLER, timeout=60).id
    await work_off(storage, handler)

    assert queue.get_result(job_id) == "own timeout"


# Cancellation. Heartbeats are as rare as by default: what is heard here is heard at once.


async def test_cancelling_a_running_async_job_cancels_its_task(storage, queue):
    async def handler(job):
        await asyncio.sleep(60)

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler, queues=["work"]) as worker:
        await reached(queue, job_id, "active")
        assert queue.cancel(job_id).status == "requested"
        cancelled = await reached(queue, job_id, "cancelled")
        await aeventually(lambda: worker.counters.cancelled == 1)

    assert cancelled.reason == "cancelled"
    assert queue.dead_letters() == []


async def test_cancelled_sync_job_is_notified_and_ends_as_cancelled(storage, queue):
    started = threading.Event()

    def handler(job):
        started.set()
        assert job.cancelled.wait(PATIENCE)
        raise RuntimeError("stopped half-way")

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler):
        assert await asyncio.to_thread(started.wait, PATIENCE)
        queue.cancel(job_id)
        await reached(queue, job_id, "cancelled")


@pytest.mark.parametrize("is_async", [False, True])
async def test_raise_if_cancelled_ends_the_job_as_cancelled(storage, queue, is_async):
    started = threading.Event()

    def handler(job):
        started.set()
        job.raise_if_cancelled()
        assert job.cancelled.wait(PATIENCE)
        job.raise_if_cancelled()

    async def ahandler(job):
        started.set()
        job.raise_if_cancelled()
        try:
            await job.cancelled.wait(PATIENCE)
        finally:
            job.raise_if_cancelled()

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, ahandler if is_async else handler) as worker:
        assert await asyncio.to_thread(started.wait, PATIENCE)
        queue.cancel(job_id)
        await reached(queue, job_id, "cancelled")

    ended = record(queue, job_id)
    assert (ended.reason, ended.failures) == ("cancelled", 0)
    assert worker.counters.cancelled == 1
    assert queue.counts()["failed"] == 0


async def test_job_function_sees_its_cancellation_in_current_job(storage, queue):
    started = threading.Event()

    @job(name="tests.stopping.steps", queue=queue.name)
    def steps():
        started.set()
        assert current_job().cancelled.wait(PATIENCE)
        current_job().raise_if_cancelled()

    result = queue.enqueue({"args": [], "kwargs": {}}, name="tests.stopping.steps")
    async with working(storage, {"tests.stopping.steps": steps}):
        assert await asyncio.to_thread(started.wait, PATIENCE)
        queue.cancel(result.id)
        await reached(queue, result.id, "cancelled")


async def test_raise_if_cancelled_after_a_timeout_fails_the_job(storage, queue):
    def handler(job):
        assert job.cancelled.wait(PATIENCE)
        job.raise_if_cancelled()

    job_id = queue.enqueue(name=HANDLER, timeout=0.03, max_attempts=1).id
    await work_off(storage, handler)

    assert record(queue, job_id).reason == "timeout"


async def test_cancelled_error_of_another_job_fails_the_attempt(storage, queue):
    def handler(job):
        raise JobCancelledError("the job that this one waited for was cancelled")

    job_id = queue.enqueue(name=HANDLER, max_attempts=1).id
    await work_off(storage, handler)

    assert record(queue, job_id).state == "failed"


async def test_cancelled_job_whose_handler_returns_is_completed(storage, queue):
    def handler(job):
        assert job.cancelled.wait(PATIENCE)
        return "already done"

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler):
        await reached(queue, job_id, "active")
        queue.cancel(job_id)
        await reached(queue, job_id, "completed")

    assert queue.get_result(job_id) == "already done"


async def test_job_cancelled_before_the_worker_subscribes_is_stopped():
    """The request comes while the handler starts; the worker hears of it when it begins to listen."""
    storage = RecordingStorage(default_policy=QueuePolicy(lease=3_600_000))
    queue = Queue("work", storage=storage)

    async def handler(job):
        queue.cancel(job.id)
        await asyncio.sleep(60)

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler, heartbeat=600):
        await reached(queue, job_id, "cancelled")


async def test_cancellation_stops_no_other_job(storage, queue):
    release = asyncio.Event()

    async def handler(job):
        await release.wait()
        return "done"

    one, two = queue.enqueue(name=HANDLER).id, queue.enqueue(name=HANDLER).id
    async with working(storage, handler):
        await reached(queue, one, "active")
        await reached(queue, two, "active")
        queue.cancel(one)
        await reached(queue, one, "cancelled")
        release.set()
        await reached(queue, two, "completed")


async def test_worker_subscribes_only_to_queues_with_long_jobs(storage, queue):
    done = asyncio.Event()

    async def handler(job):
        await done.wait()

    async with working(storage, {"short": lambda job: None, "long": handler}) as worker:
        queue.enqueue_many(range(100), name="short")
        await aeventually(lambda: worker.counters.completed == 100)
        assert storage.subscribed == []
        queue.enqueue(name="long")
        await aeventually(lambda: storage.subscribed == ["work"])
        done.set()


async def test_stopped_worker_has_no_subscriptions(storage, queue):
    async def handler(job):
        await asyncio.sleep(60)

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler):
        await reached(queue, job_id, "active")
        queue.cancel(job_id)
        await reached(queue, job_id, "cancelled")
        assert (storage.subscribed, storage.listening) == (["work"], 1)

    assert (storage.subscribed, storage.listening) == ([], 0)


# The event.


async def test_cancelled_event_can_be_awaited(storage, queue):
    async def handler(job):
        early = await job.cancelled.wait(0.01)
        queue.cancel(job.id)
        try:
            await asyncio.shield(job.cancelled.wait(PATIENCE))
        except asyncio.CancelledError:
            return [early, job.cancelled.is_set(), await current_job().cancelled.wait()]

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler):
        await reached(queue, job_id, "completed")

    assert queue.get_result(job_id) == [False, True, True]


async def test_cancelled_event_can_be_waited_for_with_a_timeout_in_a_thread(storage, queue):
    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, lambda job: [job.cancelled.wait(0.01), job.cancelled.is_set()])

    assert queue.get_result(job_id) == [False, False]


async def test_job_cancelled_between_claim_and_start_never_runs(storage, queue):
    ran = []
    done = asyncio.Event()

    async def long(job):
        await done.wait()

    async def first(job):
        # Claimed in the same round trip; its task has been made, and has not had its first turn.
        assert record(queue, job.payload).state == "active"
        queue.cancel(job.payload)

    async def second(job):
        ran.append(job.id)

    async with working(storage, {"long": long, "first": first, "second": second}):
        queue.enqueue(name="long")
        await aeventually(lambda: storage.subscribed == ["work"])
        queue.pause()
        second_id = queue.enqueue(name="second").id
        queue.enqueue(second_id, name="first", priority=1)
        queue.resume()
        await reached(queue, second_id, "cancelled")
        done.set()

    assert ran == []
