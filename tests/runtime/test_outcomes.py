"""The outcome of a job whose handler raised: every case of the rule."""

import asyncio
from datetime import timedelta
from random import Random

import pytest

from djqueue import Backoff, Discard, Retry, Snooze, UnrecoverableError
from djqueue.core.job import Claimed
from djqueue.core.options import JobOptions
from djqueue.runtime.handlers import Handler, Style
from djqueue.runtime.outcomes import after_error, next_delay
from djqueue.runtime.runs import Stop


def claimed(failures: int = 0, **options) -> Claimed:
    options.setdefault("max_attempts", 3)
    job_options = JobOptions(**options)
    return Claimed("7", "work", "handler", b"", job_options, 99, failures + 1, failures, 0, 0, 1000)


def judge(error: BaseException, stop: Stop = Stop.NO, failures: int = 0, **options):
    return after_error(claimed(failures, **options), error, stop, lambda _: 1234)


def test_error_with_attempts_left_is_retried_after_the_backoff():
    outcome = judge(ValueError("no such order"), failures=1)

    assert (outcome.kind, outcome.delay, outcome.reason) == ("retry", 1234, "")
    assert (outcome.queue, outcome.id, outcome.token) == ("work", "7", 99)
    assert outcome.error.type == "builtins.ValueError"
    assert outcome.error.message == "no such order"


def test_error_in_the_last_attempt_fails_the_job():
    outcome = judge(ValueError(), failures=2)

    assert (outcome.kind, outcome.reason) == ("fail", "max_attempts_exceeded")


def test_job_with_one_attempt_fails_at_its_first_error():
    assert judge(ValueError(), max_attempts=1).kind == "fail"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), BaseException("odd")])
def test_base_exceptions_fail_the_attempt(error):
    outcome = judge(error)

    assert outcome.kind == "retry"
    assert outcome.error.type == f"builtins.{type(error).__name__}"


def test_unrecoverable_error_fails_the_job_with_attempts_left():
    outcome = judge(UnrecoverableError("no such file"))

    assert (outcome.kind, outcome.reason) == ("fail", "explicit_fail")
    assert outcome.error.message == "no such file"


def test_retry_exception_counts_as_a_failure():
    assert judge(Retry(delay=5)).kind == "retry"
    last = judge(Retry(delay=5), failures=2)
    assert (last.kind, last.reason) == ("fail", "max_attempts_exceeded")


def test_snooze_uses_no_attempt_even_in_the_last_one():
    outcome = judge(Snooze(delay=5), failures=2)

    assert (outcome.kind, outcome.delay, outcome.error) == ("release", 1234, None)


def test_discard_exception_cancels_the_job():
    outcome = judge(Discard())

    assert (outcome.kind, outcome.reason, outcome.error) == ("cancel", "discarded", None)


@pytest.mark.parametrize("error", [ValueError(), asyncio.CancelledError(), Retry(), Snooze()])
def test_cancelled_job_is_cancelled_with_any_exception(error):
    outcome = judge(error, Stop.REQUESTED)

    assert (outcome.kind, outcome.reason) == ("cancel", "cancelled")


@pytest.mark.parametrize("error", [asyncio.CancelledError(), RuntimeError("told to stop")])
def test_job_interrupted_by_a_stopping_worker_is_released(error):
    outcome = judge(error, Stop.SHUTDOWN, failures=2)

    assert (outcome.kind, outcome.delay) == ("release", 0)


def test_unrecoverable_error_fails_the_job_while_the_worker_stops():
    assert judge(UnrecoverableError(), Stop.SHUTDOWN).kind == "fail"


def test_unrequested_cancelled_error_fails_the_attempt():
    assert judge(asyncio.CancelledError()).kind == "retry"


def test_timeout_fails_the_attempt():
    outcome = judge(asyncio.CancelledError(), Stop.TIMEOUT, timeout=1500)

    assert outcome.kind == "retry"
    assert outcome.error.type == "djqueue.core.errors.JobTimeoutError"
    assert outcome.error.message == "ran longer than its timeout of 1.5 s"


def test_timeout_in_the_last_attempt_has_reason_timeout():
    outcome = judge(asyncio.CancelledError(), Stop.TIMEOUT, failures=2, timeout=1)

    assert (outcome.kind, outcome.reason) == ("fail", "timeout")


def test_exception_after_a_timeout_is_kept_in_the_traceback():
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
    delay = next_delay(
        claimed(failures, backoff=LINEAR), handler, error, Random(1), lambda _, one: bad.append(one)
    )
    return delay, bad


def test_retry_delay_is_the_backoff_for_the_number_of_failures():
    assert delay_of(ValueError(), failures=1) == (2000, [])


def test_jitter_uses_the_injected_randomness():
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
def test_retry_exception_overrides_the_backoff(error):
    assert delay_of(error) == (500, [])


def test_retry_exception_with_zero_delay_is_immediate():
    assert delay_of(Retry(delay=0)) == (0, [])


@pytest.mark.parametrize("kind", [Retry, Snooze])
@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ([60], {}, r"\(60\): pass a delay by its name: \w+\(delay=60\)"),
        ([timedelta(minutes=1)], {}, r"\(delay=datetime.timedelta\(seconds=60\)\)"),
        ([], {"delay": "1m"}, "delay: expected seconds or a timedelta, got '1m'"),
        ([], {"countdown": 60}, "has no 'countdown'; pass delay="),
    ],
)
def test_delay_that_would_be_ignored_is_refused(kind, args, kwargs, text):
    with pytest.raises(TypeError, match=kind.__name__ + ".*" + text):
        kind(*args, **kwargs)


@pytest.mark.parametrize("error", [Retry(), Snooze()])
def test_retry_exception_without_delay_uses_the_backoff(error):
    assert delay_of(error) == (1000, [])


def test_backoff_function_receives_failures_and_error():
    seen = []

    def backoff(failures, error):
        seen.append((failures, error))
        return 3

    error = ValueError("x")

    assert delay_of(error, backoff, failures=1) == (3000, [])
    assert seen == [(2, error)]


@pytest.mark.parametrize("answer", [-1, float("nan"), "soon", None])
def test_invalid_result_of_backoff_function_is_logged_and_replaced(answer):
    delay, bad = delay_of(ValueError(), lambda failures, error: answer)

    assert delay == 1000
    assert len(bad) == 1


def test_backoff_function_that_raises_is_logged_and_replaced():
    delay, bad = delay_of(ValueError(), lambda failures, error: 1 / 0)

    assert delay == 1000
    assert isinstance(bad[0], ZeroDivisionError)


def test_invalid_retry_delay_is_logged_and_replaced():
    delay, bad = delay_of(Retry(delay=-5))

    assert delay == 1000
    assert "negative" in str(bad[0])
