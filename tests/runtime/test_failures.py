"""Handlers that fail in every way that Python has; the worker continues."""

import asyncio
import logging
import sys

import pytest

from djqueue import Discard, Retry, Snooze, UnrecoverableError, job
from tests.runtime.running import HANDLER, messages, reached, record, work_off, working

BOTH = pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])


def as_handler(function, is_async: bool):
    """The same function as a plain one, or as a coroutine function."""

    async def asynchronous(job):
        return function(job)

    return asynchronous if is_async else function


@BOTH
async def test_failed_job_is_retried_up_to_max_attempts(storage, queue, is_async):
    seen = []

    def handler(job):
        seen.append((job.attempts, job.failures))
        raise ValueError(f"attempt {job.attempts}")

    job_id = queue.enqueue(name=HANDLER, max_attempts=3, backoff=0).id
    worker = await work_off(storage, as_handler(handler, is_async))

    failed = record(queue, job_id)
    assert seen == [(1, 0), (2, 1), (3, 2)]
    assert (failed.state, failed.reason) == ("failed", "max_attempts_exceeded")
    assert [entry.outcome for entry in failed.history] == ["retried", "retried", "failed"]
    assert [entry.error.message for entry in failed.history] == [f"attempt {n}" for n in (1, 2, 3)]
    assert (worker.counters.retried, worker.counters.failed) == (2, 1)


@BOTH
async def test_job_that_succeeds_after_failures_is_completed(storage, queue, is_async):
    def handler(job):
        if job.attempts < 3:
            raise ConnectionError
        return job.attempts

    job_id = queue.enqueue(name=HANDLER, max_attempts=3, backoff=0).id
    await work_off(storage, as_handler(handler, is_async))

    assert queue.get_result(job_id) == 3
    assert len(queue.dead_letters()) == 0


async def raise_exit(job):
    sys.exit(3)


async def raise_interrupt(job):
    raise KeyboardInterrupt


async def cancel_itself(job):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def await_something_cancelled(job):
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def raise_odd(job):
    raise BaseException("odd")


async def raise_stop(job):
    raise StopAsyncIteration("stop")


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (raise_exit, "builtins.SystemExit"),
        (raise_interrupt, "builtins.KeyboardInterrupt"),
        (raise_odd, "builtins.BaseException"),
        (raise_stop, "builtins.StopAsyncIteration"),
        (cancel_itself, "asyncio.exceptions.CancelledError"),
        (await_something_cancelled, "asyncio.exceptions.CancelledError"),
    ],
)
async def test_no_exception_of_an_async_handler_ends_the_worker(storage, queue, handler, kind):
    bad = queue.enqueue(name="bad", max_attempts=1).id
    good = queue.enqueue(name="good", priority=-1).id

    await work_off(storage, {"bad": handler, "good": lambda job: "fine"}, concurrency=1)

    assert record(queue, bad).error.type == kind
    assert queue.get_result(good) == "fine"


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), StopIteration(), MemoryError()])
async def test_no_exception_of_a_sync_handler_ends_the_worker(storage, queue, error):
    def handler(job):
        raise error

    bad = queue.enqueue(name="bad", max_attempts=1).id
    good = queue.enqueue(name="good", priority=-1).id

    await work_off(storage, {"bad": handler, "good": lambda job: "fine"}, concurrency=1)

    assert record(queue, bad).error.type == f"builtins.{type(error).__name__}"
    assert queue.get_result(good) == "fine"


class Hostile(Exception):
    def __str__(self) -> str:
        sys.exit("no message either")


@BOTH
async def test_exception_that_cannot_be_formatted_fails_its_job(storage, queue, is_async):
    def handler(job):
        raise Hostile

    job_id = queue.enqueue(name=HANDLER, max_attempts=1).id
    await work_off(storage, as_handler(handler, is_async))

    failed = record(queue, job_id)
    assert (failed.state, failed.error.type) == ("failed", f"{__name__}.Hostile")
    assert "SystemExit" in failed.error.message


@BOTH
async def test_error_in_a_codec_fails_the_attempt(storage, queue, is_async, monkeypatch):
    def encoder(*_):
        def encode(value):
            raise ZeroDivisionError("inside the codec")

        return encode

    monkeypatch.setattr("djqueue.runtime.executors.execution.get_encoder", encoder)
    job_id = queue.enqueue(name=HANDLER, max_attempts=1).id
    await work_off(storage, as_handler(lambda job: 1, is_async))

    assert record(queue, job_id).error.message == "inside the codec"


@BOTH
async def test_unrecoverable_error_creates_a_dead_letter_without_retry(storage, queue, is_async):
    def handler(job):
        raise UnrecoverableError("no such flight")

    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, as_handler(handler, is_async))

    assert [letter.reason for letter in queue.dead_letters()] == ["explicit_fail"]
    assert record(queue, job_id).error.message == "no such flight"


