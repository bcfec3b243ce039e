"""`enqueue_and_wait`: the result of the job, or the error that explains why there is none."""

import asyncio
import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest

from djqueue import (
    Discard,
    JobFailedError,
    Queue,
    ResultTimeoutError,
    StorageUnavailableError,
    UnrecoverableError,
    Worker,
    job,
)
from djqueue.errors import (
    JobCancelledError,
    JobNotFoundError,
    MaxRetriesError,
    OptionError,
    PayloadTooLargeError,
    SerializationError,
)
from djqueue.testing.factories import claim_one, finish, releasing
from djqueue.testing.waiting import Recorder
from tests.support import PATIENCE

MEBIBYTE = "x" * (1024 * 1024 - 10)


@contextmanager
def working(*job_types, **handlers):
    handlers.update({job_type.name: job_type for job_type in job_types})
    with Worker(handlers=handlers, concurrency=4):
        yield


@pytest.fixture
def queue():
    return Queue("orders")


@pytest.fixture
def held(queue):
    """A handler that waits to be let go, and how to."""
    gate = threading.Event()

    def handle(job):
        assert gate.wait(PATIENCE)
        return {"n": job.payload}

    handle.let_go = gate.set
    yield handle
    gate.set()


@pytest.fixture
def let_go_at_a_duplicate(storage, held, monkeypatch):
    """The held handler goes on once an enqueue has been answered with the job that it runs."""
    enqueue = storage.enqueue

    def watched(batches):
        answers = enqueue(batches)
        if "duplicate" in {answer.status for answer in answers}:
            held.let_go()
        return answers

    monkeypatch.setattr(storage, "enqueue", watched)


@pytest.mark.parametrize("result", [None, False, 0, "", [], {}, {"n": (1, 2)}, b"\xff\0", MEBIBYTE])
def test_enqueue_and_wait_returns_the_value_of_the_job(queue, do, result):
    with working(orders=lambda job: result):
        returned = do(queue, "enqueue_and_wait", 1, wait=PATIENCE)

    assert returned == result
    assert type(returned) is type(result)


def test_job_type_enqueue_and_wait_returns_the_result_of_the_function(do):
    @job(name="add", queue="sums")
    def add(a, b=1, *, wait_for=0):
        return a + b + wait_for

    with working(add):
        assert do(add, "enqueue_and_wait", 2, b=3, wait_for=4, wait=PATIENCE) == 9
        assert do(add.using(timeout=30), "enqueue_and_wait", 2, wait=timedelta(seconds=PATIENCE)) == 3


def test_enqueue_and_wait_supports_async_functions(do):
    @job(name="double")
    async def double(n):
        await asyncio.sleep(0)
        return 2 * n

    with working(double):
        assert do(double, "enqueue_and_wait", 4, wait=PATIENCE) == 8


def test_enqueue_and_wait_of_completed_id_returns_without_a_worker(queue, do):
    runs = []
    with working(orders=runs.append):
        assert do(queue, "enqueue_and_wait", 1, id="a", wait=PATIENCE) is None

    assert do(queue, "enqueue_and_wait", 1, id="a", wait=0) is None
    assert len(runs) == 1


@pytest.mark.usefixtures("let_go_at_a_duplicate")
def test_enqueue_and_wait_waits_for_active_job_with_the_same_id(queue, do, held):
    active = Recorder()
    queue.on("started", active)
    with working(orders=held):
        queue.enqueue("first", id="a")
        active.until("started", "a")

        assert do(queue, "enqueue_and_wait", "second", id="a", wait=PATIENCE) == {"n": "first"}
    assert active.words() == ["started"]


@pytest.mark.usefixtures("let_go_at_a_duplicate")
def test_enqueue_and_wait_waits_for_the_owner_of_a_unique_key(queue, do, held):
    first = queue.enqueue("first", unique_key="k")

    with working(orders=held):
        assert do(queue, "enqueue_and_wait", "second", unique_key="k", wait=PATIENCE) == {"n": "first"}
    assert queue.get_status(first.id).attempts == 1


def test_many_callers_can_wait_for_one_job(queue, held):
    async def ask():
        asked = [queue.aenqueue_and_wait("x", id="a", wait=PATIENCE) for _ in range(20)]
        tasks = [asyncio.ensure_future(one) for one in asked]
        active = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop = queue.on("started", lambda _: loop.call_soon_threadsafe(active.set))
        with working(orders=held):
            await asyncio.wait_for(active.wait(), PATIENCE)
            held.let_go()
            results = await asyncio.gather(*tasks)
        stop()
        return results

    assert asyncio.run(ask()) == [{"n": "x"}] * 20


