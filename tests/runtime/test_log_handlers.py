"""Workers of a project whose log handlers raise, block or use the ORM."""

import asyncio
import logging
import threading

import pytest
from django.contrib.auth.models import Group

from djqueue.core import logs
from tests.runtime.running import HANDLER, reached, working
from tests.support import PATIENCE


async def failing(job):
    raise ValueError("boom")


@pytest.fixture
def handle(monkeypatch):
    """Makes a function the only handler of the worker's logger."""

    def handle(emit):
        handler = logging.Handler()
        handler.emit = emit
        logger = logging.getLogger("djqueue.worker")
        monkeypatch.setattr(logger, "handlers", [handler])
        monkeypatch.setattr(logs._complaints, "_kinds", {})

    return handle


async def test_worker_goes_on_if_a_log_handler_raises(storage, queue, handle, capsys):
    def emit(record):
        raise LookupError("no connection")

    handle(emit)
    ids = queue.enqueue_many(range(3), name=HANDLER, max_attempts=1)

    async with working(storage, failing):
        for result in ids:
            await reached(queue, result.id, "failed")

    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "The log handler logging.Handler raised builtins.LookupError" in line]
    assert sum("builtins.LookupError" in line for line in lines) == 1


async def test_log_handlers_never_run_on_the_loop_of_the_worker(storage, queue, handle):
    seen = []

    def emit(record):
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        seen.append(threading.current_thread().name)

    handle(emit)
    job_id = queue.enqueue(name=HANDLER, max_attempts=1).id

    async with working(storage, failing):
        await reached(queue, job_id, "failed")

    assert set(seen) == {"djqueue-logs"}


@pytest.mark.django_db(transaction=True)
async def test_log_handler_may_write_with_the_orm(storage, queue, handle):
    def emit(record):
        Group.objects.create(name=record.getMessage()[:150])

    handle(emit)
    job_id = queue.enqueue(name=HANDLER, max_attempts=1).id

    async with working(storage, failing):
        await reached(queue, job_id, "failed")

    assert await Group.objects.filter(name__contains="failed permanently").acount() == 1


async def test_worker_goes_on_while_a_log_handler_blocks(storage, queue, handle):
    go_on = threading.Event()
    handle(lambda record: go_on.wait(PATIENCE))
    ids = queue.enqueue_many(range(20), name=HANDLER, max_attempts=1)

    async with working(storage, failing):
        for result in ids:
            await reached(queue, result.id, "failed")
        go_on.set()
