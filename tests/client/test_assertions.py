"""`djqueue.testing.assertions`: what a test says about enqueued jobs."""

import unittest

import pytest

from djqueue import Queue, job
from djqueue.testing.assertions import JobAssertions, assert_enqueued, assert_not_enqueued
from djqueue.testing.factories import cancelling, claim_one, finish


@pytest.fixture
def send():
    @job(name="send", queue="emails")
    def send(order_id, *, copy=False):
        return order_id

    return send


def test_an_enqueued_job_is_found_and_returned(send):
    answer = send.enqueue(42, copy=True)

    [info] = assert_enqueued(send)

    assert info.id == answer.id
    assert_enqueued(send, args=(42,), kwargs={"copy": True}, queue="emails", count=1)
    assert_enqueued("send", args=[42])


@pytest.mark.parametrize(
    "expected",
    [
        {"args": (43,)},
        {"args": ()},
        {"kwargs": {"copy": False}},
        {"kwargs": {}},
        {"queue": "orders"},
        {"count": 2},
        {"count": 0},
        {"args": (42,), "kwargs": {}},
    ],
)
def test_what_does_not_fit_fails(send, expected):
    send.enqueue(42, copy=True)

    with pytest.raises(
        AssertionError, match=r"jobs matching send.*enqueued jobs: send\(42, copy=True\) in 'emails'"
    ):
        assert_enqueued(send, **expected)


def test_the_failure_tells_what_is_there_instead(send):
    with pytest.raises(
        AssertionError, match=r"send\(1, …\): expected at least one, found 0; no jobs are enqueued"
    ):
        assert_enqueued(send, args=[1])
    send.enqueue_many([((n,), {}) for n in range(12)])
    with pytest.raises(AssertionError, match=r"jobs matching send: expected 3, found 12; .*and 2 more"):
        assert_enqueued(send, count=3)


def test_jobs_of_a_queue_without_functions_are_found_by_name():
    Queue("orders").enqueue({"n": 1}, name="pay")

    [info] = assert_enqueued("pay", queue="orders")

    assert info.payload == {"n": 1}
    assert_not_enqueued("pay", args=[1])


def test_delayed_and_blocked_jobs_are_enqueued(send):
    first = send.using(delay=60).enqueue(1)
    send.using(depends_on=[first]).enqueue(2)

    assert_enqueued(send, count=2)


def test_started_and_ended_jobs_are_not_enqueued(send, storage):
    send.enqueue(1)
    claimed = claim_one(storage, names=["send"])
    assert_not_enqueued(send)
    finish(storage, cancelling(claimed))
    assert_not_enqueued(send)


def test_what_is_not_enqueued_is_said_so(send):
    assert_not_enqueued(send)
    send.enqueue(1)

    assert_not_enqueued(send, args=(2,))
    assert_not_enqueued(send, queue="orders")
    assert_not_enqueued("other")
    with pytest.raises(AssertionError, match="jobs matching send: expected 0, found 1"):
        assert_not_enqueued(send)


def test_all_of_very_many_jobs_are_looked_at(send):
    send.enqueue_many([((n,), {}) for n in range(2_500)])

    assert_enqueued(send, args=(2_499,), count=1)
    assert_enqueued(send, count=2_500)


def test_a_test_case_of_unittest_has_the_same(send):
    class Case(JobAssertions, unittest.TestCase):
        def test_it(self):
            self.assertNotEnqueued(send)
            answer = send.enqueue(1)
            assert self.assertEnqueued(send, args=(1,))[0].id == answer.id
            with self.assertRaises(AssertionError):  # noqa: PT027 - unittest's own way
                self.assertNotEnqueued(send)

    result = unittest.TestResult()
    Case("test_it").run(result)

    assert (result.testsRun, result.failures, result.errors) == (1, [], [])
