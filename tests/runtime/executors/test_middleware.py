"""Middleware around attempts: sync and async handlers, results, errors, and skipped handlers."""

import asyncio
import threading
from functools import partial

import pytest

from djqueue import Discard, Worker
from djqueue.errors import ConfigurationError
from tests.runtime.running import HANDLER, record, work_off

PATH = "tests.runtime.executors.test_middleware"
BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
seen = []


class Outer:
    def execute(self, job, call_next):
        seen.append(("before", job.id, job.payload, threading.current_thread().name[:11]))
        try:
            result = call_next(job)
        except BaseException as error:
            seen.append(("raised", type(error).__name__))
            raise
        seen.append(("after", result))
        return result

    async def aexecute(self, job, call_next):
        seen.append(("before", job.id, job.payload, "loop"))
        try:
            result = await call_next(job)
        except BaseException as error:
            seen.append(("raised", type(error).__name__))
            raise
        seen.append(("after", result))
        return result


class Doubled:
    def execute(self, job, call_next):
        return call_next(job) * 2

    async def aexecute(self, job, call_next):
        return await call_next(job) * 2


class Instead:
    def execute(self, job, call_next):
        return "instead"

    async def aexecute(self, job, call_next):
        return "instead"


class Broken:
    def execute(self, job, call_next):
        raise LookupError("no tenant")

    async def aexecute(self, job, call_next):
        raise LookupError("no tenant")


class Discarding:
    def execute(self, job, call_next):
        raise Discard

    async def aexecute(self, job, call_next):
        raise Discard


@pytest.fixture(autouse=True)
def _forget():
    seen.clear()


@pytest.fixture
def use(settings):
    def use(*classes):
        memory = {"BACKEND": "djqueue.storage.memory.MemoryStorage"}
        paths = [f"{PATH}.{kind.__name__}" for kind in classes]
        settings.DJQUEUE = {"STORAGE": memory, "MIDDLEWARE": paths}

    return use


def handler_of(function, is_async):
    async def handle(job):
        return function(job)

    return handle if is_async else function


@BOTH
async def test_middleware_wraps_the_handler_in_order(storage, queue, use, is_async):
    use(Outer, Doubled)
    job_id = queue.enqueue("x", name=HANDLER).id
    await work_off(storage, handler_of(lambda job: 21, is_async))

    where = "loop" if is_async else "djqueue-job"
    assert seen == [("before", job_id, "x", where), ("after", 42)]
    assert queue.get_result(job_id) == 42


async def test_middleware_wraps_callback_handlers(storage, queue, use):
    use(Doubled)
    job_id = queue.enqueue("x", name=HANDLER).id
    await work_off(storage, lambda job, done: done(None, 4))

    assert queue.get_result(job_id) == 8


@BOTH
async def test_middleware_may_return_without_calling_the_handler(storage, queue, use, is_async):
    use(Outer, Instead)
    job_id = queue.enqueue("x", name=HANDLER).id
    ran = []
    await work_off(storage, handler_of(ran.append, is_async))

    assert ran == []
    assert queue.get_result(job_id) == "instead"


@BOTH
async def test_exception_of_middleware_fails_the_job(storage, queue, use, is_async):
    use(Outer, Broken)
    job_id = queue.enqueue(name=HANDLER, max_attempts=2, backoff=0).id
    ran = []
    await work_off(storage, handler_of(ran.append, is_async))

    found = record(queue, job_id)
    assert (found.state, found.failures, found.reason) == ("failed", 2, "max_attempts_exceeded")
    assert found.error.message == "no tenant"
    assert ran == []
    assert seen.count(("raised", "LookupError")) == 2


@BOTH
async def test_middleware_can_discard_a_job(storage, queue, use, is_async):
    use(Discarding)
    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, handler_of(lambda job: 1, is_async))

    assert (record(queue, job_id).state, record(queue, job_id).reason) == ("cancelled", "discarded")


@BOTH
async def test_middleware_sees_exceptions_of_the_handler(storage, queue, use, is_async):
    def fail(job):
        raise KeyError("price")

    use(Outer)
    job_id = queue.enqueue(name=HANDLER, max_attempts=1).id
    await work_off(storage, handler_of(fail, is_async))

    assert seen[-1] == ("raised", "KeyError")
    assert record(queue, job_id).error.type == "builtins.KeyError"


async def test_timeout_cancels_an_async_handler_through_its_middleware(storage, queue, use):
    async def sleep(job):
        await asyncio.Event().wait()

    use(Outer)
    job_id = queue.enqueue(name=HANDLER, max_attempts=1, timeout=0.05).id
    await work_off(storage, sleep)

    assert seen[-1] == ("raised", "CancelledError")
    assert record(queue, job_id).reason == "timeout"


async def test_worker_with_invalid_middleware_does_not_start(storage, settings):
    settings.DJQUEUE = {"MIDDLEWARE": ["tests.runtime.executors.test_middleware.Nobody"]}
    worker = Worker(storage, handlers={HANDLER: partial(print)})

    with pytest.raises(ConfigurationError, match="Nobody"):
        await worker.run()
