"""Timeout errors of waiting callers: where the job is, and the remedy."""

from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync

from djqueue import Queue, ResultTimeoutError, StorageUnavailableError, job
from djqueue.testing.factories import claim, claim_one, finish, retrying, worker

NO_WORKER = r"has not started\. No live worker serves the queue\. .*runworkers"


@pytest.fixture
def queue():
    return Queue("orders")


def a_worker(storage, **given):
    storage.workers.register(worker(**{"queues": None, "names": ("orders",), **given}))


@pytest.fixture
def message(do):
    def read(thing, *args, **kwargs):
        with pytest.raises(ResultTimeoutError) as caught:
            do(thing, "enqueue_and_wait", *args, wait=0, **kwargs)
        assert caught.value.job_id
        return str(caught.value)

    return read


def test_timeout_error_names_missing_worker(queue, message):
    text = message(queue, id="a")

    assert text.startswith(
        "Job 'a' of queue 'orders' did not finish within 0 s, and was not stopped. It has not started. "
    )
    assert "No live worker serves the queue." in text
    assert "manage.py runworkers" in text


def test_timeout_error_names_missing_handler(queue, message, storage):
    a_worker(storage, names=("others",))

    assert "No live worker of the queue has a handler for orders. Deploy the code" in message(queue)


def test_timeout_error_names_busy_workers(queue, message, storage):
    a_worker(storage, concurrency=1, active=1)
    queue.enqueue()

    assert (
        "Every worker that can run the job is busy. Add slots or workers. 1 job is ahead of it."
        in message(queue)
    )


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda queue: queue.pause(), "The queue is paused."),
        (
            lambda queue: queue.set_limits(concurrency=1),
            "The queue has reached its concurrency limit of 1.",
        ),
        (
            lambda queue: queue.set_limits(rate="1/h"),
            "The queue has reached its rate limit. It can start at 20",
        ),
    ],
    ids=["paused", "concurrency", "rate"],
)
def test_timeout_error_names_paused_or_limited_queue(queue, message, storage, prepare, expected):
    a_worker(storage, concurrency=9)
    queue.enqueue()
    prepare(queue)
    claim(storage, queues=["orders"], names=["orders"])

    assert expected in message(queue)


def test_timeout_error_names_the_run_time_of_delayed_job(queue, message):
    text = message(queue, delay=timedelta(hours=1))

    assert "It has not started. The job is scheduled for later. It can start at 20" in text


def test_timeout_error_names_unmet_dependencies(queue, message):
    first = queue.enqueue()

    text = message(queue, depends_on=[first])

    assert f"waits for unfinished dependencies. They are {first.id!r} of queue 'orders' (waiting)." in text


def test_timeout_error_names_the_worker_of_active_job(queue, do, storage):
    result = queue.enqueue(id="a")
    a_worker(storage, id="w1")
    claim_one(storage, queues=["orders"], names=["orders"], worker="w1")

    with pytest.raises(
        ResultTimeoutError,
        match=r"did not finish within 0 s, and was not stopped\. It is running on worker w1",
    ):
        result.wait(0)


def test_timeout_error_names_the_next_attempt(queue, storage):
    result = queue.enqueue(id="a")
    claimed = claim_one(storage, queues=["orders"], names=["orders"])
    finish(storage, retrying(claimed, delay=3_600_000))

    with pytest.raises(
        ResultTimeoutError, match=r"Attempt 1 failed; the next one has not started\. .* It can start at 20"
    ):
        result.wait(0)


def test_results_and_streams_have_the_same_timeout_error(queue):
    result = queue.enqueue(id="a")

    with pytest.raises(ResultTimeoutError, match=NO_WORKER):
        result.wait(0)
    with pytest.raises(ResultTimeoutError, match=NO_WORKER):
        list(queue.stream("a", wait=0))


def test_async_results_and_streams_have_the_same_timeout_error(queue):
    result = queue.enqueue(id="a")

    async def read():
        return [item async for item in queue.astream("a", wait=0)]

    with pytest.raises(ResultTimeoutError, match=NO_WORKER):
        async_to_sync(result.await_)(0)
    with pytest.raises(ResultTimeoutError, match=NO_WORKER):
        async_to_sync(read)()


def test_timeout_error_of_job_type_names_its_queue(message):
    @job(name="add", queue="sums")
    def add(a):
        return a

    text = message(add, 1)

    assert "of queue 'sums' did not finish within" in text
    assert "No live worker serves the queue." in text


def test_timeout_error_is_raised_when_the_explanation_is_unavailable(queue, storage, monkeypatch):
    def away(*_):
        raise StorageUnavailableError("away")

    monkeypatch.setattr(storage.reads, "explain", away)

    with pytest.raises(
        ResultTimeoutError,
        match=r"did not finish within 0 s, and was not stopped\. It is still waiting in its queue\.$",
    ):
        queue.enqueue_and_wait(wait=0)
