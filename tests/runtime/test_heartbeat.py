"""Commands that a worker receives through its storage, and the state that it reports with its heartbeat."""

import asyncio
import threading
from contextlib import closing

import pytest

from djqueue import Worker
from djqueue._version import __version__
from djqueue.core.errors import StorageReplacedError, StorageUnavailableError
from djqueue.core.workers import MAX_DUMP
from djqueue.runtime import events, problems, watching
from djqueue.runtime.leases import LeaseTable
from djqueue.runtime.tracebacks import stacks
from tests.runtime.running import HANDLER, messages, reached, record, working
from tests.runtime.storages import RecordingStorage
from tests.support import PATIENCE, aeventually, eventually


def nothing(job):
    """A job that is done."""


def state_of(storage):
    [info] = storage.workers.all()
    return info.state


async def test_quiet_worker_finishes_running_jobs_and_claims_no_others_until_resumed(storage, queue):
    go_on = threading.Event()

    def handler(job):
        assert go_on.wait(PATIENCE)

    ids = [result.id for result in queue.enqueue_many(range(3), name=HANDLER)]
    async with working(storage, handler, concurrency=1, worker_id="w") as worker:
        await aeventually(lambda: worker.running == 1)
        assert storage.workers.control("w", "quiet") == "asked"
        await aeventually(lambda: state_of(storage) == "quiet")
        go_on.set()
        await reached(queue, ids[0], "completed")
        queue.enqueue(name=HANDLER)
        claims = len(storage.trips)
        assert queue.counts()["waiting"] == 3
        assert worker.running == 0

        assert storage.workers.control("w", "resume") == "asked"
        await reached(queue, ids[2], "completed")
        await aeventually(lambda: state_of(storage) == "running")
        # While it was quiet it asked for nothing.
        assert all(slots is None or given for _, slots, given in storage.trips[1:claims])
    assert worker.counters.completed == 4


async def test_worker_obeys_a_command_before_its_next_heartbeat(storage, queue):
    async with working(storage, nothing, worker_id="w", heartbeat=3_600):
        storage.workers.control("w", "quiet")
        await aeventually(lambda: state_of(storage) == "quiet")


async def test_stop_command_drains_the_worker(storage, queue):
    go_on = threading.Event()

    def handler(job):
        assert go_on.wait(PATIENCE)

    ids = [result.id for result in queue.enqueue_many(range(2), name=HANDLER)]
    worker = Worker(storage, handlers={HANDLER: handler}, concurrency=1, worker_id="w")
    running = asyncio.ensure_future(worker.run())
    await aeventually(lambda: worker.running == 1)
    assert storage.workers.control("w", "stop") == "asked"
    await aeventually(lambda: state_of(storage) == "stopping")
    assert storage.workers.control("w", "resume") == "stopping"
    go_on.set()
    await asyncio.wait_for(running, PATIENCE)
    assert [record(queue, job_id).state for job_id in ids] == ["completed", "waiting"]
    assert storage.workers.all() == []


async def test_quiet_worker_can_be_stopped(storage, queue):
    worker = Worker(storage, handlers={HANDLER: nothing}, worker_id="w")
    running = asyncio.ensure_future(worker.run())
    await aeventually(lambda: storage.workers.all() != [])
    storage.workers.control("w", "quiet")
    await aeventually(lambda: state_of(storage) == "quiet")
    storage.workers.control("w", "stop")
    await asyncio.wait_for(running, PATIENCE)


async def test_quiet_worker_with_until_empty_waits(storage, queue):
    worker = Worker(storage, handlers={HANDLER: nothing}, worker_id="w", until_empty=True)
    worker.quiet()
    queue.enqueue(name=HANDLER)
    running = asyncio.ensure_future(worker.run())
    await aeventually(lambda: storage.workers.all() != [])
    assert state_of(storage) == "quiet"
    await asyncio.sleep(0)
    assert storage.trips == []
    worker.resume()
    await asyncio.wait_for(running, PATIENCE)
    assert worker.counters.completed == 1