def test_many_coroutines_can_wait_for_their_own_jobs(queue):
    async def ask():
        with working(orders=lambda job: job.payload):
            asked = (queue.aenqueue_and_wait(n, wait=PATIENCE) for n in range(200))
            return await asyncio.gather(*asked)

    assert asyncio.run(ask()) == list(range(200))


def test_many_threads_can_wait_for_their_own_jobs(queue):
    answers = {}

    def ask(n):
        answers[n] = queue.enqueue_and_wait(n, wait=PATIENCE)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(20)]
    with working(orders=lambda job: job.payload):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)

    assert answers == {n: n for n in range(20)}


def test_failed_job_raises_its_error_to_the_waiting_caller(queue, do):
    def handle(job):
        raise UnrecoverableError("no such order")

    with working(orders=handle), pytest.raises(JobFailedError, match="no such order") as caught:
        do(queue, "enqueue_and_wait", {"n": 1}, id="a", wait=PATIENCE)

    error = caught.value
    assert not isinstance(error, MaxRetriesError)
    assert (error.job_id, error.reason) == ("a", "explicit_fail")
    assert error.error_type.endswith("UnrecoverableError")
    assert error.error_message == "no such order"
    assert "raise UnrecoverableError" in error.traceback
    assert error.payload == {"n": 1}


def test_exhausted_job_raises_max_retries_error(queue, do):
    def handle(job):
        raise KeyError("price")

    with working(orders=handle), pytest.raises(MaxRetriesError) as caught:
        do(queue, "enqueue_and_wait", [1], id="a", max_attempts=2, backoff=0, wait=PATIENCE)

    error = caught.value
    assert (error.reason, error.error_type) == ("max_attempts_exceeded", "builtins.KeyError")
    assert error.error_message == "'price'"
    assert error.payload == [1]
    assert queue.get_status("a").attempts == 2


def test_enqueue_and_wait_waits_until_a_retried_job_finishes(queue, do):
    def handle(job):
        if job.attempts < 3:
            raise KeyError("not yet")
        return job.attempts

    with working(orders=handle):
        assert do(queue, "enqueue_and_wait", 1, backoff=0, wait=PATIENCE) == 3


def test_cancelled_job_raises_job_cancelled_error(queue, do):
    queue.on("enqueued", lambda event: queue.cancel(event.id))

    with pytest.raises(JobCancelledError, match="'a'"):
        do(queue, "enqueue_and_wait", 1, id="a", wait=PATIENCE)


def test_discarded_job_raises_job_cancelled_error(queue, do):
    def handle(job):
        raise Discard("not needed")

    with working(orders=handle), pytest.raises(JobCancelledError):
        do(queue, "enqueue_and_wait", 1, wait=PATIENCE)


def test_removed_job_raises_job_not_found_error(queue, do):
    queue.on("enqueued", lambda event: queue.remove(event.id))

    with pytest.raises(JobNotFoundError, match="'a'"):
        do(queue, "enqueue_and_wait", 1, id="a", wait=PATIENCE)


def test_expired_job_raises_job_failed_error(queue, storage, do):
    def let_it_expire(event):
        storage.jobs.reschedule("orders", [event.id], 4_000_000_000_000)

    queue.on("enqueued", let_it_expire)

    with working(other=print), pytest.raises(JobFailedError, match="ttl_expired"):
        do(queue, "enqueue_and_wait", 1, ttl=0.01, wait=PATIENCE)


def test_timeout_of_the_waiting_caller_does_not_stop_the_job(queue, do, held):
    ended = Recorder()
    queue.on("completed", ended)
    with working(orders=held):
        with pytest.raises(
            ResultTimeoutError, match=r"'a' of queue 'orders'.*0\.05 s.*was not stopped"
        ) as caught:
            do(queue, "enqueue_and_wait", 7, id="a", wait=0.05)
        held.let_go()
        ended.until("completed", "a")

    assert isinstance(caught.value, TimeoutError)
    assert caught.value.job_id == "a"
    assert queue.get_result("a") == {"n": 7}


def test_wait_of_zero_enqueues_and_times_out(queue, do):
    with pytest.raises(ResultTimeoutError):
        do(queue, "enqueue_and_wait", 1, id="a", wait=0)
    assert queue.get_job("a").state == "waiting"


@pytest.mark.parametrize("wait", [-1, float("nan"), float("inf"), "10", None])
def test_wrong_wait_is_rejected_and_nothing_is_stored(queue, storage, do, wait):
    with pytest.raises(OptionError, match="wait"):
        do(queue, "enqueue_and_wait", 1, wait=wait)
    assert storage.queues.names() == []


