"""What the result of an enqueue can do: wait for its job, read it again, show it."""

import asyncio
import pickle
from datetime import timedelta

import pytest

from djqueue import (
    EnqueueResult,
    JobCancelledError,
    JobFailedError,
    JobNotFoundError,
    JobTimeoutError,
    Queue,
    State,
    StorageUnavailableError,
    Worker,
)
from djqueue.storage.memory import MemoryStorage

TWINS = {"wait": "await_", "refresh": "arefresh", "job": "ajob"}


@pytest.fixture(params=["sync", "async"])
def ask(request):
    """Calls a method of a result, or its async twin."""

    def call(result, method, *args, **kwargs):
        if request.param == "sync":
            return getattr(result, method)(*args, **kwargs)

        async def twin():
            return await getattr(result, TWINS[method])(*args, **kwargs)

        return asyncio.run(twin())

    return call


@pytest.fixture
def queue():
    return Queue("orders")


@pytest.fixture(params=["of the settings", "of the queue"])
def any_queue(request, queue):
    if request.param == "of the settings":
        yield queue
        return
    storage = MemoryStorage()
    yield Queue("orders", storage=storage)
    storage.close()


def double(job):
    return 2 * job.payload


def broken(job):
    raise ValueError("broken")


def test_a_result_waits_for_what_the_job_returns(any_queue, ask):
    result = any_queue.enqueue(21)

    with Worker(any_queue.storage, handlers={"orders": double}):
        assert ask(result, "wait", 10) == 42
        assert ask(result, "wait", timeout=timedelta(seconds=10)) == 42


def test_results_of_many_jobs_wait_too(any_queue, ask):
    results = any_queue.enqueue_many(range(5))

    with Worker(any_queue.storage, handlers={"orders": double}):
        assert [ask(result, "wait", 10) for result in results] == [0, 2, 4, 6, 8]


def test_waiting_for_a_job_that_failed_raises_its_error(queue, ask):
    result = queue.enqueue(1, max_attempts=1)

    with (
        Worker(handlers={"orders": broken}),
        pytest.raises(JobFailedError, match="ValueError: broken"),
    ):
        ask(result, "wait", 10)


def test_waiting_for_a_job_that_was_cancelled_raises(queue, ask):
    result = queue.enqueue(1)
    queue.cancel(result.id)

    with pytest.raises(JobCancelledError):
        ask(result, "wait", 10)


def test_waiting_ends_in_time_and_the_job_goes_on(queue, ask):
    result = queue.enqueue(1)

    with pytest.raises(JobTimeoutError, match="did not finish within 0 s"):
        ask(result, "wait", 0)
    assert queue.get_job(result.id).state is State.WAITING


def test_waiting_for_a_job_that_is_not_kept_raises(queue, ask):
    result = queue.enqueue(1)
    queue.remove(result.id)

    with pytest.raises(JobNotFoundError):
        ask(result, "wait", 10)
    with pytest.raises(JobNotFoundError):
        ask(result, "refresh")
    assert ask(result, "job") is None


def test_a_storage_that_is_away_for_a_moment_does_not_end_the_waiting(queue, storage, ask, monkeypatch):
    result = queue.enqueue(21)
    jobs, answers = storage.reads.jobs, iter([StorageUnavailableError("away")])

    def shaky(queue, ids):
        for error in answers:
            raise error
        return jobs(queue, ids)

    monkeypatch.setattr(storage.reads, "jobs", shaky)
    with Worker(handlers={"orders": double}):
        assert ask(result, "wait", 10) == 42


def test_a_refreshed_result_has_the_state_and_the_result_of_now(any_queue, ask):
    result = any_queue.enqueue(21)
    assert ask(result, "refresh") == (result.id, "queued", "orders", State.WAITING, None, None)

    with Worker(any_queue.storage, handlers={"orders": double}):
        ask(result, "wait", 10)

    refreshed = ask(result, "refresh")
    assert refreshed == (result.id, "completed", "orders", State.COMPLETED, 42, None)
    assert ask(refreshed, "job").result == 42


def test_a_result_shows_its_job(any_queue, ask):
    result = any_queue.enqueue({"n": 1}, priority=3)

    job = ask(result, "job")

    assert (job.id, job.state, job.payload, job.options.priority) == (result.id, State.WAITING, {"n": 1}, 3)


def test_a_result_is_a_plain_tuple_wherever_its_job_is(any_queue):
    result = any_queue.enqueue(1)

    assert result == (result.id, "queued", "orders", None, None, None)
    assert pickle.loads(pickle.dumps(result)) == result
    assert type(pickle.loads(pickle.dumps(result))) is EnqueueResult