async def test_stack_dump_shows_positions_of_threads_and_tasks_without_values(storage, queue):
    begun, go_on = threading.Event(), threading.Event()
    entered, waiting = asyncio.Event(), asyncio.Event()

    def in_a_thread(job):
        password = "hunter" + "2"
        begun.set()
        assert go_on.wait(PATIENCE), password

    async def innermost():
        entered.set()
        await waiting.wait()

    async def on_the_loop(job):
        await innermost()

    queue.enqueue({"secret": "hunter2"}, name="thread")
    queue.enqueue(name="task", id="id-1")
    async with working(storage, {"thread": in_a_thread, "task": on_the_loop}, concurrency=2, worker_id="w"):
        await aeventually(lambda: begun.is_set() and entered.is_set())
        assert storage.workers.control("w", "dump") == "asked"
        await aeventually(lambda: storage.workers.dump("w") is not None)
        text = storage.workers.dump("w").text
        go_on.set()
        waiting.set()
    assert text.startswith("Worker w, process ")
    assert "2 of 2 slots in use" in text
    assert "task [id-1] of queue work, for " in text
    assert "in in_a_thread" in text
    assert text.index("in on_the_loop") < text.index("in innermost")
    assert "hunter2" not in text


async def test_stack_dump_works_while_the_event_loop_is_blocked(storage, queue):
    begun, go_on = threading.Event(), threading.Event()

    async def blocks_the_loop(job):
        begun.set()
        assert go_on.wait(PATIENCE)

    def look():
        assert begun.wait(PATIENCE)
        storage.workers.control("w", "dump")
        eventually(lambda: storage.workers.dump("w") is not None)
        found.append(storage.workers.dump("w").text)
        go_on.set()

    found = []
    async with working(storage, blocks_the_loop, worker_id="w"):
        looking = asyncio.create_task(asyncio.to_thread(look))
        # From another thread, so that it is looked at while the loop is held up.
        queue.enqueue(name=HANDLER)
        await looking
    assert "in blocks_the_loop" in found[0]


async def test_unknown_command_is_logged_and_other_commands_are_obeyed(queue, caplog, monkeypatch):
    storage, words = RecordingStorage(), [("dance", "quiet"), ()]
    register = storage.workers.register

    def answered(info):
        register(info)
        return words.pop() if words else ()

    monkeypatch.setattr(storage.workers, "register", answered)
    async with working(storage, nothing, worker_id="w", heartbeat=0.05):
        await aeventually(lambda: state_of(storage) == "quiet")
    assert any("ignored the unknown command 'dance'" in line for line in messages(caplog))


async def test_stack_dump_that_cannot_be_saved_is_logged_and_other_commands_are_obeyed(
    queue, caplog, monkeypatch
):
    def away(worker_id, text):
        raise StorageUnavailableError("away")

    storage = RecordingStorage()
    monkeypatch.setattr(storage.workers, "save_dump", away)
    async with working(storage, nothing, worker_id="w", heartbeat=0.05):
        storage.workers.control("w", "dump")
        storage.workers.control("w", "quiet")
        await aeventually(lambda: state_of(storage) == "quiet")
    assert any("could not save its stack dump" in line for line in messages(caplog))


async def test_worker_ends_with_the_error_when_its_database_was_replaced(monkeypatch):
    storage = RecordingStorage()
    worker = Worker(storage, handlers={HANDLER: nothing}, heartbeat=0.05)

    def is_replaced(info):
        raise StorageReplacedError

    worker.on_started = lambda: monkeypatch.setattr(storage.workers, "register", is_replaced)

    with pytest.raises(StorageReplacedError):
        await worker.run()


async def test_worker_registration_lists_version_memory_and_running_jobs(storage, queue, settings):
    settings.DJQUEUE = {"VERSION": "2026.11"}
    go_on = threading.Event()
    queue.enqueue_many(range(30), name=HANDLER)
    before = storage.engine.clock.now()
    async with working(storage, lambda job: go_on.wait(PATIENCE), concurrency=30, heartbeat=0.05) as worker:
        await aeventually(lambda: worker.running == 30)
        await aeventually(lambda: storage.workers.all()[0].active == 30)
        [info] = storage.workers.all()
        go_on.set()
    assert (info.kind, info.version, info.project) == ("embedded", __version__, "2026.11")
    assert info.heartbeat == 50
    assert info.rss > 1_000_000
    assert len(info.jobs) == 20
    assert {(job.queue, job.name) for job in info.jobs} == {("work", HANDLER)}
    assert all(before - 1_000 <= job.started_at <= info.seen_at + 1_000 for job in info.jobs)


# Stacks.


def deep(levels, then):
    return deep(levels - 1, then) if levels else then()


