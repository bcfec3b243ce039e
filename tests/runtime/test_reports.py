"""Progress and log lines: sent in groups, and always before the job's end."""

import asyncio

import pytest

from djqueue import Queue, StorageUnavailableError, current_job
from djqueue.errors import SerializationError
from djqueue.runtime.reports import MAX_LINE
from tests.runtime.running import HANDLER, reached, record, work_off, working
from tests.runtime.storages import LockedStorage, RecordingStorage
from tests.support import aeventually, eventually

BOTH = pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])


def as_handler(function, is_async):
    async def asynchronous(job):
        return function(job)

    return asynchronous if is_async else function


@BOTH
async def test_last_progress_is_stored_before_the_job_ends(storage, queue, is_async):
    def handler(job):
        for step in range(500):
            job.progress({"step": step})
            job.log(f"step {step}")

    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, as_handler(handler, is_async))

    info = queue.get_job(job_id)
    assert info.progress == {"step": 499}
    assert [line for _, line in info.logs] == [f"step {step}" for step in range(500)]
    assert sum(len(group) for group in storage.reports) <= 3


@BOTH
async def test_log_lines_of_a_failed_handler_are_kept(storage, queue, is_async):
    def handler(job):
        current_job().log("about to fail")
        current_job().progress(0.5)
        raise ValueError

    job_id = queue.enqueue(name=HANDLER, max_attempts=1).id
    await work_off(storage, as_handler(handler, is_async))

    failed = record(queue, job_id)
    assert failed.progress == 0.5
    assert [line for _, line in failed.logs] == ["about to fail"]


@BOTH
async def test_progress_is_readable_while_the_job_runs(storage, queue, is_async):
    job_id = queue.enqueue(name=HANDLER).id

    def synchronous(job):
        job.progress("half")
        eventually(lambda: record(queue, job_id).progress == "half")
        job.progress("all")

    async def asynchronous(job):
        job.progress("half")
        await aeventually(lambda: record(queue, job_id).progress == "half")
        job.progress("all")

    await work_off(storage, asynchronous if is_async else synchronous)

    assert record(queue, job_id).state == "completed"
    assert record(queue, job_id).progress == "all"


async def test_progress_is_reported_at_most_ten_times_a_second(storage, queue):
    stop = asyncio.Event()
    said = 0

    async def handler(job):
        nonlocal said
        while not stop.is_set():
            said += 1
            job.progress(said)
            await asyncio.sleep(0)

    queue.enqueue(name=HANDLER)
    async with working(storage, handler):
        await aeventually(lambda: len(storage.reports) >= 3)
        sent = len(storage.reports)
        stop.set()

    assert said > 10 * sent


async def test_progress_of_many_jobs_is_reported_in_one_call(storage, queue):
    together = asyncio.Barrier(30)

    async def handler(job):
        await together.wait()
        job.progress(job.payload)

    queue.enqueue_many(range(30), name=HANDLER)
    await work_off(storage, handler, concurrency=30)

    assert len(storage.reports) <= 2
    assert sum(len(group) for group in storage.reports) == 30


async def test_reports_of_a_locked_job_wait_and_those_of_others_do_not():
    storage = LockedStorage()
    queue = Queue("work", storage=storage)
    locked, other = queue.enqueue_many([1, 2], name=HANDLER)
    storage.locked.add(locked.id)

    async def handler(job):
        job.log("begun")
        job.progress("half")
        yield 1

    async with working(storage, handler):
        await reached(queue, other.id, "completed")
        assert record(queue, locked.id).progress is None
        storage.locked.clear()
        await reached(queue, locked.id, "completed")

    for one in (locked, other):
        assert (record(queue, one.id).progress, len(record(queue, one.id).logs)) == ("half", 1)
        assert list(queue.stream(one.id, wait=0)) == [1]


