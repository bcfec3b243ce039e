"""The job context of a handler, and its isolation from other handlers."""

import asyncio
import decimal
import gc
import threading
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from djqueue import Worker, current_job, job
from djqueue.runtime import JobContext
from tests.runtime.running import HANDLER, work_off, working
from tests.support import PATIENCE, aeventually

flavour: ContextVar[str] = ContextVar("flavour", default="none")


@job(name="tests.runtime.who_am_i")
def who_am_i(word):
    me = current_job()
    return [me.id, me.queue, me.name, me.attempts, me.failures, me.stalls, word]


@job(name="tests.runtime.awho_am_i")
async def awho_am_i(word):
    await asyncio.sleep(0)
    return who_am_i(word)


def test_current_job_raises_outside_of_handlers():
    assert current_job() is None


@pytest.mark.parametrize("function", [who_am_i, awho_am_i])
async def test_job_function_gets_its_job_from_current_job(storage, queue, function):
    job_id = queue.enqueue({"args": ["x"], "kwargs": {}}, name=function.name).id

    await work_off(storage, {function.name: function})

    assert queue.get_result(job_id) == [job_id, "work", function.name, 1, 0, 0, "x"]
    assert current_job() is None


async def test_handler_receives_the_same_object_as_current_job(storage, queue):
    queue.enqueue(name=HANDLER)
    seen: list[JobContext] = []

    def handler(job):
        seen.extend([job, current_job()])

    await work_off(storage, handler)

    assert seen[0] == seen[1]
    assert len(set(seen)) == 1
    assert "handler" in repr(seen[0])


async def test_handler_receives_id_payload_options_subject_and_headers(storage, queue):
    seen = []
    queue.enqueue(
        {"n": 1}, name=HANDLER, id="user:42", tags=["a"], priority=3, subject="a user", headers={"t": 7}
    )

    await work_off(storage, seen.append)

    context = seen[0]
    assert (context.id, context.queue, context.name) == ("user:42", "work", "handler")
    assert context.payload == {"n": 1}
    assert (context.options.priority, context.options.tags) == (3, ("a",))
    assert context.subject == "a user"
    assert context.headers == {"t": 7}
    assert datetime.now(UTC) - context.created_at < timedelta(hours=1)


@pytest.mark.parametrize("is_async", [True, False])
async def test_context_variables_are_not_shared_between_handlers(storage, queue, is_async):
    def synchronous(job):
        before = flavour.get()
        flavour.set(job.id)
        return before

    async def asynchronous(job):
        before = synchronous(job)
        await asyncio.sleep(0)
        assert flavour.get() == job.id
        return before

    flavour.set("of the caller")
    ids = [result.id for result in queue.enqueue_many(range(20), name=HANDLER)]
    await work_off(storage, asynchronous if is_async else synchronous, concurrency=3)

    assert {queue.get_result(job_id) for job_id in ids} == {"of the caller"}
    assert flavour.get() == "of the caller"


@pytest.mark.parametrize("style", ["sync", "async", "batch"])
async def test_decimal_context_is_not_shared_between_handlers(storage, queue, style):
    def synchronous(job):
        before = str(Decimal(1) / 3)
        decimal.getcontext().prec = 3
        return before

    async def asynchronous(job):
        return synchronous(job)

    @job(name=HANDLER, batch={"size": 2, "wait": 0})
    def of_a_batch(jobs):
        return [synchronous(job) for job in jobs[:1]] * len(jobs)

    handler = {"sync": synchronous, "async": asynchronous, "batch": of_a_batch}[style]
    payload = {"args": [], "kwargs": {}}
    with decimal.localcontext(prec=7):
        ids = [result.id for result in queue.enqueue_many([payload] * 6, name=HANDLER)]
        await work_off(storage, handler, concurrency=2)
        assert decimal.getcontext().prec == 7

    assert {queue.get_result(job_id) for job_id in ids} == {"0.3333333"}


async def test_current_job_is_available_in_tasks_and_threads_with_the_context(storage, queue):
    async def handler(job):
        async def inner():
            return current_job().id

        return [
            await asyncio.create_task(inner()),
            await asyncio.to_thread(lambda: current_job().id),
            current_job().id,
        ]

    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, handler)

    assert queue.get_result(job_id) == [job_id] * 3


async def test_sync_handlers_run_in_threads_and_async_handlers_on_the_event_loop(storage, queue):
    async def asynchronous(job):
        return threading.get_ident()

    def synchronous(job):
        return threading.get_ident()

    on_loop = queue.enqueue(name="asynchronous").id
    in_thread = queue.enqueue(name="synchronous").id
    await work_off(storage, {"asynchronous": asynchronous, "synchronous": synchronous})

    assert queue.get_result(on_loop) == threading.get_ident()
    assert queue.get_result(in_thread) != threading.get_ident()


@pytest.mark.parametrize("is_async", [True, False])
async def test_finished_job_leaves_no_reference_cycles(storage, queue, is_async):
    """Circles of a few objects for each job cost a busy worker a quarter of its time."""

    async def asynchronous(job):
        return job.payload

    def synchronous(job):
        return job.payload

    queue.enqueue_many(range(500), name=HANDLER)
    async with working(storage, asynchronous if is_async else synchronous) as worker:
        gc.collect()
        gc.disable()
        try:
            await aeventually(lambda: worker.counters.completed == 500)
            left = gc.collect()
        finally:
            gc.enable()

    assert left < 250


async def test_handlers_use_all_slots_concurrently(storage, queue):
    together = threading.Barrier(4)

    def synchronous(job):
        return together.wait(PATIENCE) >= 0

    ids = [result.id for result in queue.enqueue_many(range(4), name=HANDLER)]
    await work_off(storage, synchronous, concurrency=4)

    assert all(queue.get_result(job_id) for job_id in ids)


async def test_running_handlers_never_exceed_the_number_of_slots(storage, queue):
    lock = threading.Lock()
    running, most = 0, 0

    def synchronous(job):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        job.cancelled.wait(0.001)
        with lock:
            running -= 1

    async def asynchronous(job):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        await asyncio.sleep(0.001)
        with lock:
            running -= 1

    queue.enqueue_many(range(40), name="synchronous")
    queue.enqueue_many(range(40), name="asynchronous")
    worker = await work_off(
        storage, {"synchronous": synchronous, "asynchronous": asynchronous}, concurrency=3
    )

    assert worker.counters.completed == 80
    assert most == 3


def test_worker_uses_the_task_factory_of_the_caller(storage, queue):
    """A loop with a task factory, as some tracers install, makes the handlers' tasks."""
    made = []

    def factory(loop, coroutine, **options):
        made.append(coroutine)
        return asyncio.Task(coroutine, loop=loop, **options)

    async def handler(job):
        return True

    async def main():
        asyncio.get_running_loop().set_task_factory(factory)
        await Worker(storage, handlers={HANDLER: handler}, until_empty=True).run()

    queue.enqueue(name=HANDLER)
    asyncio.run(main())

    assert any("TaskExecutor._run" in coroutine.__qualname__ for coroutine in made)
