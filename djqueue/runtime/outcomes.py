"""The outcome of a job whose handler raised: one rule, without side effects."""

import asyncio
from collections.abc import Callable
from random import Random

from djqueue.core.errors import Discard, JobTimeoutError, Retry, Snooze, UnrecoverableError
from djqueue.core.job import Claimed, Outcome
from djqueue.core.logs import frames_of
from djqueue.core.units import milliseconds

from .handlers import Handler
from .runs import Stop
from .tracebacks import clean, job_error

MAX_REASON = 100
"""Maximum of characters of a reason that a handler gives."""
OnBadBackoff = Callable[[str, BaseException], None]


def after_error(
    claimed: Claimed, error: BaseException, stop: Stop, delay: Callable[[BaseException], int]
) -> Outcome:
    """Return the outcome of a run whose handler raised.

    stop: Why the handler was asked to stop, if it was.
    delay: Returns the milliseconds until the next attempt, if there is one.
    """
    if stop is Stop.REQUESTED:
        return _outcome(claimed, "cancel", reason="cancelled")
    kind = type(error)  # Not `isinstance`, which may run code of the exception.
    if issubclass(kind, Discard):
        return _outcome(claimed, "cancel", reason="discarded")
    if issubclass(kind, Snooze):
        return _outcome(claimed, "release", delay=delay(error))
    if issubclass(kind, UnrecoverableError):
        return refusal(claimed, error, _reason(error))
    if issubclass(kind, Retry):
        return failure(claimed, error, "max_attempts_exceeded", delay)
    if stop is Stop.SHUTDOWN:
        # The handler was interrupted, so the attempt does not count.
        return _outcome(claimed, "release")
    if stop is Stop.TIMEOUT:
        return failure(claimed, timed_out(claimed, error), "timeout", delay)
    return failure(claimed, error, "max_attempts_exceeded", delay)


def failure(
    claimed: Claimed, error: BaseException, reason: str, delay: Callable[[BaseException], int]
) -> Outcome:
    """Return the outcome of an attempt that failed: another attempt, or after the last one, a dead letter."""
    if claimed.failures + 1 < claimed.options.max_attempts:
        return _outcome(claimed, "retry", error=error, delay=delay(error))
    return _outcome(claimed, "fail", error=error, reason=reason)


def refusal(claimed: Claimed, error: BaseException, reason: str) -> Outcome:
    """Return the outcome of a job that fails permanently, whatever attempts are left."""
    return _outcome(claimed, "fail", error=error, reason=reason)


def release(claimed: Claimed, delay: int = 0) -> Outcome:
    """Return the outcome of a run that returns to its queue, without counting as an attempt."""
    return _outcome(claimed, "release", delay=delay)


def next_delay(
    claimed: Claimed, handler: Handler, error: BaseException, random: Random, on_bad: OnBadBackoff
) -> int:
    """Return the milliseconds until the next attempt.

    The delay that the handler asks for comes first, then the job type's backoff function unless the caller
    gave the job a backoff of its own, and then the backoff in the job's options.

    on_bad: Called with what is not valid and its error; the job's backoff options are used instead.
    """
    failures = claimed.failures + 1
    what = "the delay of its Retry or Snooze is not valid"
    try:
        # `isinstance` would run code of the exception's class.
        asked = error.delay if issubclass(type(error), (Retry, Snooze)) else None  # type: ignore[attr-defined]
        if asked is not None:
            return milliseconds("delay", asked)
        what = "its backoff function failed"
        if handler.backoff is not None and not claimed.options.backoff_given:
            return milliseconds("backoff", handler.backoff(failures, error))
    except BaseException as broken:
        # Even a backoff function that calls sys.exit() must not stop the worker.
        on_bad(what, broken)
    return claimed.options.backoff.delay(failures, random)


def timed_out(claimed: Claimed, error: BaseException) -> JobTimeoutError:
    """Return the error of a run that was stopped by its timeout, and then raised `error`."""
    seconds = (claimed.options.timeout or 0) / 1_000
    timeout = JobTimeoutError(f"ran longer than its timeout of {seconds:g} s", job_id=claimed.id)
    timeout.__cause__ = None if issubclass(type(error), asyncio.CancelledError) else error
    # The traceback shows where the handler was when its timeout was over.
    timeout.__traceback__ = frames_of(error)
    return timeout


def _reason(error: BaseException) -> str:
    """Return the reason that an UnrecoverableError gives; the usual one if it cannot be read."""
    try:
        reason = error.reason  # type: ignore[attr-defined]
    except BaseException:
        reason = None  # It runs code of the exception.
    return clean(reason, MAX_REASON) if type(reason) is str else UnrecoverableError.reason


def _outcome(
    claimed: Claimed,
    kind: str,
    *,
    error: BaseException | None = None,
    delay: int = 0,
    reason: str = "",
) -> Outcome:
    described = None if error is None else job_error(error)
    return Outcome(claimed.queue, claimed.id, claimed.token, kind, None, delay, described, reason)
