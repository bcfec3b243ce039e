"""`djqueue.testing.drain` on a database: its worker becomes the scheduler."""

from djqueue.client import Queue
from djqueue.testing.draining import drain


def test_drain_runs_waiting_jobs(make_storage):
    storage = make_storage()
    Queue("default", storage=storage).enqueue_many(range(3))

    assert drain(storage, handlers={"default": lambda _job: None}).completed == 3
    assert Queue("default", storage=storage).counts()["completed"] == 3
