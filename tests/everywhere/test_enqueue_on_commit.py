"""`enqueue_on_commit`: jobs that are enqueued when the caller's transaction commits."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, transaction

from djqueue import Queue, Worker, chain, flow, job
from djqueue.client.info import JobInfo
from djqueue.client.transactions import DeferredResult
from djqueue.core.states import State
from djqueue.errors import (
    JobNotFoundError,
    OptionError,
    QueueFullError,
    SerializationError,
    WaitInTransactionError,
)
from djqueue.storage.base import Storage
from djqueue.storage.database import DatabaseStorage
from tests.support import PATIENCE

AWAY: dict[str, Any] = {"enqueue_on_commit": True, "durable": False}
"""Options of a job that waits for the commit: with the database storage, others join the transaction."""


class RolledBackError(Exception):
    """Rolls a block back."""


@pytest.fixture
def queue(storage: Storage) -> Queue:
    return Queue("orders", **AWAY)


@pytest.fixture(params=["sync", "async"])
def do(request):
    """Calls a method, or its async version from sync code, in whose transaction that is."""

    def call(thing, method, *args, **kwargs):
        if request.param == "sync":
            return getattr(thing, method)(*args, **kwargs)
        return async_to_sync(getattr(thing, f"a{method}"))(*args, **kwargs)

    return call


def waiting(queue: Queue) -> list[Any]:
    return sorted(
        JobInfo(record).payload for record in queue.storage.reads.page(queue.name, State.WAITING, 10)
    )


@contextmanager
def rolled_back() -> Iterator[None]:
    """A transaction, or a savepoint, that is rolled back by an exception at its end."""
    with suppress(RolledBackError), transaction.atomic():
        yield
        raise RolledBackError


def test_job_is_enqueued_when_the_transaction_commits(queue, do):
    with transaction.atomic():
        result = do(queue, "enqueue", 1)
        assert (result.status, result.queue) == ("deferred", "orders")
        assert waiting(queue) == []

    assert waiting(queue) == [1]
    assert queue.get_job(result.id).payload == 1


def test_job_is_enqueued_immediately_outside_a_transaction(queue, do):
    result = do(queue, "enqueue", 1)

    assert result.status == "queued"
    assert waiting(queue) == [1]


def test_rollback_drops_the_job(queue, do):
    with rolled_back():
        do(queue, "enqueue", 1)

    assert waiting(queue) == []


def test_rolled_back_savepoint_drops_only_its_jobs(queue, do):
    with transaction.atomic():
        do(queue, "enqueue", 1)
        with rolled_back():
            do(queue, "enqueue", 2)
            with transaction.atomic():
                do(queue, "enqueue", 3)
        with transaction.atomic():
            do(queue, "enqueue", 4)
        assert waiting(queue) == []

    assert waiting(queue) == [1, 4]


def test_thousands_of_jobs_are_enqueued_on_commit(queue, do):
    with transaction.atomic():
        results = do(queue, "enqueue_many", range(2_500))
        named = do(queue, "enqueue_many", iter(["a", "b"]), ids=iter(["x", "y"]))
        assert {result.status for result in results} == {"deferred"}
        assert queue.counts()["waiting"] == 0

    assert queue.counts()["waiting"] == 2_502
    assert [queue.get_job(results[place].id).payload for place in (0, 999, 1_000, 2_499)] == [
        0,
        999,
        1_000,
        2_499,
    ]
    assert [(result.id, queue.get_job(result.id).payload) for result in named] == [("x", "a"), ("y", "b")]


def test_whole_flow_is_enqueued_on_commit_if_one_job_requires_it(storage, do):
    first = Queue("first", durable=False).node(1)
    second = Queue("second", **AWAY).node(2)
    with transaction.atomic():
        result = do(chain(first, second), "enqueue")
        assert [one.status for one in result] == ["deferred", "deferred"]
        assert storage.reads.states("first", [result[first].id]) == [None]

    assert storage.reads.states("first", [result[first].id]) == ["waiting"]
    assert storage.reads.states("second", [result[second].id]) == ["blocked"]


def test_flow_with_commits_of_different_databases_is_rejected(storage):
    one = Queue("first", enqueue_on_commit=True).node(1)
    other = Queue("second", enqueue_on_commit="default").node(2)

    with pytest.raises(OptionError, match="must use the same value; got 'default', True"):
        flow(one, other).enqueue()


def test_job_function_supports_enqueue_on_commit(storage, do):
    @job(name="pay", queue="orders", **AWAY)
    def pay(order):
        return order

    with transaction.atomic():
        one = do(pay, "enqueue", 1)
        many = do(pay, "enqueue_many", [((2,), {}), ((3,), {})])
        now = do(pay.using(enqueue_on_commit=False), "enqueue", 4)
        assert [result.status for result in (one, *many, now)] == ["deferred"] * 3 + ["queued"]
        assert Queue("orders").counts()["waiting"] <= 1

    assert Queue("orders").counts()["waiting"] == 4


def test_setting_is_the_default_for_all_jobs(storage, settings, do):
    settings.DJQUEUE = {**settings.DJQUEUE, "ENQUEUE_ON_COMMIT": True}
    queue = Queue("orders", durable=False)

    with transaction.atomic():
        assert do(queue, "enqueue", 1).status == "deferred"
        assert do(queue, "enqueue", 2, enqueue_on_commit=False).status == "queued"
        assert waiting(queue) in ([], [2])  # SQLite has one writer at a time: this transaction.

    assert waiting(queue) == [1, 2]


def test_unknown_database_alias_is_rejected(queue, do):
    with pytest.raises(OptionError, match=r"^enqueue_on_commit: 'defualt' is not one of DATABASES"):
        do(queue, "enqueue", 1, enqueue_on_commit="defualt")
    with transaction.atomic():
        assert do(queue, "enqueue", 1, enqueue_on_commit="default").status == "deferred"


def test_wrong_arguments_are_rejected_before_the_commit(storage, do):
    @job(name="pay", **AWAY)
    def pay(order):
        return order

    with transaction.atomic():
        with pytest.raises(TypeError, match="order"):
            do(pay, "enqueue")
        with pytest.raises(SerializationError, match="object"):
            do(pay, "enqueue", object())
        assert connection.run_on_commit == []


def test_deferred_jobs_keep_the_order_of_the_calls(queue):
    with transaction.atomic():
        for number in range(5):
            queue.enqueue(number)

    seen = []
    with Worker(
        handlers={"orders": lambda job: seen.append(job.payload)}, concurrency=1, until_empty=True
    ) as it:
        assert it.join(PATIENCE)
    assert seen == list(range(5))


def test_deferred_job_can_depend_on_another_deferred_job(queue):
    with transaction.atomic():
        first = queue.enqueue(1)
        second = queue.enqueue(2, depends_on=[first])

    assert [queue.get_job(one.id).state for one in (first, second)] == ["waiting", "blocked"]


# Results.


def test_deferred_result_has_its_job_after_the_commit(queue, do):
    with transaction.atomic():
        result = do(queue, "enqueue", 1)
        assert do(result, "refresh") is result
        assert do(result, "job") is None

    assert do(result, "refresh").existing_state == "waiting"
    assert do(result, "refresh").status == "queued"
    assert do(result, "job").payload == 1
    with Worker(handlers={"orders": lambda job: job.payload + 1}):
        assert result.wait(PATIENCE) == 2


def test_deferred_result_of_a_duplicate_refers_to_the_existing_job(queue, do):
    existing = queue.enqueue(1, unique_key="k")
    with transaction.atomic():
        result = do(queue, "enqueue", 2, unique_key="k")

    assert result.id != existing.id
    found = do(result, "refresh")
    assert (found.id, found.status, found.existing_state) == (existing.id, "duplicate", "waiting")
    assert do(result, "job").payload == 1


def test_waiting_for_a_job_of_the_open_transaction_is_rejected_immediately(queue, do):
    with transaction.atomic():
        result = do(queue, "enqueue", 1)
        with pytest.raises(WaitInTransactionError, match="still open"):
            result.wait(600)
        with pytest.raises(WaitInTransactionError, match="still open"):
            async_to_sync(result.await_)(600)
        can_leave = queue.storage.capabilities.transactions.can_leave
        remedy = "enqueue_on_commit=False and durable=False" if can_leave else "Wait after the commit"
        with pytest.raises(WaitInTransactionError, match=remedy):
            do(queue, "enqueue_and_wait", 2, wait=600)
        with pytest.raises(WaitInTransactionError, match=remedy):
            next(queue.enqueue_and_stream(3, wait=600))

    assert waiting(queue) == [1]


def test_job_can_be_waited_for_outside_a_transaction(queue, do):
    with Worker(handlers={"orders": lambda job: job.payload + 1}):
        assert do(queue, "enqueue_and_wait", 1, wait=PATIENCE) == 2


def test_result_of_a_rolled_back_transaction_has_no_job(queue, do):
    with rolled_back():
        result = do(queue, "enqueue", 1)

    with pytest.raises(JobNotFoundError, match="was rolled back"):
        do(result, "refresh")
    with pytest.raises(JobNotFoundError, match="was rolled back"):
        result.wait(600)
    assert do(result, "job") is None


# Errors, and Django's tests.


def test_error_after_the_commit_is_raised_in_the_committing_code(storage, settings, queue):
    settings.DJQUEUE = {**settings.DJQUEUE, "MIDDLEWARE": ["tests.everywhere.test_enqueue_on_commit.Full"]}
    results = []
    with pytest.raises(QueueFullError, match="is full"), transaction.atomic():
        results.append(queue.enqueue(1))

    assert [result.status for result in results] == ["deferred"]
    assert waiting(queue) == []
    with pytest.raises(JobNotFoundError, match="enqueueing failed after the commit"):
        results[0].refresh()


class Full:
    """Refuses every job, as a full queue does."""

    def enqueue(self, batch, call_next):
        raise QueueFullError(f"queue {batch.queue!r} is full")

    async def aenqueue(self, batch, call_next):
        raise QueueFullError(f"queue {batch.queue!r} is full")


def test_middleware_runs_after_the_commit(storage, settings, queue, do):
    settings.DJQUEUE = {**settings.DJQUEUE, "MIDDLEWARE": ["tests.everywhere.test_enqueue_on_commit.Marking"]}
    with transaction.atomic():
        result = do(queue, "enqueue", 1)

    assert queue.get_job(result.id).headers == {"in_transaction": False}


class Marking:
    """Notes whether a transaction is open."""

    def enqueue(self, batch, call_next):
        return call_next(batch.with_headers({"in_transaction": connection.in_atomic_block}))

    async def aenqueue(self, batch, call_next):
        raise AssertionError("callbacks are synchronous")


def test_django_captures_the_callback_in_a_test_case(storage, django_capture_on_commit_callbacks):
    queue = Queue("orders", **AWAY)
    with transaction.atomic():
        with django_capture_on_commit_callbacks(execute=True) as callbacks:
            result = queue.enqueue(1)
            assert waiting(queue) == []
        assert len(callbacks) >= 1
        # The test's transaction is the only writer of SQLite: there, the job is written when it ends.
        if not isinstance(storage, DatabaseStorage) or connection.vendor != "sqlite":
            assert queue.get_job(result.id).payload == 1
        assert result.refresh().existing_state in ("waiting", None)
        transaction.set_rollback(True)
    assert queue.get_job(result.id).payload == 1


async def test_coroutine_without_a_transaction_enqueues_immediately(queue):
    result = await queue.aenqueue(1)

    assert result.status == "queued"
    assert not isinstance(result, DeferredResult)


def test_transaction_of_another_thread_does_not_defer_the_job(queue):
    with transaction.atomic():
        result = asyncio.run(queue.aenqueue(1))

    assert result.status == "queued"