@BOTH
async def test_snooze_uses_no_attempt(storage, queue, is_async):
    runs = []

    def handler(job):
        runs.append((job.attempts, job.failures))
        if len(runs) < 4:
            raise Snooze(delay=0)
        return "awake"

    job_id = queue.enqueue(name=HANDLER, max_attempts=1).id
    worker = await work_off(storage, as_handler(handler, is_async))

    assert runs == [(1, 0)] * 4
    assert queue.get_result(job_id) == "awake"
    assert worker.counters.released == 3


@BOTH
async def test_discard_cancels_the_job_without_a_dead_letter(storage, queue, is_async):
    def handler(job):
        raise Discard("not needed any more")

    job_id = queue.enqueue(name=HANDLER).id
    worker = await work_off(storage, as_handler(handler, is_async))

    assert record(queue, job_id).state == "cancelled"
    assert queue.dead_letters() == []
    assert worker.counters.cancelled == 1


@BOTH
async def test_retry_exception_sets_the_delay(storage, queue, is_async):
    def handler(job):
        raise Retry("busy", delay=600)

    job_id = queue.enqueue(name=HANDLER, max_attempts=2).id
    async with working(storage, as_handler(handler, is_async)):
        delayed = await reached(queue, job_id, "delayed")

    assert delayed.failures == 1
    assert 590_000 < delayed.run_at - delayed.history[0].finished_at <= 600_000


@job(name="tests.runtime.own_backoff", backoff=lambda failures, error: failures * 300)
def own_backoff():
    raise ValueError


@job(name="tests.runtime.broken_backoff", backoff=lambda failures, error: 1 / 0)
def broken_backoff():
    raise ValueError


@job(name="tests.runtime.exiting_backoff", backoff=lambda failures, error: sys.exit(1))
def exiting_backoff():
    raise ValueError


@pytest.mark.parametrize("failing", [own_backoff, broken_backoff, exiting_backoff])
async def test_job_type_with_backoff_function_uses_it(storage, queue, caplog, failing):
    job_id = queue.enqueue({"args": [], "kwargs": {}}, name=failing.name, max_attempts=3).id
    async with working(storage, {failing.name: failing}):
        delayed = await reached(queue, job_id, "delayed")

    wait = delayed.run_at - delayed.history[0].finished_at
    if failing is own_backoff:
        assert wait == pytest.approx(300_000, abs=1_000)
    else:
        assert wait < 5_000
        assert any("its backoff function failed" in line for line in messages(caplog))


async def test_delay_that_is_not_valid_is_blamed_once(storage, queue, caplog):
    attempts = []

    def handler(job):
        attempts.append(job)
        if len(attempts) < 3:
            raise Retry(delay=float("nan"))

    job_id = queue.enqueue(name=HANDLER, max_attempts=3, backoff=0).id
    async with working(storage, handler):
        await reached(queue, job_id, "completed")

    [line] = [line for line in messages(caplog) if "delay" in line]
    assert line.startswith(f"Job type {HANDLER}: the delay of its Retry or Snooze is not valid; the backoff ")


@pytest.mark.parametrize("given", [7, "exponential"])
async def test_backoff_of_a_job_overrides_backoff_function_of_its_type(storage, queue, given):
    job_id = queue.enqueue({"args": [], "kwargs": {}}, name=own_backoff.name, backoff=given).id
    async with working(storage, {own_backoff.name: own_backoff}):
        delayed = await reached(queue, job_id, "delayed")

    wait = delayed.run_at - delayed.history[0].finished_at
    assert wait == pytest.approx(7_000 if given == 7 else 1_000, rel=0.2)


def test_using_sets_the_backoff_of_a_job():
    assert not own_backoff.options.job.backoff_given
    assert own_backoff.using(backoff=7).options.job.backoff_given


async def test_failure_log_names_the_job_without_its_payload(storage, queue, caplog):
    def handler(job):
        raise ValueError("no such order")

    caplog.set_level(logging.DEBUG, "djqueue")
    job_id = queue.enqueue("very secret", name=HANDLER, max_attempts=2, backoff=0).id
    await work_off(storage, handler)

    told = [entry for entry in caplog.records if getattr(entry, "job_id", None) == job_id]
    assert [entry.levelname for entry in told] == ["DEBUG", "WARNING", "DEBUG", "ERROR"]
    assert {entry.queue for entry in told} == {"work"}
    assert [entry.attempt for entry in told] == [1, 1, 2, 2]
    assert told[-1].exc_info[0] is ValueError
    assert told[-1].exc_info[2].tb_frame.f_code.co_name == "handler"
    assert "no such order" in told[-1].getMessage()
    assert "secret" not in caplog.text


async def test_completed_jobs_are_logged_at_debug_level_only(storage, queue, caplog):
    caplog.set_level(logging.INFO, "djqueue")
    queue.enqueue(name=HANDLER)
    await work_off(storage, lambda job: None)
    assert not any(hasattr(entry, "job_id") for entry in caplog.records)

    caplog.set_level(logging.DEBUG, "djqueue")
    queue.enqueue(name=HANDLER)
    await work_off(storage, lambda job: None)
    assert [entry.getMessage().split("] ")[1].split(" in")[0] for entry in caplog.records
            if hasattr(entry, "job_id")] == ["started", "completed"]  # fmt: skip
