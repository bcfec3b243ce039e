"""Handlers that would end their worker: the service goes on, and each of their jobs has an outcome."""

import sys
from collections.abc import Iterator

import pytest

from tests.runtime.project import Project, WorkerProcess
from tests.support import eventually

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="forks")]

SETTINGS = """
DATABASES["default"]["NAME"] = "db.sqlite3"
DATABASES["default"]["OPTIONS"] = {"transaction_mode": "IMMEDIATE", "timeout": 20}
DJQUEUE = {"HEARTBEAT": 0.5, "QUEUES": {"hostile": {"LEASE": 1}}}
"""
JOBS = """
import asyncio, os, sys, threading, time
from djqueue import job

@job
def harmless():
    return "done"

@job
async def sleeps():
    await asyncio.sleep(0.01)
    return "done"

@job(max_attempts=1, max_stalls=0, queue="hostile")
def exits(code):
    os._exit(code)

@job(max_attempts=1, queue="hostile")
async def leaves_a_child(kind):
    async def child():
        raise {"KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit}[kind]
    child = asyncio.create_task(child())
    await asyncio.sleep(0.01)
    return "done"

@job(max_attempts=1, queue="hostile")
async def awaits_a_child():
    async def child():
        raise SystemExit(0)
    await asyncio.create_task(child())

@job(max_attempts=1, queue="hostile")
async def stops_the_loop():
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)

@job(max_attempts=1, max_stalls=0, queue="hostile")
async def cancels_all_tasks():
    await asyncio.sleep(0)  # until then, its own task is among them
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0.01)
    return "done"

@job(max_attempts=1, queue="hostile")
def replaces_clocks():
    time.monotonic = time.time = lambda: 0.0

@job(max_attempts=1, max_stalls=0, queue="hostile")
async def closes_all_descriptors():
    os.closerange(0, 64)
    await asyncio.sleep(60)

@job(max_attempts=1, queue="hostile")
def exits_in_a_thread():
    thread = threading.Thread(target=sys.exit)
    thread.start()
    thread.join()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Project, WorkerProcess]]:
    project = Project(tmp_path_factory.mktemp("project"), JOBS, SETTINGS)
    project.migrate()
    with project.start() as workers:
        workers.says("started")
        yield project, workers
        workers.signal()
        assert workers.ends() == 0, workers.output


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        ("leaves_a_child.enqueue('KeyboardInterrupt')", ["completed", ""]),
        ("leaves_a_child.enqueue('SystemExit')", ["completed", ""]),
        ("awaits_a_child.enqueue()", ["failed", "max_attempts_exceeded"]),
        ("stops_the_loop.enqueue()", ["completed", ""]),
        ("exits_in_a_thread.enqueue()", ["completed", ""]),
        ("cancels_all_tasks.enqueue()", ["completed", ""]),
        ("replaces_clocks.enqueue()", ["completed", ""]),
        ("closes_all_descriptors.enqueue()", ["failed", "worker_lost"]),
        ("exits.enqueue(0)", ["failed", "worker_lost"]),
        ("exits.enqueue(78)", ["failed", "worker_lost"]),
    ],
)
def test_job_of_a_hostile_handler_ends_and_the_service_goes_on(
    project: tuple[Project, WorkerProcess], call: str, outcome: list[str]
) -> None:
    shop, workers = project
    job_id = shop.run(f"from shop.jobs import *\nanswer = {call}.id")
    state = f"from djqueue import Queue\njob = Queue('hostile').get_job({job_id!r})\nanswer = job.state.value"

    eventually(lambda: shop.run(state) in ("completed", "failed"))

    assert shop.run(f"{state}, job.reason") == outcome, workers.output
    for name in ("harmless", "sleeps"):
        assert shop.run(f"from shop.jobs import *\nanswer = {name}.enqueue_and_wait(wait=60)") == "done"
    assert workers.process.poll() is None, workers.output