async def test_items_of_a_locked_job_are_sent_again_no_faster_than_its_progress():
    storage = LockedStorage()
    queue = Queue("work", storage=storage)
    job = queue.enqueue(name=HANDLER)
    storage.locked.add(job.id)
    done = asyncio.Event()

    async def handler(job):
        job.progress(1)
        yield 1
        await done.wait()

    async with working(storage, handler):
        await aeventually(lambda: len(storage.reports) > 5, message="its progress is sent again")
        assert 1 < storage.emitted < 5 * len(storage.reports)
        storage.locked.clear()
        done.set()
        await reached(queue, job.id, "completed")


async def test_outcome_waits_for_the_reports_of_a_job_that_was_locked_for_a_moment():
    storage = LockedStorage()
    queue = Queue("work", storage=storage)
    job = queue.enqueue(name=HANDLER)
    finish = storage.afinish

    async def finish_unlocked(outcomes, then=None):
        storage.locked.clear()  # The other transaction has ended since the reports.
        return await finish(outcomes, then)

    async def handler(job):
        storage.locked.add(job.id)
        job.log("begun")
        yield 1

    storage.afinish = finish_unlocked
    async with working(storage, handler):
        await reached(queue, job.id, "completed")

    assert len(record(queue, job.id).logs) == 1
    assert list(queue.stream(job.id, wait=0)) == [1]


async def test_progress_is_a_snapshot(storage, queue):
    async def handler(job):
        state = {"rows": [1]}
        job.progress(state)
        state["rows"].append(2)

    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, handler)

    assert queue.get_job(job_id).progress == {"rows": [1]}


@BOTH
async def test_progress_that_cannot_be_encoded_raises_in_the_handler(storage, queue, is_async):
    def handler(job):
        with pytest.raises(SerializationError, match=r"progress\.files"):
            job.progress({"files": object()})
        return "went on"

    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, as_handler(handler, is_async))

    assert queue.get_result(job_id) == "went on"
    assert record(queue, job_id).progress is None


async def test_last_thousand_log_lines_are_kept(storage, queue):
    def handler(job):
        for number in range(2_500):
            job.log(number)

    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, handler)

    lines = [line for _, line in record(queue, job_id).logs]
    assert len(lines) == 1_000
    assert lines[-1] == "2499"


async def test_long_log_line_is_truncated(storage, queue):
    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, lambda job: job.log("x" * 1_000_000))

    assert len(record(queue, job_id).logs[0][1]) == MAX_LINE


async def test_log_lines_have_the_time_of_writing(storage, queue):
    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, lambda job: job.log("now"))

    done = record(queue, job_id)
    assert done.started_at <= done.logs[0][0] <= done.finished_at


async def test_log_lines_written_after_the_end_of_the_job_are_dropped(storage, queue):
    kept = []

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, kept.append) as worker:
        await aeventually(lambda: worker.counters.completed == 1)
        kept[0].log("too late")
        kept[0].progress("too late")
        await aeventually(lambda: storage.reports)

    done = record(queue, job_id)
    assert (done.progress, done.logs) == (None, ())


class SlowReports(RecordingStorage):
    """Its reports wait for a gate; the first one may fail then."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.waiting = 0
        self.fails = fails

    async def acall(self, method, *args, **kwargs):
        if method == self.report:
            self.waiting += 1
            await self.gate.wait()
            if self.fails:
                self.fails = False
                raise StorageUnavailableError("a moment, please")
        return await super().acall(method, *args, **kwargs)


@pytest.mark.parametrize("fails", [False, True])
async def test_reports_under_way_are_not_overtaken_by_later_reports(fails):
    storage = SlowReports(fails=fails)
    queue = Queue("work", storage=storage)

    async def handler(job):
        job.progress(1)
        job.log("one")
        await aeventually(lambda: storage.waiting == 1)
        job.progress(2)
        job.log("two")

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler) as worker:
        await aeventually(lambda: storage.waiting == 1 and worker.running == 0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert storage.waiting == 1
        assert record(queue, job_id).state == "active"
        storage.gate.set()
        done = await reached(queue, job_id, "completed")

    assert done.progress == 2
    assert [line for _, line in done.logs] == ["one", "two"]
