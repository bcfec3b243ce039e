"""A Redis without free memory rejects new data, and its jobs can still be finished."""

from threading import Event

import pytest

from djqueue import Queue, StorageUnavailableError, Worker
from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage
from djqueue.testing.factories import QUEUE, items_of
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.redis


@pytest.fixture
def storage(redis_options):
    made = RedisStorage(**redis_options)
    yield made
    made.close()


@pytest.fixture
def fill(redis_server):
    """Leaves the server no memory for more."""
    yield lambda: redis_server.run("CONFIG", "SET", "maxmemory", "1")
    redis_server.run("CONFIG", "SET", "maxmemory", "0")


def test_jobs_that_report_progress_complete_on_a_full_server(storage, fill):
    queue = Queue(QUEUE, storage=storage)
    started, is_full = Event(), Event()

    def handler(job):
        started.set()
        assert is_full.wait(PATIENCE)
        job.progress(0.5)
        job.log("halfway")

    ids = [queue.enqueue(name="report").id for _ in range(3)]
    with Worker(storage, handlers={"report": handler}, concurrency=1, maintain=False):
        assert started.wait(PATIENCE)
        fill()
        with pytest.raises(StorageUnavailableError, match="is out of memory"):
            queue.enqueue(name="report")
        is_full.set()

        eventually(lambda: storage.reads.states(QUEUE, ids) == [State.COMPLETED] * 3)

    there = queue.get_job(ids[0])
    assert (there.progress, [line for _, line in there.logs]) == (0.5, ["halfway"])


def test_refused_stream_items_of_a_full_server_do_not_delay_other_jobs(storage, fill, redis_server):
    queue = Queue(QUEUE, storage=storage)
    is_full = Event()

    def generator(job):
        yield "first"
        assert is_full.wait(PATIENCE)
        yield "second"

    handlers = {"stream": generator, "other": lambda job: None}
    streaming = queue.enqueue(name="stream").id
    with Worker(storage, handlers=handlers, concurrency=2, maintain=False):
        eventually(lambda: len(items_of(storage, streaming)) == 1)
        others = [queue.enqueue(name="other", delay=1).id for _ in range(5)]
        fill()
        is_full.set()

        eventually(lambda: storage.reads.states(QUEUE, others) == [State.COMPLETED] * 5)
        assert storage.reads.states(QUEUE, [streaming]) == [State.ACTIVE]
        redis_server.run("CONFIG", "SET", "maxmemory", "0")
        eventually(lambda: storage.reads.states(QUEUE, [streaming]) == [State.COMPLETED])

    assert len(items_of(storage, streaming)) == 2
