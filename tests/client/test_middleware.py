"""Middleware around enqueues: what it sees, changes, keeps back, and what its errors do."""

import logging
from dataclasses import replace

import pytest

from djqueue import ConfigurationError, Queue, Worker
from djqueue.core.job import EnqueueResult

PATH = "tests.client.test_middleware"
seen = []


class Outer:
    def enqueue(self, batch, call_next):
        seen.append(("outer", batch.name, len(batch.payloads)))
        answers = call_next(batch)
        seen.append(("outer", answers[0].status))
        return answers

    async def aenqueue(self, batch, call_next):
        seen.append(("outer", batch.name, len(batch.payloads)))
        answers = await call_next(batch)
        seen.append(("outer", answers[0].status))
        return answers


class Urgent:
    """Gives every job another priority."""

    def enqueue(self, batch, call_next):
        seen.append(("urgent", batch.name))
        return call_next(self.changed(batch))

    async def aenqueue(self, batch, call_next):
        seen.append(("urgent", batch.name))
        return await call_next(self.changed(batch))

    @staticmethod
    def changed(batch):
        return batch._replace(options=replace(batch.options, priority=9))


class Closed:
    """Takes nothing."""

    def enqueue(self, batch, call_next):
        return [EnqueueResult("none", "duplicate", batch.queue)] * len(batch.payloads)

    async def aenqueue(self, batch, call_next):
        return self.enqueue(batch, call_next)


class Broken:
    def enqueue(self, batch, call_next):
        raise PermissionError("not by you")

    async def aenqueue(self, batch, call_next):
        raise PermissionError("not by you")


@pytest.fixture(autouse=True)
def _forget():
    seen.clear()


@pytest.fixture
def use(settings):
    """Has the settings name these classes."""

    def use(*classes):
        paths = [kind if isinstance(kind, str) else f"{PATH}.{kind.__name__}" for kind in classes]
        settings.DJQUEUE = {**settings.DJQUEUE, "MIDDLEWARE": paths}

    return use


@pytest.fixture
def queue():
    return Queue("orders")


def test_the_first_is_the_outermost(use, queue, do):
    use(Outer, Urgent)
    do(queue, "enqueue_many", [1, 2])

    assert seen == [("outer", "orders", 2), ("urgent", "orders"), ("outer", "queued")]


def test_what_it_changes_is_what_is_enqueued(use, queue, do):
    use(Urgent)
    result = do(queue, "enqueue", 1)

    assert queue.get_job(result.id).options.priority == 9


def test_it_can_keep_jobs_back(use, queue, do):
    use(Outer, Closed, Urgent)

    assert do(queue, "enqueue", 1).status == "duplicate"
    assert queue.counts()["waiting"] == 0
    assert seen == [("outer", "orders", 1), ("outer", "duplicate")]


def test_what_it_raises_reaches_the_caller_and_nothing_is_stored(use, queue, do):
    use(Outer, Broken)

    with pytest.raises(PermissionError, match="not by you"):
        do(queue, "enqueue", 1)
    assert queue.counts()["waiting"] == 0


def test_a_job_that_is_waited_for_goes_through_it(use, queue, do):
    use(Outer)
    with Worker(handlers={"orders": lambda job: 7}):
        assert do(queue, "enqueue_and_wait", 1, wait=10) == 7

    assert seen == [("outer", "orders", 1), ("outer", "queued")]


def test_a_wrong_entry_is_named_at_the_first_enqueue(use, queue):
    use("tests.client.test_middleware.Nobody")

    with pytest.raises(ConfigurationError, match=r"MIDDLEWARE.*test_middleware\.Nobody"):
        queue.enqueue(1)


def test_the_logging_middleware_tells_of_enqueues_and_runs_and_no_payload(use, queue, do, caplog):
    def fail(job):
        raise KeyError("price")

    use("djqueue.middleware.LoggingMiddleware")
    with caplog.at_level(logging.INFO, "djqueue.jobs"):
        do(queue, "enqueue_many", ["very secret"] * 2, ids=["a", "b"], name="good")
        do(queue, "enqueue", "very secret", id="c", name="bad", max_attempts=1)
        with Worker(handlers={"good": lambda job: 7, "bad": fail}, until_empty=True) as worker:
            assert worker.join(20)

    lines = [record.getMessage() for record in caplog.records if record.name == "djqueue.jobs"]
    assert "2 of 2 jobs good enqueued in orders" in lines
    assert [line for line in lines if line.startswith("good [a] returned after ")]
    assert [line for line in lines if line.startswith("bad [c] raised KeyError after ")]
    assert "very secret" not in " ".join(lines)
