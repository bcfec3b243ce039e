"""Which functions can handle jobs, and how they are called."""

import asyncio
import functools
import threading

import pytest

from djqueue import job
from djqueue.client import registry
from djqueue.core.job import Batch
from djqueue.core.options import JobOptions
from djqueue.errors import ConfigurationError, OptionError
from djqueue.runtime.handlers import Style, read_handlers
from tests.runtime.running import HANDLER, reached, record, work_off, working
from tests.support import PATIENCE


@job(name="tests.runtime.add", max_attempts=2)
def add(left, right=10):
    return left + right


@job(name="tests.runtime.aadd")
async def aadd(left, right=10):
    return left + right


@pytest.fixture
def enqueued_elsewhere(monkeypatch):
    """Enqueues for `add` as a process that does not know the function."""

    def enqueue(queue, payload, **options):
        with monkeypatch.context() as patch:
            patch.setattr(registry, "_types", {})
            return queue.enqueue(payload, name=add.name, **options)

    return enqueue


def style_of(function) -> Style:
    return read_handlers({HANDLER: function})[HANDLER].style


def test_worker_without_handlers_serves_all_job_functions():
    handlers = read_handlers(None)

    assert handlers["tests.runtime.add"].function is add.function
    assert not handlers["tests.runtime.add"].is_async
    assert handlers["tests.runtime.aadd"].is_async


def test_handler_takes_job_or_job_and_done_callback():
    assert style_of(lambda job: None) is Style.JOB
    assert style_of(lambda job, extra=1: None) is Style.JOB
    assert style_of(lambda *args: None) is Style.JOB
    assert style_of(lambda job, done: None) is Style.CALLBACK
    assert style_of(len) is Style.JOB


def test_methods_callable_objects_and_partials_can_be_handlers():
    class Handler:
        async def handle(self, job): ...

        async def __call__(self, job): ...

    async def two(prefix, job): ...

    handlers = read_handlers(
        {"method": Handler().handle, "object": Handler(), "partial": functools.partial(two, "x")}
    )

    assert all(handler.style is Style.JOB for handler in handlers.values())
    assert all(handler.is_async for handler in handlers.values())


@pytest.mark.parametrize(
    "function",
    [lambda: None, lambda a, b, c: None, lambda job, *, needed: None, "shop.jobs.send", None],
)
def test_handler_with_wrong_signature_is_rejected_by_name(function):
    with pytest.raises(ConfigurationError, match="'handler'"):
        read_handlers({HANDLER: function})


def test_invalid_handler_names_are_rejected():
    with pytest.raises(OptionError, match="handler"):
        read_handlers({"": print})


def test_handlers_that_are_not_a_mapping_are_rejected():
    with pytest.raises(ConfigurationError, match="mapping"):
        read_handlers([print])


@pytest.mark.parametrize("function", [add, aadd])
async def test_job_function_receives_its_arguments(storage, queue, function):
    result = queue.enqueue({"args": [1], "kwargs": {"right": 2}}, name=function.name)

    await work_off(storage, {function.name: function})

    assert queue.get_result(result.id) == 3


@pytest.mark.parametrize(
    "payload",
    [None, [1, 2], {"args": [1]}, {"args": 1, "kwargs": {}}, {"args": [], "kwargs": [], "x": 1}],
)
async def test_payload_without_arguments_fails_the_job_without_retry(
    storage, queue, enqueued_elsewhere, payload
):
    result = enqueued_elsewhere(queue, payload)

    await work_off(storage, {add.name: add})

    failed = record(queue, result.id)
    assert (failed.state, failed.reason, failed.attempts) == ("failed", "invalid_payload", 1)
    assert '{"args": [...], "kwargs": {...}}' in failed.error.message


async def test_wrong_arguments_fail_the_attempt(storage, queue, enqueued_elsewhere):
    result = enqueued_elsewhere(queue, {"args": [1, 2, 3], "kwargs": {}}, max_attempts=2, backoff=0)

    await work_off(storage, {add.name: add})

    failed = record(queue, result.id)
    assert (failed.reason, failed.failures) == ("max_attempts_exceeded", 2)
    assert failed.error.type == "djqueue.core.errors.ArgumentsError"
    assert failed.error.message == (
        f"the job was enqueued for other parameters than {add.name}(left, right=10) has now: "
        "too many positional arguments"
    )
    assert "Traceback" not in failed.error.traceback


async def test_type_error_of_a_handler_stays_as_it_is(storage, queue, caplog):
    @job(name="length")
    def length(value):
        return len(value)

    result = queue.enqueue({"args": [1], "kwargs": {}}, name="length", max_attempts=1)

    await work_off(storage, {"length": length})

    assert record(queue, result.id).error.summary == "TypeError: object of type 'int' has no len()"
    assert "failed permanently (max_attempts_exceeded): TypeError: object of type" in caplog.text


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, b"", 0.0, (1, 2)])
@pytest.mark.parametrize("is_async", [True, False])
async def test_results_of_all_types_are_returned_unchanged(storage, queue, value, is_async):
    async def asynchronous(job):
        return value

    def synchronous(job):
        return value

    result = queue.enqueue(name=HANDLER)
    await work_off(storage, asynchronous if is_async else synchronous)

    assert record(queue, result.id).state == "completed"
    assert record(queue, result.id).result is not None
    back = queue.get_result(result.id)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("is_async", [True, False])
