"""Event loops of workers."""

import asyncio
import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from djqueue import Queue
from djqueue.core.threads import on_thread
from djqueue.runtime.loops import Periodic, new_loop, run_loop
from tests.runtime.running import HANDLER, record, work_off, working
from tests.support import PATIENCE


def test_event_loop_is_uvloop_if_installed():
    uvloop = pytest.importorskip("uvloop")

    loop = new_loop()

    assert isinstance(loop, uvloop.Loop)
    loop.close()


def test_event_loop_is_asyncio_without_uvloop(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.delitem(sys.modules, "uvloop", raising=False)

    loop = new_loop()

    assert isinstance(loop, asyncio.SelectorEventLoop)
    loop.close()


async def raises_in_a_task(error):
    async def child():
        raise error

    await asyncio.wait([asyncio.create_task(child())])


async def raises_in_a_callback(error):
    def callback():
        raise error

    asyncio.get_running_loop().call_soon(callback)
    await asyncio.sleep(0)


@pytest.mark.parametrize("raises", [raises_in_a_task, raises_in_a_callback])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_loop_goes_on_after_a_task_or_callback_raised_what_stops_asyncio(raises, kind):
    error, noted = kind("stray"), []

    async def main():
        await raises(error)
        await asyncio.sleep(0)
        return "done"

    assert run_loop(main(), noted.append) == "done"
    assert noted == [error]


def forks(_):
    """Return in the child, with a log that the test reads, and wait for it in the parent."""
    if (pid := os.fork()) == 0:
        logging.getLogger("djqueue.worker").addHandler(logging.StreamHandler(sys.__stderr__))
        return None
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def forks_on_the_loop(job):
    return forks(job)


@pytest.mark.parametrize("handler", [forks, forks_on_the_loop])
def test_child_that_returns_from_a_forked_handler_ends_with_a_line_in_the_log(storage, capfd, handler):
    async def main():
        async with working(storage, {HANDLER: handler}):
            return await Queue(HANDLER, storage=storage).aenqueue_and_wait(wait=PATIENCE)

    assert run_loop(main(), lambda error: None) == os.EX_SOFTWARE
    assert "returned in the child, which has ended" in capfd.readouterr().err


def test_loop_goes_on_after_a_task_has_stopped_it():
    noted = []

    async def main():
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.001)
        return "done"

    assert run_loop(main(), noted.append) == "done"
    assert [type(error) for error in noted] == [RuntimeError]


async def shuts_the_default_executor_down():
    await asyncio.get_running_loop().shutdown_default_executor()


async def sets_a_default_executor_and_shuts_it_down():
    with ThreadPoolExecutor() as executor:
        asyncio.get_running_loop().set_default_executor(executor)


@pytest.mark.parametrize(
    "handler", [shuts_the_default_executor_down, sets_a_default_executor_and_shuts_it_down]
)
def test_calls_of_the_storage_do_not_use_the_default_executor_of_handlers(handler):
    async def main():
        await handler()
        return await on_thread(threading.get_ident)

    assert run_loop(main(), lambda _: None) != threading.get_ident()


def test_loop_raises_what_its_main_coroutine_raises():
    async def main():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        run_loop(main(), pytest.fail)


def test_timers_of_the_loop_do_not_depend_on_functions_that_a_handler_replaces(monkeypatch):
    async def main():
        monkeypatch.setattr("time.monotonic", None)
        try:
            await asyncio.sleep(0.001)
        finally:
            monkeypatch.undo()
        return "done"

    assert run_loop(main(), pytest.fail) == "done"


def test_loop_whose_descriptors_were_closed_raises_the_error(monkeypatch):
    monkeypatch.setattr("djqueue.runtime.loops.find_spec", lambda name: None)  # asyncio's own loop

    async def main():
        os.close(asyncio.get_running_loop()._selector.fileno())
        await asyncio.sleep(PATIENCE)

    with pytest.raises(OSError, match="Bad file descriptor"):
        run_loop(main(), pytest.fail)


def test_periodic_action_is_repeated_after_errors_of_which_the_first_is_logged(caplog):
    outcomes = [KeyError("first"), KeyError("second"), None, KeyError("third")]
    has_ended = threading.Event()

    def action():
        outcome = outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]
        if outcome is outcomes[0]:
            has_ended.set()
        if outcome is not None:
            raise outcome

    periodic = Periodic("djqueue-test", lambda: 0.0, action)
    with caplog.at_level(logging.ERROR, "djqueue.worker"):
        periodic.start()
        assert has_ended.wait(PATIENCE)
        periodic.stop()
        periodic.join(PATIENCE)

    # asyncio logs tasks of other tests when they are collected.
    logged = [record for record in caplog.records if record.name == "djqueue.worker"]
    assert [str(record.exc_info[1]) for record in logged][:2] == ["'first'", "'third'"]
    assert logged[0].getMessage() == "The thread djqueue-test failed, and goes on."


def test_periodic_action_goes_on_after_an_error_between_its_calls(caplog):
    pauses, was_called = [SystemExit("from a handler")], threading.Event()

    def pause():
        if pauses:
            raise pauses.pop()
        return 0.0

    periodic = Periodic("djqueue-test", pause, was_called.set)
    periodic.start()
    assert was_called.wait(PATIENCE)
    periodic.stop()
    periodic.join(PATIENCE)

    assert "The thread djqueue-test failed, and goes on." in caplog.text


async def test_task_factory_of_a_handler_affects_neither_other_jobs_nor_the_worker(storage, queue):
    loop = asyncio.get_running_loop()

    def refuse(*_, **__):
        raise RuntimeError("no tasks")

    async def handler(job):
        loop.set_task_factory(refuse)

    try:
        ids = [queue.enqueue(name=HANDLER).id for _ in range(3)]
        await work_off(storage, handler, concurrency=1)
    finally:
        loop.set_task_factory(None)

    assert [record(queue, job_id).state for job_id in ids] == ["completed"] * 3
