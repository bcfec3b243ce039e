"""The result of an enqueue: waiting, refreshing, reading the job."""

import asyncio
import pickle
from datetime import timedelta

import pytest

from djqueue import (
    EnqueueResult,
    JobFailedError,
    Queue,
    ResultTimeoutError,
    State,
    StorageUnavailableError,
    Worker,
    flow,
)
from djqueue.errors import JobCancelledError, JobNotFoundError
from djqueue.storage.memory import MemoryStorage
from tests.support import PATIENCE

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


def test_result_waits_for_the_value_of_the_job(any_queue, ask):
    result = any_queue.enqueue(21)

    with Worker(any_queue.storage, handlers={"orders": double}):
        assert ask(result, "wait", PATIENCE) == 42
        assert ask(result, "wait", timeout=timedelta(seconds=PATIENCE)) == 42


def test_results_of_enqueue_many_can_wait(any_queue, ask):
    results = any_queue.enqueue_many(range(5))

    with Worker(any_queue.storage, handlers={"orders": double}):
        assert [ask(result, "wait", PATIENCE) for result in results] == [0, 2, 4, 6, 8]


def test_results_of_a_workflow_can_wait(any_queue, ask):
    first = any_queue.node(1)
    results = flow(any_queue.node(2).after(first)).enqueue()

    with Worker(any_queue.storage, handlers={"orders": double}):
        assert [ask(result, "wait", PATIENCE) for result in results] == [2, 4]
    assert ask(results[first], "refresh").status == "completed"


def test_waiting_for_job_that_failed_raises_its_error(queue, ask):
    result = queue.enqueue(1, max_attempts=1)

    with (
        Worker(handlers={"orders": broken}),
        pytest.raises(JobFailedError, match="ValueError: broken"),
    ):
        ask(result, "wait", PATIENCE)


def test_waiting_for_job_that_was_cancelled_raises(queue, ask):
    result = queue.enqueue(1)
    queue.cancel(result.id)

    with pytest.raises(JobCancelledError):
        ask(result, "wait", PATIENCE)


def test_timeout_of_waiting_does_not_stop_the_job(queue, ask):
    result = queue.enqueue(1)

    with pytest.raises(ResultTimeoutError, match="did not finish within 0 s"):
        ask(result, "wait", 0)
    assert queue.get_job(result.id).state is State.WAITING


def test_waiting_for_a_removed_job_raises(queue, ask):
    result = queue.enqueue(1)
    queue.remove(result.id)

    with pytest.raises(JobNotFoundError):
        ask(result, "wait", PATIENCE)
    with pytest.raises(JobNotFoundError):
        ask(result, "refresh")
    assert ask(result, "job") is None


def test_waiting_survives_a_short_storage_outage(queue, storage, ask, monkeypatch):
    result = queue.enqueue(21)
    jobs, answers = storage.reads.jobs, iter([StorageUnavailableError("away")])

    def shaky(queue, ids):
        for error in answers:
            raise error
        return jobs(queue, ids)

    monkeypatch.setattr(storage.reads, "jobs", shaky)
    with Worker(handlers={"orders": double}):
        assert ask(result, "wait", PATIENCE) == 42


def test_refreshed_result_has_the_current_state_and_result(any_queue, ask):
    result = any_queue.enqueue(21)
    assert ask(result, "refresh") == (result.id, "queued", "orders", State.WAITING, None, None)

    with Worker(any_queue.storage, handlers={"orders": double}):
        ask(result, "wait", PATIENCE)

    refreshed = ask(result, "refresh")
    assert refreshed == (result.id, "completed", "orders", State.COMPLETED, 42, None)
    assert ask(refreshed, "job").result == 42


def test_result_returns_its_job(any_queue, ask):
    result = any_queue.enqueue({"n": 1}, priority=3)

    job = ask(result, "job")

    assert (job.id, job.state, job.payload, job.options.priority) == (result.id, State.WAITING, {"n": 1}, 3)


def test_result_is_a_picklable_tuple(any_queue):
    result = any_queue.enqueue(1)

    assert result == (result.id, "queued", "orders", None, None, None)
    assert pickle.loads(pickle.dumps(result)) == result
    assert type(pickle.loads(pickle.dumps(result))) is EnqueueResult
