"""Deadlines that calls carry, and the circuit breaker."""

from contextvars import copy_context
from threading import Thread

import pytest

from djqueue.core.deadlines import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    LONGEST_PROBE,
    CircuitBreaker,
    GrowingPause,
    remaining,
    within,
)
from djqueue.testing.clock import FakeClock


def test_time_limit_applies_without_a_deadline():
    assert remaining(3.0) == 3.0


def test_deadline_shortens_a_time_limit():
    with within(1.0):
        assert 0.5 < remaining(3.0) <= 1.0
        assert remaining(0.2) == 0.2
    assert remaining(3.0) == 3.0


def test_shorter_of_two_deadlines_applies():
    with within(1.0), within(5.0):
        assert remaining(3.0) <= 1.0
    with within(5.0), within(0):
        assert remaining(3.0) == 0


def test_thread_with_a_copied_context_has_the_deadline():
    found = []
    with within(1.0):
        context = copy_context()
    thread = Thread(target=lambda: context.run(lambda: found.append(remaining(3.0))))
    thread.start()
    thread.join()
    assert found[0] <= 1.0


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def breaker(clock):
    return CircuitBreaker(clock, jitter=lambda: 1.0)


def test_closed_breaker_lets_every_call_through(breaker):
    assert breaker.enter()
    assert breaker.enter()
    assert breaker.outage is None


def test_breaker_blocks_calls_after_a_missed_deadline_until_the_pause_ends(breaker, clock):
    breaker.failed("no answer within 2 s")
    assert not breaker.enter()
    clock.advance(FIRST_PAUSE)
    assert breaker.enter()


def test_only_one_caller_probes_a_failed_server(breaker, clock):
    breaker.failed("no answer within 2 s")
    clock.advance(FIRST_PAUSE)
    assert [breaker.enter() for _ in range(3)] == [True, False, False]
    breaker.succeeded()
    assert [breaker.enter() for _ in range(3)] == [True, True, True]


def test_pauses_grow_while_probes_fail_and_the_outage_began_with_the_first(breaker, clock):
    began = clock.now()
    breaker.failed("first")
    pause = FIRST_PAUSE
    for _ in range(6):
        clock.advance(pause)
        assert breaker.enter()
        breaker.failed("again")
        pause = min(2 * pause, LONGEST_PAUSE)
        clock.advance(pause - 1)
        assert not breaker.enter()
        clock.advance(1)
        assert breaker.enter()
        breaker.gave_up()
    assert breaker.outage == (began, "first")


def test_failures_of_other_calls_do_not_delay_the_probe(breaker, clock):
    for _ in range(10):
        breaker.failed("no answer within 2 s")
    clock.advance(FIRST_PAUSE)
    assert breaker.enter()


def test_required_calls_probe_before_the_pause_ends(breaker):
    breaker.failed("no answer within 2 s")
    assert breaker.enter(at_once=True)
    assert not breaker.enter(at_once=True)


def test_next_caller_probes_after_an_abandoned_probe(breaker, clock):
    breaker.failed("no answer within 2 s")
    clock.advance(FIRST_PAUSE)
    assert breaker.enter()
    breaker.gave_up()
    assert breaker.enter()


def test_pause_doubles_with_each_failure_up_to_the_longest():
    pause = GrowingPause(0.5, 3.0)

    assert (pause.length, pause.failures) == (0.0, 0)
    assert [pause.failed() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert (pause.length, pause.failures) == (3.0, 5)
    pause.succeeded()
    assert (pause.length, pause.failures) == (0.0, 0)
    assert pause.failed() == 0.5


def test_pause_stays_at_the_longest_however_many_tries_fail():
    pause = GrowingPause(0.5, 3.0)

    assert {pause.failed() for _ in range(5_000)} == {0.5, 1.0, 2.0, 3.0}


def test_probe_that_reports_nothing_keeps_others_from_probing_for_a_limited_time(breaker, clock):
    breaker.failed("no answer within 2 s")
    clock.advance(FIRST_PAUSE)
    assert breaker.enter()
    assert not breaker.enter()
    clock.advance(LONGEST_PROBE)
    assert breaker.enter()
