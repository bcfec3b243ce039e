"""Exceptions that break the code which looks at them: whatever a handler raises, its job ends."""

import asyncio
import threading
from concurrent.futures import CancelledError as FutureCancelledError

import pytest

from djqueue import Retry, UnrecoverableError, job
from tests.runtime.running import HANDLER, reached, working


def hostile(*names, base=Exception, **more):
    """A class of errors whose methods raise another hostile error."""

    def refuse(*_args, **_kwargs):
        raise Breaking

    methods = {name: property(refuse) if name in PROPERTIES else refuse for name in names}
    return type("Hostile", (base,), {**methods, **more})


PROPERTIES = ("__class__", "__dict__", "__notes__", "__cause__", "reason", "delay", "args")


class Breaking(BaseException):
    def __str__(self):
        raise ValueError

    __repr__ = __str__


class Meta(type):
    def __getattribute__(cls, name):
        if name in ("__module__", "__qualname__", "__name__"):
            raise Breaking
        return super().__getattribute__(name)

    def __instancecheck__(cls, instance):
        raise Breaking

    __subclasscheck__ = __instancecheck__


class OfHostileMeta(Exception, metaclass=Meta):
    pass


def own_cause():
    error = ValueError()
    error.__cause__ = error
    return error


def noted():
    error = ValueError()
    error.__notes__ = 5
    return error


ERRORS = {
    "Breaking": Breaking,
    "metaclass": OfHostileMeta,
    "GeneratorExit": GeneratorExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(0),
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "CancelledError": asyncio.CancelledError,
    "CancelledError of futures": FutureCancelledError,
    "group": lambda: BaseExceptionGroup("many", [KeyboardInterrupt(), GeneratorExit(), Breaking()]),
    "own cause": own_cause,
    "strange notes": noted,
    "class without a name": lambda: type("", (Exception,), {})(),
    "reason": hostile("reason", base=UnrecoverableError),
    "strange reason": hostile(base=UnrecoverableError, reason=["no text"]),
    "delay of a retry": hostile("delay", base=Retry, __init__=lambda self: None),
    "MemoryError": MemoryError,
    "RecursionError": RecursionError,
    **{
        name: hostile(name)
        for name in ("__str__", "__repr__", "__eq__", "__hash__", "__class__", "__dict__", "__notes__")
    },
    "every attribute": hostile("__getattribute__"),
    "every attribute of a retry": hostile("__getattribute__", base=Retry, __init__=lambda self: None),
    "text": hostile("__str__", "__repr__", "__eq__", "__hash__", "__class__", base=BaseException),
}


def sync(make, name):
    def handler(job):
        raise make()

    return handler


def asynchronous(make, name):
    async def handler(job):
        await asyncio.sleep(0)
        raise make()

    return handler


def eager(make, name):
    async def handler(job):
        raise make()

    return handler


def generator(make, name):
    def handler(job):
        yield 1
        raise make()

    return handler


def async_generator(make, name):
    async def handler(job):
        yield 1
        raise make()

    return handler


def awaited(make, name):
    async def rest():
        raise make()

    return lambda job: rest()


def callback(make, name):
    def handler(job, done):
        raise make()

    return handler


def done(make, name):
    def handler(job, done):
        threading.Thread(target=done, args=(make(),)).start()

    return handler


def batch(make, name):
    @job(name=name, batch={"size": 2, "wait": 0})
    async def handler(jobs):
        raise make()

    return handler


def sync_batch(make, name):
    @job(name=name, batch={"size": 2, "wait": 0})
    def handler(jobs):
        raise make()

    return handler


def results_of_a_batch(make, name):
    @job(name=name, batch={"size": 2, "wait": 0})
    async def handler(jobs):
        return [make() for _ in jobs]

    return handler


def child_task(make, name):
    async def child():
        raise make()

    async def handler(job):
        await asyncio.create_task(child())

    return handler


STYLES = [
    sync,
    asynchronous,
    eager,
    generator,
    async_generator,
    awaited,
    callback,
    done,
    batch,
    sync_batch,
    results_of_a_batch,
    child_task,
]


STOP_THE_LOOP = {(child_task, "KeyboardInterrupt"), (child_task, "SystemExit")}
"""With these, asyncio stops the loop of the test: see `test_loops`."""


@pytest.mark.parametrize("style", STYLES)
async def test_job_ends_whatever_its_handler_raises(storage, queue, style):
    handlers = {
        name: style(make, name) for name, make in ERRORS.items() if (style, name) not in STOP_THE_LOOP
    }
    for name in handlers:
        queue.enqueue({"args": [], "kwargs": {}}, name=name, id=name, max_attempts=1)

    async with working(storage, handlers, concurrency=2) as worker:
        for name in handlers:
            found = await reached(queue, name, "failed")
            assert found.error.type
        assert not worker.running


async def test_reason_that_cannot_be_read_is_the_usual_one(storage, queue):
    queue.enqueue(name=HANDLER, id="hostile")

    async with working(storage, sync(ERRORS["strange reason"], HANDLER)):
        assert (await reached(queue, "hostile", "failed")).reason == "explicit_fail"
