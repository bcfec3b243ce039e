"""A worker inside other programs: with and without an event loop, started, joined and rejected."""

import asyncio
import threading

import pytest

from djqueue import Worker
from djqueue.client import get_storage
from djqueue.client.storages import close_storage
from djqueue.errors import ConfigurationError, OptionError, UnknownQueueError
from djqueue.storage.memory import MemoryStorage
from tests.runtime.running import HANDLER, new_threads, record
from tests.support import PATIENCE, eventually


def test_started_worker_runs_in_its_own_thread(storage, queue):
    worker = Worker(storage, handlers={HANDLER: lambda job: threading.current_thread().name})
    worker.start()
    job_id = queue.enqueue(name=HANDLER).id
    eventually(lambda: record(queue, job_id).state == "completed")
    assert not worker.join(0.001)
    worker.stop()
    assert worker.join(PATIENCE)
    assert worker.join()

    assert queue.get_result(job_id).startswith("djqueue-job")


def test_worker_in_a_thread_runs_async_handlers(storage, queue):
    async def handler(job):
        await asyncio.sleep(0)
        return "async"

    with Worker(storage, handlers={HANDLER: handler}):
        assert queue.enqueue_and_wait(name=HANDLER, wait=5) == "async"


def test_leaving_the_with_block_drains_the_worker(storage, queue):
    started, go_on = threading.Event(), threading.Event()

    def handler(job):
        started.set()
        assert go_on.wait(PATIENCE)

    with Worker(storage, handlers={HANDLER: handler}):
        job_id = queue.enqueue(name=HANDLER).id
        assert started.wait(PATIENCE)
        go_on.set()

    assert record(queue, job_id).state == "completed"


async def test_callers_on_the_event_loop_of_the_worker_get_their_results(storage, queue):
    async def handler(job):
        return job.payload + 1

    async with Worker(storage, handlers={HANDLER: handler}):
        answers = [queue.aenqueue_and_wait(number, name=HANDLER, wait=5) for number in range(20)]
        assert await asyncio.gather(*answers) == list(range(1, 21))


async def test_result_none_ends_the_wait_of_the_caller(storage, queue):
    async with Worker(storage, handlers={HANDLER: lambda job: None}):
        assert await queue.aenqueue_and_wait(name=HANDLER, wait=5) is None


async def test_worker_cannot_run_twice(storage):
    worker = Worker(storage, handlers={HANDLER: print}, until_empty=True)
    await worker.run()

    with pytest.raises(RuntimeError, match="can't be restarted"):
        await worker.run()


def test_worker_cannot_start_twice(storage):
    with (
        Worker(storage, handlers={HANDLER: print}) as worker,
        pytest.raises(RuntimeError, match="already running"),
    ):
        worker.start()


class Refusing(MemoryStorage):
    def connect(self):
        raise ConfigurationError("no such place")


def test_start_raises_errors_of_the_worker_thread():
    worker = Worker(Refusing(), handlers={HANDLER: print})

    with pytest.raises(ConfigurationError, match="no such place"):
        worker.start()


async def test_async_with_block_raises_errors_of_the_start():
    with pytest.raises(ConfigurationError, match="no such place"):
        async with Worker(Refusing(), handlers={HANDLER: print}):
            pytest.fail("it did not start")


async def test_worker_does_not_connect_a_connected_storage():
    worker = Worker(Refusing(), handlers={HANDLER: print}, connect=False, until_empty=True)

    await worker.run()


class Broken(MemoryStorage):
    def listen(self, queues, wake):
        raise RuntimeError("cannot listen")


def test_error_during_the_start_is_raised_and_leaves_no_threads(storage):
    before = threading.enumerate()
    broken = Broken()

    with pytest.raises(RuntimeError, match="cannot listen"):
        Worker(broken, handlers={HANDLER: print}).start()

    assert broken.workers.all() == []
    eventually(lambda: not new_threads(before))


def test_connecting_does_not_block_the_event_loop_of_the_caller(storage):
    connecting, let = threading.Event(), threading.Event()

    class Slow(MemoryStorage):
        def connect(self):
            connecting.set()
            assert let.wait(PATIENCE)

    async def main():
        worker = Worker(Slow(), handlers={HANDLER: print}, until_empty=True)
        running = asyncio.ensure_future(worker.run())
        assert await asyncio.to_thread(connecting.wait, PATIENCE)
        worker.stop()
        let.set()
        await running

    asyncio.run(main())


def test_worker_uses_the_storage_of_the_settings_by_default(settings):
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}}

    assert Worker(handlers={HANDLER: print}).storage is get_storage()
    close_storage()


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"concurrency": 0}, ConfigurationError, "concurrency"),
        ({"concurrency": True}, ConfigurationError, "concurrency"),
        ({"concurrency": 1.5}, ConfigurationError, "concurrency"),
        ({"max_jobs": 0}, ConfigurationError, "max_jobs"),
        ({"queues": []}, ConfigurationError, "queues"),
        ({"queues": [""]}, OptionError, "queue"),
        ({"queues": [3]}, OptionError, "queue"),
        ({"worker_id": ""}, OptionError, "worker_id"),
        ({"worker_id": "x" * 256}, OptionError, "worker_id"),
        ({"heartbeat": float("nan")}, OptionError, "heartbeat"),
        ({"shutdown_timeout": -1}, OptionError, "shutdown_timeout"),
    ],
)
def test_invalid_worker_option_is_rejected_by_name(storage, options, error, word):
    with pytest.raises(error, match=word):
        Worker(storage, handlers={HANDLER: print}, **options)


def test_closed_list_of_queues_is_enforced(storage, settings):
    settings.DJQUEUE = {"QUEUES": ["emails"], "STRICT_QUEUES": True}

    Worker(storage, queues=["emails"], handlers={HANDLER: print})
    with pytest.raises(UnknownQueueError, match="emials"):
        Worker(storage, queues=["emials"], handlers={HANDLER: print})


def test_worker_options_default_to_the_settings(storage, settings):
    settings.DJQUEUE = {"CONCURRENCY": 3, "SHUTDOWN_TIMEOUT": 7, "HEARTBEAT": 2}

    options = Worker(storage, handlers={HANDLER: print}).options
    assert (options.concurrency, options.shutdown_timeout, options.heartbeat) == (3, 7_000, 2_000)
    assert Worker(storage, "emails", {HANDLER: print}, concurrency=5).options.concurrency == 5
    assert Worker(storage, "emails", {HANDLER: print}).options.queues == ("emails",)
