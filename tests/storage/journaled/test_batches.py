"""Batches on the database storage: in the scheduler's process, and in a worker beside it."""

import pytest

from djqueue import Queue, Worker, job
from djqueue.client import registry
from djqueue.models import Job
from tests.support import PATIENCE


@pytest.mark.parametrize("place", ["scheduler", "client"])
def test_batch_is_one_call_with_outcome_for_each_job(request, scheduler, place, monkeypatch):
    monkeypatch.setattr(registry, "_types", {})
    calls = []

    async def many(jobs):
        # Its queries have a thread, and a connection, of their own.
        await Job.objects.acount()
        calls.append(len(jobs))
        return [one.args[0] if one.args[0] else UnlessZero() for one in jobs]

    storage = request.getfixturevalue(place)
    queue = Queue("work", storage=storage)
    payloads = [{"args": [n], "kwargs": {}} for n in range(3)]
    ids = [result.id for result in queue.enqueue_many(payloads, name="many", max_attempts=1)]
    handlers = {"many": job(name="many", batch={"size": 3, "wait": 20})(many)}
    with Worker(storage, handlers=handlers, concurrency=3, until_empty=True, connect=False) as worker:
        assert worker.join(PATIENCE)

    assert calls == [3]
    records = storage.reads.jobs("work", ids)
    assert [record.state for record in records] == ["failed", "completed", "completed"]
    assert records[0].error.type.endswith("UnlessZero")


class UnlessZero(Exception):
    pass
