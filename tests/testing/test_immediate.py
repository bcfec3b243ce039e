"""Immediate mode: the fixture `djqueue_immediate` runs jobs when they are enqueued."""

import asyncio
import threading
from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.db import connection

from djqueue import Queue, Snooze, chain, current_job, job
from djqueue.core.errors import JobFailedError, JobTimeoutError
from djqueue.runtime.immediate import MAX_NESTING
from djqueue.signals import job_completed
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("djqueue_immediate")


@pytest.fixture
def ran():
    return []


@pytest.fixture
def note(ran):
    @job(name="note")
    def note(value):
        ran.append(value)
        return value

    return note


def test_job_has_run_when_enqueue_returns(note, ran):
    answer = note.enqueue(7)

    assert ran == [7]
    assert answer.status == "queued"
    assert answer.wait(0) == 7


def test_caller_can_wait_for_the_result(note):
    assert note.enqueue_and_wait(7) == 7


async def test_coroutine_can_enqueue_and_wait(note, ran):
    @job(name="anote")
    async def anote(value):
        await note.aenqueue(value + 1)
        ran.append(value)
        return value

    await anote.aenqueue(1)
    assert ran == [2, 1]
    assert await anote.aenqueue_and_wait(5) == 5
    assert await note.aenqueue_and_wait(6) == 6


async def test_sync_enqueue_in_a_coroutine_runs_its_job_on_another_thread(note, ran):
    note.enqueue(1)

    assert ran == [1]


def test_functions_run_on_the_thread_of_the_caller():
    @job(name="thread")
    def thread():
        return threading.get_ident()

    assert thread.enqueue_and_wait() == threading.get_ident()


def test_payloads_and_results_pass_through_their_codec(ran):
    @job(name="keep")
    def keep(value):
        ran.append(value)
        return value

    given = [1, {"a": (2,)}]
    result = keep.enqueue_and_wait(given)

    assert result == ran[0] == given
    assert ran[0] is not given
    assert result is not ran[0]


def test_nested_jobs_run_first(ran):
    @job(name="down")
    def down(n):
        if n:
            down.enqueue(n - 1)
        ran.append(n)

    down.enqueue(3)

    assert ran == [0, 1, 2, 3]


def test_job_can_wait_for_another_job(note):
    @job(name="outer")
    def outer(n):
        return note.enqueue_and_wait(n) + 1

    assert outer.enqueue_and_wait(1) == 2


def test_workflow_runs_to_the_end(ran, note):
    @job(name="total")
    def total():
        ran.append(sum(child.result for child in current_job().children()))

    chain(note.node(3), total.node()).enqueue()

    assert ran == [3, 3]


def test_many_jobs_run_in_order(note, ran):
    note.enqueue_many([((n,), {}) for n in range(20)])

    assert ran == list(range(20))


def test_delays_are_skipped(note, ran):
    note.using(delay=timedelta(days=3)).enqueue(1)

    assert ran == [1]


def test_rates_are_skipped(note, ran, settings):
    settings.DJQUEUE = {**settings.DJQUEUE, "QUEUES": {"default": {"RATE": "1/d", "KEY_RATE": "1/d"}}}

    for n in range(3):
        note.enqueue(n)

    assert ran == [0, 1, 2]


def test_snoozed_job_stays_delayed(ran):
    @job(name="snooze")
    def snooze():
        ran.append(1)
        raise Snooze(delay=60)

    answer = snooze.enqueue()

    assert ran == [1]
    assert answer.job().state == "delayed"


def test_retries_run_immediately(ran):
    @job(name="flaky", max_attempts=5, backoff=3_600)
    def flaky():
        ran.append(1)
        if len(ran) < 4:
            raise KeyError("not yet")
        return "done"

    assert flaky.enqueue_and_wait() == "done"
    assert len(ran) == 4


@pytest.fixture
def fail(ran):
    @job(name="fail", max_attempts=2, backoff=60)
    def fail():
        ran.append("fail")
        raise KeyError("broken")

    return fail


def test_failed_job_raises_its_own_exception(fail, ran):
    with pytest.raises(KeyError, match="broken") as caught:
        fail.enqueue()

    assert ran == ["fail", "fail"]
    assert caught.value.__notes__[0].startswith("Job fail (")
    assert Queue("default").counts()["failed"] == 1


def test_failures_are_only_recorded_with_raise_failures_off(fail, djqueue_immediate):
    djqueue_immediate.raise_failures = False

    assert fail.enqueue().job().state == "failed"


def test_waiting_caller_gets_job_failed_error(fail):
    with pytest.raises(JobFailedError):
        fail.enqueue_and_wait()

    with pytest.raises(KeyError, match="broken"):
        fail.enqueue()


async def test_waiting_coroutine_gets_job_failed_error(fail):
    with pytest.raises(JobFailedError):
        await fail.aenqueue_and_wait()
    with pytest.raises(KeyError, match="broken"):
        await fail.aenqueue()


