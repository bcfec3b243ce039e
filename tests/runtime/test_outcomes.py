"""What becomes of a job whose handler raised: every case of the rule."""

import asyncio
from datetime import timedelta
from random import Random

import pytest

from djqueue import Backoff, Discard, Retry, Snooze, UnrecoverableError
from djqueue.core.job import Claimed
from djqueue.core.options import JobOptions
from djqueue.runtime.handlers import Handler, Style
from djqueue.runtime.outcomes import after_error, next_delay
from djqueue.runtime.stopping import Stop


def claimed(failures: int = 0, **options) -> Claimed:
    options.setdefault("max_attempts", 3)
    job_options = JobOptions(**options)
    return Claimed("7", "work", "handler", b"", job_options, 99, failures + 1, failures, 0, 0, 1000)


def judge(error: BaseException, stop: Stop = Stop.NO, failures: int = 0, **options):
    return after_error(claimed(failures, **options), error, stop, lambda _: 1234)


def test_an_error_with_attempts_left_is_a_retry_after_the_backoff():
    outcome = judge(ValueError("no such order"), failures=1)

    assert (outcome.kind, outcome.delay, outcome.reason) == ("retry", 1234, "")
    assert (outcome.queue, outcome.id, outcome.token) == ("work", "7", 99)
    assert outcome.error.type == "builtins.ValueError"
    assert outcome.error.message == "no such order"


def test_the_last_allowed_failure_is_final():
    outcome = judge(ValueError(), failures=2)

    assert (outcome.kind, outcome.reason) == ("fail", "max_attempts_exceeded")


def test_a_job_with_one_attempt_fails_at_once():
    assert judge(ValueError(), max_attempts=1).kind == "fail"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), BaseException("odd")])
def test_even_what_would_end_a_process_is_a_failure_of_the_job(error):
    outcome = judge(error)

    assert outcome.kind == "retry"
    assert outcome.error.type == f"builtins.{type(error).__name__}"


def test_unrecoverable_fails_at_once_whatever_attempts_are_left():
    outcome = judge(UnrecoverableError("no such file"))

    assert (outcome.kind, outcome.reason) == ("fail", "explicit_fail")
    assert outcome.error.message == "no such file"


def test_retry_counts_as_a_failure_and_ends_like_one():
    assert judge(Retry(delay=5)).kind == "retry"
    last = judge(Retry(delay=5), failures=2)
    assert (last.kind, last.reason) == ("fail", "max_attempts_exceeded")


def test_snooze_gives_the_run_back_unused_even_on_the_last_attempt():
    outcome = judge(Snooze(delay=5), failures=2)

    assert (outcome.kind, outcome.delay, outcome.error) == ("release", 1234, None)


def test_discard_cancels():
    outcome = judge(Discard())

    assert (outcome.kind, outcome.reason, outcome.error) == ("cancel", "discarded", None)


@pytest.mark.parametrize("error", [ValueError(), asyncio.CancelledError(), Retry(), Snooze()])
def test_whatever_a_cancelled_job_raises_it_is_cancelled(error):
    outcome = judge(error, Stop.REQUESTED)

    assert (outcome.kind, outcome.reason) == ("cancel", "cancelled")


@pytest.mark.parametrize("error", [asyncio.CancelledError(), RuntimeError("told to stop")])
def test_what_a_stopping_worker_cuts_off_is_given_back(error):
    outcome = judge(error, Stop.SHUTDOWN, failures=2)

    assert (outcome.kind, outcome.delay) == ("release", 0)


def test_an_unrecoverable_error_is_one_even_while_the_worker_stops():
    assert judge(UnrecoverableError(), Stop.SHUTDOWN).kind == "fail"


def test_a_cancelled_error_that_nobody_asked_for_is_a_failure():
    assert judge(asyncio.CancelledError()).kind == "retry"


def test_a_timeout_is_a_failed_attempt():
    outcome = judge(asyncio.CancelledError(), Stop.TIMEOUT, timeout=1500)

    assert outcome.kind == "retry"
    assert outcome.error.type == "djqueue.core.errors.JobTimeoutError"
    assert outcome.error.message == "ran longer than its timeout of 1.5 s"


def test_the_last_timeout_has_a_reason_of_its_own():
    outcome = judge(asyncio.CancelledError(), Stop.TIMEOUT, failures=2, timeout=1)

    assert (outcome.kind, outcome.reason) == ("fail", "timeout")


def test_what_a_handler_raised_after_its_timeout_is_kept_in_the_traceback():
    try:
        raise RuntimeError("noticed, and gave up")
    except RuntimeError as error:
        outcome = judge(error, Stop.TIMEOUT, timeout=1)

    assert outcome.error.type.endswith("JobTimeoutError")
    assert "noticed, and gave up" in outcome.error.traceback


# The delay.


LINEAR = Backoff(kind="linear", base=1000, jitter=0)


def delay_of(error: BaseException, function=None, failures: int = 0):
    bad: list[BaseException] = []
    handler = Handler("handler", print, Style.JOB, function)
    delay = next_delay(claimed(failures, backoff=LINEAR), handler, error, Random(1), bad.append)
    return delay, bad


def test_the_delay_is_the_backoff_of_the_failures_so_far():
    assert delay_of(ValueError(), failures=1) == (2000, [])


def test_jitter_comes_from_the_injected_randomness():
    job = claimed(backoff=Backoff(kind="fixed", base=1000, jitter=0.5))
    handler = Handler("handler", print, Style.JOB)

    delays = [
        [next_delay(job, handler, ValueError(), random, print) for _ in range(5)]
        for random in (Random(7), Random(7))
    ]

    assert delays[0] == delays[1]
    assert len(set(delays[0])) == 5
    assert all(500 <= delay <= 1500 for delay in delays[0])


@pytest.mark.parametrize("error", [Retry(delay=0.5), Snooze(delay=timedelta(milliseconds=500))])
def test_a_handler_may_say_when(error):
    assert delay_of(error) == (500, [])


def test_a_handler_that_wants_another_run_at_once_gets_it():
    assert delay_of(Retry(delay=0)) == (0, [])


@pytest.mark.parametrize("error", [Retry(), Snooze()])
def test_without_a_word_about_when_it_is_the_backoff(error):
    assert delay_of(error) == (1000, [])


def test_a_backoff_function_is_given_the_failures_and_the_error():
    seen = []

    def backoff(failures, error):
        seen.append((failures, error))
        return 3

    error = ValueError("x")

    assert delay_of(error, backoff, failures=1) == (3000, [])
    assert seen == [(2, error)]


@pytest.mark.parametrize("answer", [-1, float("nan"), "soon", None])
def test_a_backoff_function_that_answers_nonsense_is_told_of_and_replaced(answer):
    delay, bad = delay_of(ValueError(), lambda failures, error: answer)

    assert delay == 1000
    assert len(bad) == 1


def test_a_backoff_function_that_raises_is_told_of_and_replaced():
    delay, bad = delay_of(ValueError(), lambda failures, error: 1 / 0)

    assert delay == 1000
    assert isinstance(bad[0], ZeroDivisionError)


def test_a_wish_that_is_no_duration_is_told_of_and_replaced():
    delay, bad = delay_of(Retry(delay=-5))

    assert delay == 1000
    assert "negative" in str(bad[0])
