"""Batches: several jobs in one call, and an outcome for each."""

import asyncio
import threading

import pytest

from djqueue import Discard, Queue, Snooze, UnrecoverableError, current_job, job
from djqueue.client import registry
from djqueue.errors import OptionError
from djqueue.runtime.executors.batching import spread
from djqueue.storage.redis import RedisStorage
from tests.runtime.running import messages, reached, record, work_off, working
from tests.support import PATIENCE, aeventually

BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
NAME = "many"


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_types", {})


def batched(function, rule, *, is_async=False, **options):
    """A mapping of handlers with one function of batches."""

    async def many(jobs):
        return function(jobs)

    job_type = job(name=NAME, batch=rule, **options)(many if is_async else function)
    return {NAME: job_type}


def put(queue, count, **options):
    payloads = [{"args": [n], "kwargs": {}} for n in range(count)]
    return [result.id for result in queue.enqueue_many(payloads, name=NAME, **options)]


def numbers(jobs):
    return [job.args[0] for job in jobs]


@BOTH
async def test_jobs_claimed_together_are_called_in_batches_up_to_the_size(storage, queue, is_async):
    calls = []

    def many(jobs):
        calls.append(numbers(jobs))
        return [n * 10 for n in numbers(jobs)]

    ids = put(queue, 7)
    await work_off(storage, batched(many, 3, is_async=is_async), concurrency=7)

    assert sorted(calls) == [[0, 1, 2], [3, 4, 5], [6]]
    assert [queue.get_result(job_id) for job_id in ids] == [n * 10 for n in range(7)]


async def test_batch_size_is_limited_by_the_slots_of_the_worker(storage, queue):
    calls = []
    put(queue, 8)
    await work_off(storage, batched(lambda jobs: calls.append(len(jobs)), 100), concurrency=4)

    assert calls == [4, 4]


async def test_batch_below_the_minimum_waits_for_more_jobs(storage, queue):
    calls = []

    def many(jobs):
        calls.append(numbers(jobs))

    handlers = batched(many, {"size": 10, "min_size": 3, "wait": 3600})
    async with working(storage, handlers, concurrency=10) as worker:
        put(queue, 2)
        await aeventually(lambda: worker.running == 2)
        assert calls == []
        put(queue, 1)
        await aeventually(lambda: calls == [[0, 1, 0]])


async def test_batch_below_the_minimum_runs_after_the_maximum_wait(storage, queue):
    calls = []
    put(queue, 2)
    handlers = batched(lambda jobs: calls.append(len(jobs)), {"size": 5, "wait": 0.05})
    await work_off(storage, handlers, concurrency=5)

    assert calls == [2]


async def test_batched_jobs_keep_their_own_arguments(storage, queue):
    @job(name=NAME, batch=5, queue=queue.name)
    def many(jobs):
        return [{"args": list(job.args), **job.kwargs, "id": job.id} for job in jobs]

    results = queue.enqueue_many(
        [{"args": [1, 2], "kwargs": {}}, {"args": [], "kwargs": {"n": 3}}], name=NAME
    )
    await work_off(storage, {NAME: many}, concurrency=5)

    first, second = (queue.get_result(result.id) for result in results)
    assert first == {"args": [1, 2], "id": results[0].id}
    assert second == {"args": [], "n": 3, "id": results[1].id}


@BOTH
async def test_batched_call_has_no_single_current_job(storage, queue, is_async):
    seen = []
    put(queue, 2)
    handlers = batched(lambda jobs: seen.append(current_job()), 2, is_async=is_async)
    await work_off(storage, handlers, concurrency=2)

    assert seen == [None]


# Ends.


@BOTH
async def test_returned_list_sets_the_outcome_of_each_batched_job(storage, queue, is_async):
    def many(jobs):
        return ["fine", ValueError("broken"), Discard(), UnrecoverableError("never")]

    ids = put(queue, 4, max_attempts=1)
    await work_off(storage, batched(many, 4, is_async=is_async), concurrency=4)

    found = [record(queue, job_id) for job_id in ids]
    assert [(one.state, one.reason) for one in found] == [
        ("completed", ""),
        ("failed", "max_attempts_exceeded"),
        ("cancelled", "discarded"),
        ("failed", "explicit_fail"),
    ]
    assert queue.get_result(ids[0]) == "fine"
    assert found[1].error.message == "broken"


