"""The fixture `djqueue_clock`: delays, retries, schedules and expiry without waiting."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from djqueue import Queue, job
from djqueue.core.units import to_datetime
from djqueue.testing.clock import JobClock


@pytest.fixture
def times():
    return []


@pytest.fixture
def flaky(times, djqueue_clock):
    @job(name="flaky", max_attempts=4, backoff=100)
    def flaky():
        times.append(djqueue_clock.now())
        if len(times) < 4:
            raise KeyError("not yet")

    return flaky


def test_delayed_job_runs_when_it_is_due(djqueue_memory, djqueue_clock, djqueue_drain):
    queue = Queue("orders")
    queue.enqueue(1, delay=3_600)
    handlers = {"orders": lambda given: None}

    djqueue_clock.advance(3_599)
    assert djqueue_drain(handlers=handlers).claimed == 0

    djqueue_clock.advance(1)
    assert djqueue_drain(handlers=handlers).completed == 1


def test_retry_runs_after_its_backoff(djqueue_clock, djqueue_drain, flaky, times):
    flaky.enqueue()
    assert djqueue_drain().retried == 1
    assert djqueue_drain().claimed == 0

    djqueue_clock.advance(timedelta(hours=1))

    assert djqueue_drain().retried == 1
    assert len(times) == 2


def test_immediate_mode_runs_jobs_when_the_clock_reaches_their_time(
    djqueue_immediate, djqueue_clock, flaky, times
):
    flaky.enqueue()
    assert len(times) == 1

    djqueue_clock.advance(timedelta(hours=1))

    assert len(times) == 4
    assert all(80_000 <= later - earlier <= 120_000 for earlier, later in pairwise(times))


def test_immediate_mode_with_clock_keeps_delays(djqueue_immediate, djqueue_clock, times):
    @job(name="later")
    def later():
        times.append(djqueue_clock.now())

    later.using(run_at=djqueue_clock.time + timedelta(days=2)).enqueue()
    assert times == []

    began = djqueue_clock.now()
    djqueue_clock.advance(timedelta(days=30))

    assert times == [began + 2 * 86_400_000]
    assert djqueue_clock.now() == began + 30 * 86_400_000


def test_job_without_handler_does_not_stop_the_clock(djqueue_immediate, djqueue_clock):
    Queue("nobody").enqueue(1, delay=10)

    djqueue_clock.advance(3_600)

    assert Queue("nobody").counts()["waiting"] == 1


def test_results_expire_when_the_clock_advances(djqueue_immediate, djqueue_clock):
    @job(name="short", result_ttl=60)
    def short():
        return 1

    answer = short.enqueue()
    assert answer.job() is not None

    djqueue_clock.advance(61)

    assert Queue("default").get_job(answer.id) is None


@pytest.mark.django_db
def test_schedules_fire_at_each_of_their_times(djqueue_immediate, djqueue_clock, times):
    @job(name="nightly", cron="0 3 * * *")
    def nightly():
        times.append(to_datetime(djqueue_clock.now()))

    djqueue_clock.move_to(datetime(2100, 1, 1, tzinfo=UTC), schedules=False)
    assert times == []

    djqueue_clock.advance(timedelta(days=3), schedules=True)

    assert times == [datetime(2100, 1, day, 3, tzinfo=UTC) for day in (1, 2, 3)]


@pytest.mark.django_db
def test_scheduled_jobs_wait_for_a_drain_without_immediate_mode(djqueue_clock, djqueue_drain, times):
    @job(name="hourly", every=3_600)
    def hourly():
        times.append(1)

    djqueue_clock.move_to(datetime(2100, 1, 1, 0, 30, tzinfo=UTC), schedules=False)
    djqueue_clock.advance(timedelta(hours=2, minutes=1), schedules=True)
    assert times == []

    assert djqueue_drain().completed == 2


def test_clock_starts_now_and_stands_still():
    clock = JobClock()
    now = clock.now()

    assert abs((clock.time - datetime.now(UTC)).total_seconds()) < 60
    clock.advance(1.5)
    assert clock.now() == now + 1_500
    clock.move_to(clock.time + timedelta(seconds=1))
    assert clock.now() == now + 2_500


def test_clock_rejects_the_past():
    clock = JobClock()

    with pytest.raises(ValueError, match="before that of the clock"):
        clock.move_to(clock.time - timedelta(seconds=1))
    with pytest.raises(ValueError, match="needs a datetime with a time zone"):
        clock.move_to(datetime(2100, 1, 1))
    with pytest.raises(ValueError, match="a datetime with a time zone, such as UTC; got 5"):
        clock.move_to(5)
    with pytest.raises(Exception, match="by"):
        clock.advance(-1)


def test_fixture_requested_too_late_raises(djqueue_memory, request):
    with pytest.raises(RuntimeError, match="djqueue_clock must be a parameter"):
        request.getfixturevalue("djqueue_clock")
    with pytest.raises(RuntimeError, match="djqueue_immediate must be a parameter"):
        request.getfixturevalue("djqueue_immediate")


@pytest.mark.django_db
def test_failed_due_job_raises_from_the_clock(djqueue_immediate, djqueue_clock):
    @job(name="broken", max_attempts=1, every=3_600)
    def broken():
        raise KeyError("broken")

    broken.using(delay=60).enqueue()
    with pytest.raises(KeyError, match="broken"):
        djqueue_clock.advance(60)
    with pytest.raises(KeyError, match="broken"):
        djqueue_clock.advance(3_700, schedules=True)

    assert Queue("default").counts()["failed"] == 2