def test_failure_of_a_nested_job_does_not_fail_the_outer_job(fail, ran):
    @job(name="outer")
    def outer():
        fail.enqueue()
        ran.append("end")

    with pytest.raises(KeyError, match="broken"):
        outer.enqueue()

    assert ran[-1] == "end"
    assert Queue("default").counts()["completed"] == 1


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_exit_in_a_job_does_not_end_the_test(error):
    @job(name="exit", max_attempts=1)
    def leave():
        raise error

    with pytest.raises(JobFailedError, match="Job exit"):
        leave.enqueue()


def test_retried_dead_letter_runs_immediately(djqueue_immediate, ran):
    @job(name="once", max_attempts=1)
    def once():
        ran.append(1)
        if len(ran) == 1:
            raise KeyError("first")

    djqueue_immediate.raise_failures = False
    answer = once.enqueue()

    assert djqueue_immediate.jobs.retry("default", [answer.id]) == ["retried"]
    assert len(ran) == 2


async def test_dead_letter_retried_by_a_coroutine_runs_immediately(djqueue_immediate, ran):
    @job(name="once", max_attempts=1)
    def once():
        ran.append(1)
        if len(ran) == 1:
            raise KeyError("first")

    djqueue_immediate.raise_failures = False
    answer = await once.aenqueue()
    await djqueue_immediate.acall(djqueue_immediate.jobs.retry, "default", [answer.id])

    assert len(ran) == 2


def test_queue_handlers_can_be_set_on_the_storage(djqueue_immediate, ran):
    Queue("orders").enqueue(1)
    assert ran == []

    djqueue_immediate.handlers = {"orders": lambda job: ran.append(job.payload)}
    Queue("orders").enqueue(2)

    assert ran == [1, 2]


def test_signals_are_sent_on_the_thread_of_the_caller(note):
    threads = []

    def receive(**about):
        threads.append(threading.get_ident())

    job_completed.connect(receive)
    try:
        note.enqueue(1)
    finally:
        job_completed.disconnect(receive)

    assert threads == [threading.get_ident()]


def test_immediate_jobs_leave_no_workers_or_threads(note, djqueue_immediate):
    before = threading.active_count()

    for n in range(5):
        note.enqueue(n)

    assert djqueue_immediate.workers.all() == []
    eventually(lambda: threading.active_count() <= before, message="the threads have ended")


@pytest.mark.django_db
def test_job_sees_uncommitted_rows_of_the_test():
    user = User.objects.create(username="joe")

    @job(name="rename")
    def rename(pk):
        User.objects.filter(pk=pk).update(username="jim")

    rename.enqueue(user.pk)

    user.refresh_from_db()
    assert user.username == "jim"
    assert connection.in_atomic_block


@pytest.mark.django_db
def test_async_job_sees_uncommitted_rows_of_the_test():
    user = User.objects.create(username="joe")

    @job(name="aname")
    async def name(pk):
        return (await User.objects.aget(pk=pk)).username

    assert name.enqueue_and_wait(user.pk) == "joe"


@pytest.mark.django_db
def test_immediate_job_makes_no_extra_queries(django_assert_num_queries):
    @job(name="count")
    def count():
        return User.objects.count()

    with django_assert_num_queries(1):
        assert count.enqueue_and_wait() == 0


def test_retried_dead_letter_that_fails_again_is_recorded(fail, djqueue_immediate, note, ran):
    djqueue_immediate.raise_failures = False
    answer = fail.enqueue()
    djqueue_immediate.raise_failures = True

    assert djqueue_immediate.jobs.retry("default", [answer.id]) == ["retried"]
    note.enqueue(1)

    assert ran == ["fail"] * 4 + [1]
    assert answer.job().state == "failed"


def test_endlessly_nested_job_raises_recursion_error(ran):
    @job(name="endless", max_attempts=1)
    def endless(number):
        ran.append(number)
        endless.enqueue(number + 1)

    with pytest.raises(RecursionError, match="cannot enqueue 'endless' in the immediate mode"):
        endless.enqueue(1)
    assert ran == list(range(1, MAX_NESTING + 1))
    assert Queue("default").counts()["waiting"] == 0


async def test_endlessly_nested_async_job_raises_recursion_error(ran):
    @job(name="aendless", max_attempts=1)
    async def aendless(number):
        ran.append(number)
        await aendless.aenqueue(number + 1)

    with pytest.raises(RecursionError, match="cannot enqueue 'aendless' in the immediate mode"):
        await aendless.aenqueue(1)
    assert ran == list(range(1, MAX_NESTING + 1))


def test_job_timeout_raises_job_timeout_error():
    @job(name="slow", max_attempts=1, timeout=0.01)
    async def slow():
        await asyncio.Event().wait()

    with pytest.raises(JobTimeoutError, match=r"ran longer than its timeout of 0\.01 s"):
        slow.enqueue()