async def test_result_that_cannot_be_stored_fails_the_job_and_names_the_value(storage, queue, is_async):
    def synchronous(job):
        return {"rows": [1, {2}]}

    async def asynchronous(job):
        return synchronous(job)

    result = queue.enqueue(name=HANDLER)
    await work_off(storage, asynchronous if is_async else synchronous)

    failed = record(queue, result.id)
    assert (failed.state, failed.reason, failed.failures) == ("failed", "invalid_result", 1)
    assert failed.error.type == "djqueue.core.errors.SerializationError"
    assert "result.rows[1]" in failed.error.message


async def test_result_above_the_size_limit_fails_the_job(storage, queue, settings):
    settings.DJQUEUE = {"MAX_PAYLOAD": 100}
    result = queue.enqueue(name=HANDLER)

    await work_off(storage, lambda job: "x" * 101)

    assert "MAX_PAYLOAD" in record(queue, result.id).error.message


async def test_undecodable_payload_fails_the_job_without_calling_the_handler(storage, queue):
    called = []
    batch = Batch("work", HANDLER, JobOptions(), [b"\xc1 nonsense"])
    job_id = storage.enqueue([batch])[0].id

    await work_off(storage, called.append)

    failed = record(queue, job_id)
    assert (failed.state, failed.reason, failed.failures) == ("failed", "invalid_payload", 1)
    assert failed.error.type == "djqueue.core.errors.SerializationError"
    assert called == []


async def test_configured_codecs_are_used_for_payload_and_result(storage, queue):
    result = queue.enqueue({"n": 1}, name=HANDLER, content_type="application/json")

    await work_off(storage, lambda job: [job.payload["n"] + 1])

    assert record(queue, result.id).result == b"[2]"
    assert queue.get_result(result.id) == [2]


async def test_jobs_without_a_handler_stay_waiting(storage, queue):
    mine = queue.enqueue(name=HANDLER)
    other = queue.enqueue(name="somebody.elses")

    worker = await work_off(storage, lambda job: None)

    assert record(queue, mine.id).state == "completed"
    assert record(queue, other.id).state == "waiting"
    assert worker.counters.claimed == 1


async def test_plain_function_may_return_an_awaitable(storage, queue):
    async def inner(job):
        return job.payload * 2

    result = queue.enqueue(21, name=HANDLER)
    await work_off(storage, lambda job: inner(job))

    assert queue.get_result(result.id) == 42


# Callback style.


async def test_done_callback_completes_the_job_with_its_result(storage, queue):
    result = queue.enqueue(20, name=HANDLER)

    def handler(job, done):
        done(result=job.payload + 1)

    await work_off(storage, handler)

    assert queue.get_result(result.id) == 21


async def test_done_callback_can_be_called_later_from_another_thread(storage, queue):
    pending = []
    got_it = threading.Event()

    def handler(job, done):
        pending.append(done)
        got_it.set()

    result = queue.enqueue(name=HANDLER)
    async with working(storage, handler) as worker:
        await reached(queue, result.id, "active")
        assert await asyncio.to_thread(got_it.wait, PATIENCE)
        assert worker.running == 1
        threading.Thread(target=pending[0], kwargs={"result": "late"}).start()
        await reached(queue, result.id, "completed")

    assert queue.get_result(result.id) == "late"


async def test_done_callback_with_an_error_fails_the_attempt(storage, queue):
    with_text = queue.enqueue("text", name=HANDLER, max_attempts=1)
    with_error = queue.enqueue("error", name=HANDLER, max_attempts=1)

    def handler(job, done):
        done("out of paper" if job.payload == "text" else ValueError("jammed"))

    await work_off(storage, handler)

    assert record(queue, with_text.id).error.message == "out of paper"
    assert record(queue, with_error.id).error.type == "builtins.ValueError"


async def test_callback_handler_may_be_async_and_may_raise(storage, queue):
    ends_well = queue.enqueue(1, name=HANDLER, max_attempts=1)
    raises = queue.enqueue(0, name=HANDLER, max_attempts=1)

    async def handler(job, done):
        done(result=1 / job.payload)

    await work_off(storage, handler)

    assert queue.get_result(ends_well.id) == 1.0
    assert record(queue, raises.id).error.type == "builtins.ZeroDivisionError"


async def test_only_the_first_call_of_the_done_callback_counts(storage, queue, caplog):
    def handler(job, done):
        done(result="first")
        done(result="second")

    result = queue.enqueue(name=HANDLER)
    await work_off(storage, handler)

    assert queue.get_result(result.id) == "first"
    assert "more than once" in caplog.text


async def test_missing_done_callback_fails_the_attempt_at_its_timeout(storage, queue):
    result = queue.enqueue(name=HANDLER, timeout=0.05, max_attempts=1)

    await work_off(storage, lambda job, done: None)

    assert record(queue, result.id).reason == "timeout"