async def test_returned_mapping_sets_outcomes_by_job_id(storage, queue):
    def many(jobs):
        return {jobs[1].id: "second", jobs[2].id: KeyError("third")}

    ids = put(queue, 3, max_attempts=1)
    await work_off(storage, batched(many, 3), concurrency=3)

    assert [record(queue, job_id).state for job_id in ids] == ["completed", "completed", "failed"]
    assert [queue.get_result(job_id) for job_id in ids[:2]] == [None, "second"]


@BOTH
async def test_exception_of_a_batch_fails_all_its_jobs(storage, queue, is_async):
    calls = []

    def many(jobs):
        calls.append(len(jobs))
        raise KeyError("price")

    ids = put(queue, 3, max_attempts=2, backoff=0)
    await work_off(storage, batched(many, 3, is_async=is_async), concurrency=3)

    assert sum(calls) == 6
    for job_id in ids:
        found = record(queue, job_id)
        assert (found.state, found.failures) == ("failed", 2)
        assert found.error.type == "builtins.KeyError"
        assert found.error.traceback.count('raise KeyError("price")') == 1


async def test_batched_jobs_can_be_retried_or_snoozed_individually(storage, queue):
    ids = put(queue, 2)
    handlers = batched(lambda jobs: [Snooze(delay=600), "done"], 2)
    async with working(storage, handlers, concurrency=2):
        delayed = await reached(queue, ids[0], "delayed")
        await reached(queue, ids[1], "completed")

    assert (delayed.attempts, delayed.failures) == (0, 0)


@pytest.mark.parametrize("value", [[1], [1, 2, 3], {"nobody": 1}, "ab", 7], ids=repr)
async def test_invalid_return_value_of_a_batch_fails_its_jobs_without_retry(storage, queue, value):
    ids = put(queue, 2)
    await work_off(storage, batched(lambda jobs: value, 2), concurrency=2)

    for job_id in ids:
        assert record(queue, job_id).reason == "invalid_result"
        assert "a batch of 2 jobs must return" in record(queue, job_id).error.message


def test_batch_that_returns_none_completes_each_job_with_none():
    assert spread(None, ["a", "b"]) == [None, None]


async def test_batched_job_without_arguments_fails_alone(storage, queue):
    ids = put(queue, 1)
    odd = queue.enqueue("no arguments", name=NAME).id
    await work_off(storage, batched(numbers, 2), concurrency=2)

    assert queue.get_result(ids[0]) == 0
    assert record(queue, odd).reason == "invalid_payload"


async def test_result_that_cannot_be_stored_fails_only_its_batched_job(storage, queue):
    ids = put(queue, 2)
    await work_off(storage, batched(lambda jobs: [object(), 2], 2), concurrency=2)

    assert [record(queue, job_id).state for job_id in ids] == ["failed", "completed"]


# Stops.

WAITING = {"size": 10, "wait": 3600}


async def test_batched_job_cancelled_before_the_call_never_runs(storage, queue):
    calls = []
    handlers = batched(lambda jobs: calls.append(numbers(jobs)), {"size": 3, "wait": 3600})
    async with working(storage, handlers, concurrency=10, heartbeat=0.02) as worker:
        ids = put(queue, 2)
        await aeventually(lambda: worker.running == 2)
        queue.cancel(ids[0])
        await reached(queue, ids[0], "cancelled")
        put(queue, 2)
        await reached(queue, ids[1], "completed")

    assert calls == [[1, 0, 1]]


@pytest.mark.parametrize("hurry", [False, True])
async def test_waiting_batch_is_released_without_attempts_when_the_worker_stops(storage, queue, hurry):
    calls = []
    async with working(storage, batched(calls.append, WAITING), shutdown_timeout=3600) as worker:
        ids = put(queue, 3)
        await aeventually(lambda: worker.running == 3)
        worker.stop(hurry=hurry)

    assert calls == []
    for job_id in ids:
        assert (record(queue, job_id).state, record(queue, job_id).attempts) == ("waiting", 0)
    assert worker.counters.released == 3


async def test_timeout_of_a_batched_job_starts_with_the_call(storage, queue):
    [job_id] = put(queue, 1, timeout=0.05)
    handlers = batched(lambda jobs: ["in time"], {"size": 3, "wait": 0.1})
    await work_off(storage, handlers)

    assert queue.get_result(job_id) == "in time"


async def test_async_batch_is_cancelled_at_its_timeout(storage, queue):
    cancelled = []

    async def many(jobs):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(len(jobs))
            raise

    ids = put(queue, 2, timeout=0.05, max_attempts=1)
    await work_off(storage, {NAME: job(name=NAME, batch=2)(many)}, concurrency=2)

    assert cancelled == [2]
    assert [record(queue, job_id).reason for job_id in ids] == ["timeout", "timeout"]


