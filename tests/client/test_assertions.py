"""`djqueue.testing.assertions`: assertions about enqueued jobs."""

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


def test_assert_enqueued_returns_the_matching_job(send):
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
def test_assert_enqueued_fails_without_a_match(send, expected):
    send.enqueue(42, copy=True)

    with pytest.raises(
        AssertionError, match=r"jobs matching send.*enqueued jobs: send\(42, copy=True\) in 'emails'"
    ):
        assert_enqueued(send, **expected)


def test_assert_enqueued_failure_lists_enqueued_jobs(send):
    with pytest.raises(
        AssertionError, match=r"send\(1, …\): expected at least one, found 0; no jobs are enqueued"
    ):
        assert_enqueued(send, args=[1])
    send.enqueue_many([((n,), {}) for n in range(12)])
    with pytest.raises(AssertionError, match=r"jobs matching send: expected 3, found 12; .*and 2 more"):
        assert_enqueued(send, count=3)


def test_assert_enqueued_finds_payload_jobs_by_name():
    Queue("orders").enqueue({"n": 1}, name="pay")

    [info] = assert_enqueued("pay", queue="orders")

    assert info.payload == {"n": 1}
    assert_not_enqueued("pay", args=[1])


def test_assert_enqueued_counts_delayed_and_blocked_jobs(send):
    first = send.using(delay=60).enqueue(1)
    send.using(depends_on=[first]).enqueue(2)

    assert_enqueued(send, count=2)


def test_assert_not_enqueued_ignores_started_and_finished_jobs(send, storage):
    send.enqueue(1)
    claimed = claim_one(storage, names=["send"])
    assert_not_enqueued(send)
    finish(storage, cancelling(claimed))
    assert_not_enqueued(send)


def test_assert_not_enqueued_fails_with_a_match(send):
    assert_not_enqueued(send)
    send.enqueue(1)

    assert_not_enqueued(send, args=(2,))
    assert_not_enqueued(send, queue="orders")
    assert_not_enqueued("other")
    with pytest.raises(AssertionError, match="jobs matching send: expected 0, found 1"):
        assert_not_enqueued(send)


def test_assert_enqueued_checks_thousands_of_jobs(send):
    send.enqueue_many([((n,), {}) for n in range(2_500)])

    assert_enqueued(send, args=(2_499,), count=1)
    assert_enqueued(send, count=2_500)


def test_unittest_mixin_has_the_same_assertions(send):
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