def test_enqueue_and_wait_rejects_wrong_payloads(queue, storage, do):
    with pytest.raises(SerializationError, match=r"payload\[0\]"):
        do(queue, "enqueue_and_wait", [object()], wait=PATIENCE)
    with pytest.raises(PayloadTooLargeError):
        do(queue, "enqueue_and_wait", 2 * MEBIBYTE, wait=PATIENCE)
    assert storage.queues.names() == []


def test_waiting_leaves_no_subscription(queue, storage, do, monkeypatch):
    open_ones = []
    subscribe = storage.events.subscribe

    def counted(*args):
        stop = subscribe(*args)
        open_ones.append(stop)

        def unsubscribe():
            open_ones.remove(stop)
            stop()

        return unsubscribe

    monkeypatch.setattr(storage.events, "subscribe", counted)
    with working(orders=lambda job: 1):
        do(queue, "enqueue_and_wait", 1, wait=PATIENCE)
    with pytest.raises(ResultTimeoutError):
        do(queue, "enqueue_and_wait", 1, wait=0)
    queue.enqueue(1, unique_key="k")
    with pytest.raises(ResultTimeoutError):
        do(queue, "enqueue_and_wait", 1, unique_key="k", wait=0)

    assert open_ones == []


def test_waiting_recovers_from_a_lost_event_by_polling(queue, storage, do, monkeypatch):
    """A connection may break just when the job ends: the caller looks for itself now and then."""
    monkeypatch.setattr("djqueue.client.results.CHECK_EVERY", 0.02)
    monkeypatch.setattr(storage.events, "subscribe", lambda *args: lambda: None)

    with working(orders=lambda job: "all the same"):
        assert do(queue, "enqueue_and_wait", 1, wait=PATIENCE) == "all the same"


def test_waiting_retries_an_unavailable_storage(queue, storage, do, monkeypatch):
    """The connection is lost after the enqueue, and comes back."""
    monkeypatch.setattr("djqueue.client.results.RETRY_INTERVAL", 0.01)
    jobs, refusals = storage.reads.jobs, iter(range(3))

    def away_at_first(*args):
        if next(refusals, None) is not None:
            raise StorageUnavailableError("the cable is out")
        return jobs(*args)

    monkeypatch.setattr(storage.reads, "jobs", away_at_first)
    with working(orders=lambda job: "all the same"):
        assert do(queue, "enqueue_and_wait", 1, wait=PATIENCE) == "all the same"
    assert next(refusals, None) is None


def test_wait_timeout_during_an_outage_names_the_cause(queue, storage, do, monkeypatch):
    def away(*args):
        raise StorageUnavailableError("the cable is out")

    monkeypatch.setattr(storage.reads, "jobs", away)
    with pytest.raises(ResultTimeoutError) as caught:
        do(queue, "enqueue_and_wait", 1, wait=0)
    assert isinstance(caught.value.__cause__, StorageUnavailableError)


def test_cancelled_coroutine_stops_waiting_without_stopping_the_job(queue):
    async def give_up():
        task = asyncio.ensure_future(queue.aenqueue_and_wait(1, id="a", wait=PATIENCE))
        queued = asyncio.Event()
        queue.on("enqueued", lambda _: queued.set())
        await queued.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())

    assert queue.get_job("a").state == "waiting"


def test_result_removed_before_it_is_read_raises_job_not_found_error(queue, storage, do):
    queue.on("completed", lambda event: queue.remove(event.id))

    with working(orders=lambda job: 1), pytest.raises(JobNotFoundError):
        do(queue, "enqueue_and_wait", 1, wait=PATIENCE)
    assert storage.queues.names() == ["orders"]


def test_expired_result_raises_job_not_found_error(queue, storage, do, monkeypatch):
    read = storage.reads.jobs

    def without_result(*args):
        return [record and record._replace(result=None) for record in read(*args)]

    monkeypatch.setattr(storage.reads, "jobs", without_result)
    with working(orders=lambda job: 1), pytest.raises(JobNotFoundError, match="has expired"):
        do(queue, "enqueue_and_wait", 1, wait=PATIENCE)


def test_enqueue_and_wait_returns_ten_megabytes(queue, do, settings):
    settings.DJQUEUE = {**settings.DJQUEUE, "MAX_PAYLOAD": 20_000_000}
    with working(orders=lambda job: "x" * 10_000_000):
        assert len(do(queue, "enqueue_and_wait", 1, wait=PATIENCE)) == 10_000_000


def test_enqueue_and_wait_waits_for_job_released_by_another_worker(queue, storage, do):
    """The run that a dead worker left is made up for by the next one."""
    queue.enqueue(1, id="a")
    lost = claim_one(storage, names=["orders"])
    threading.Timer(0.02, finish, (storage, releasing(lost))).start()
    with working(orders=lambda job: job.attempts):
        assert do(queue, "enqueue_and_wait", 1, id="a", wait=PATIENCE) == 1