@BOTH
async def test_cancelled_batched_job_is_notified_and_ends_with_the_call(storage, queue, is_async):
    started, seen = threading.Event(), []

    async def amany(jobs):
        started.set()
        assert await jobs[0].cancelled.wait(PATIENCE)
        seen.append([job.cancelled.is_set() for job in jobs])
        return [Discard(), "kept"]

    def many(jobs):
        started.set()
        assert jobs[0].cancelled.wait(PATIENCE)
        seen.append([job.cancelled.is_set() for job in jobs])
        return [Discard(), "kept"]

    ids = put(queue, 2)
    handlers = {NAME: job(name=NAME, batch=2)(amany if is_async else many)}
    async with working(storage, handlers, concurrency=2, heartbeat=0.02):
        await aeventually(started.is_set)
        queue.cancel(ids[0])
        await reached(queue, ids[0], "cancelled")
        await reached(queue, ids[1], "completed")

    assert seen == [[True, False]]
    assert queue.get_result(ids[1]) == "kept"


async def test_async_batch_is_cancelled_when_all_its_jobs_are_cancelled(storage, queue):
    started = asyncio.Event()

    async def many(jobs):
        started.set()
        await asyncio.Event().wait()

    ids = put(queue, 2)
    async with working(storage, {NAME: job(name=NAME, batch=2)(many)}, concurrency=2, heartbeat=0.02):
        await started.wait()
        for job_id in ids:
            queue.cancel(job_id)
        for job_id in ids:
            await reached(queue, job_id, "cancelled")


async def test_sync_batch_that_does_not_stop_is_released_at_shutdown(storage, queue, monkeypatch, caplog):
    monkeypatch.setattr("djqueue.runtime.shutdown.RELEASE_AFTER", 0.05)
    gate, started = threading.Event(), threading.Event()

    def many(jobs):
        started.set()
        assert gate.wait(PATIENCE)

    ids = put(queue, 2)
    async with working(storage, batched(many, 2), concurrency=2, shutdown_timeout=0.05) as worker:
        await aeventually(started.is_set)
        worker.stop()
    gate.set()

    assert worker.abandoned == 2
    assert [record(queue, job_id).attempts for job_id in ids] == [0, 0]
    assert any("did not stop" in line for line in messages(caplog))


# Declaring.


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        (0, "batch.size"),
        (True, "batch.size"),
        (10_001, "batch.size"),
        ("10", "batch.size"),
        (None, "batch.size"),
        ({}, "size is required"),
        ({"size": 2, "min_size": 3, "wait": 1}, "batch.min_size"),
        ({"size": 3, "min_size": 2}, "requires wait"),
        ({"size": 3, "wait": -1}, "batch.wait"),
        ({"size": 3, "wait": float("nan")}, "batch.wait"),
        ({"size": 3, "timeout": 1}, "unknown key 'timeout'"),
    ],
    ids=repr,
)
def test_invalid_batch_option_is_rejected_by_name(rule, named):
    with pytest.raises(OptionError, match=named):
        job(name=NAME, batch=rule)(print)
    assert registry.names() == []


def test_batch_options_belong_to_the_job_type(storage):
    with pytest.raises(OptionError, match="batch"):
        job(name=NAME)(print).using(batch=3)
    with pytest.raises(OptionError, match="batch"):
        Queue("work", storage=storage).enqueue(batch=3)


def test_using_keeps_the_batch_options():
    many = job(name=NAME, batch=3)(print)

    assert many.using(priority=1).batch == many.batch


# Storages.


async def test_batches_run_on_redis(redis_server):
    redis_server.clean()
    storage = RedisStorage(**redis_server.options)
    queue = Queue("work", storage=storage)
    calls = []

    def many(jobs):
        calls.append(len(jobs))
        return numbers(jobs)

    ids = put(queue, 5)
    try:
        await work_off(storage, batched(many, {"size": 5, "wait": 5}), concurrency=5)
        assert sum(calls) == 5
        assert [queue.get_result(job_id) for job_id in ids] == list(range(5))
    finally:
        storage.close()


@BOTH
async def test_function_may_empty_its_list(storage, queue, is_async):
    def many(jobs):
        results = {job.id: job.args[0] for job in jobs}
        jobs.clear()
        return results

    ids = put(queue, 3)
    await work_off(storage, batched(many, 3, is_async=is_async), concurrency=3)

    assert [queue.get_result(job_id) for job_id in ids] == [0, 1, 2]