@pytest.mark.parametrize("threads", [1, 12])
def test_stack_dump_groups_threads_with_equal_stacks(threads):
    go_on = threading.Event()
    started = [threading.Thread(target=deep, args=(100, go_on.wait), daemon=True) for _ in range(threads)]
    for thread in started:
        thread.start()
    loop = asyncio.new_event_loop()
    try:
        eventually(lambda: stacks("", loop).count("self._cond.wait(") >= 1)
        eventually(lambda: threads == 1 or f"{threads} threads with the same stack" in stacks("", loop))
        text = stacks("heading", loop)
    finally:
        go_on.set()
        loop.close()
    assert text.startswith("heading\n")
    assert text.count("in deep") <= 10, "what repeats is not repeated"


def test_stack_dump_is_truncated_at_its_limit():
    go_on = threading.Event()
    scope = {}
    started = []
    for number in range(60):
        lines = [f"def f{number}_{depth}(then): return f{number}_{depth + 1}(then)" for depth in range(80)]
        exec("\n".join([*lines, f"def f{number}_80(then): return then()"]), scope)
        started.append(threading.Thread(target=scope[f"f{number}_0"], args=(go_on.wait,), daemon=True))
    for thread in started:
        thread.start()
    loop = asyncio.new_event_loop()
    try:
        # Each has begun, and may yet have some way to go.
        eventually(lambda: len(stacks("heading", loop)) == MAX_DUMP)
        text = stacks("heading", loop)
    finally:
        go_on.set()
        loop.close()
    assert len(text) == MAX_DUMP
    assert text.endswith("… (truncated)\n")


async def test_job_that_blocks_the_event_loop_is_named(storage, queue, caplog, monkeypatch):
    monkeypatch.setattr(watching, "BLOCKED_AFTER", 100)
    noted = []

    async def handler(job):
        eventually(lambda: any("event loop has been blocked" in line for line in messages(caplog)))
        eventually(problems.noted)
        noted.extend(problems.noted())

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler, heartbeat=0.02):
        await reached(queue, job_id, "completed")
        await aeventually(lambda: not problems.noted())

    assert [finding.id for finding in noted] == ["worker.loop"]
    assert f"{HANDLER} [{job_id}]" in noted[0].text
    [line] = [line for line in messages(caplog) if "event loop has been blocked" in line]
    assert job_id in line


@pytest.mark.parametrize("is_replaceable", [False, True])
async def test_supervised_worker_ends_if_a_job_blocks_its_loop_after_its_timeout(
    storage, queue, caplog, monkeypatch, is_replaceable
):
    monkeypatch.setattr(watching, "BLOCKED_AFTER", 50)
    monkeypatch.setattr(watching, "OVERRUN_PATIENCE", 0.0)
    ended = []
    monkeypatch.setattr(watching, "leave", ended.append)

    async def handler(job):
        eventually(lambda: ended if is_replaceable else problems.noted())

    async with working(storage, handler, heartbeat=0.02) as worker:
        worker.is_replaceable = is_replaceable
        job_id = queue.enqueue(name=HANDLER, timeout=0.01, max_attempts=1).id
        await aeventually(lambda: record(queue, job_id).finished_at)

    assert set(ended) == ({1} if is_replaceable else set())
    assert any("blocks the event loop" in line for line in messages(caplog)) == is_replaceable


async def test_heartbeat_that_waits_for_long_is_logged_with_what_it_waits_for(storage, caplog, monkeypatch):
    monkeypatch.setattr(watching, "SILENT_AFTER", 200)
    monkeypatch.setattr(events, "OUTAGE_LOG_DELAY", 50)
    unlocked, register = threading.Event(), storage.workers.register

    def wait_and_register(info):
        assert unlocked.wait(PATIENCE)
        return register(info)

    monkeypatch.setattr(storage, "held_up_by", lambda: "The process 7 (backup) holds the lock.")
    worker = Worker(storage, handlers={HANDLER: nothing}, heartbeat=0.02)
    with closing(LeaseTable(60)) as worker.lease_table:
        async with worker:
            monkeypatch.setattr(storage.workers, "register", wait_and_register)
            [problem] = await aeventually(problems.noted)
            monkeypatch.setattr(watching, "SILENT_AFTER", 3_600_000)  # A busy machine is slow.
            unlocked.set()
            await aeventually(lambda: not problems.noted())

    assert problem.id == "worker.storage"
    assert "(renew): it does not answer. The process 7 (backup) holds the lock." in problem.text
    lines = [line for line in messages(caplog) if "the storage" in line]
    assert ["The process 7" in line for line in lines] == [True, False]
    assert "available again" in lines[1]
